"""Synthetic loads and routing traces with a seed, for tests and benchmarks of the planner without a model.

Nothing here is measured; each generator's docstring says what it assumes.
"""

import numpy as np
from eprt.balancer.trace import RoutingTrace


def lognormal_load(num_layers: int, num_experts: int, sigma: float = 0.8, seed: int = 0) -> np.ndarray:
    """float64 [L, E]. A sigma of 0.6 to 0.8 resembles loads published for DeepSeek-V3, whose busiest expert has about 3
    times the mean."""
    return np.random.default_rng(seed).lognormal(sigma=sigma, size=(num_layers, num_experts))


def zipf_load(num_layers: int, num_experts: int, exponent: float = 1.0, seed: int = 0) -> np.ndarray:
    """float64 [L, E]: the i-th busiest expert of a layer has load 1 / i^exponent; the order of experts is random."""
    rng = np.random.default_rng(seed)
    by_rank_E = np.arange(1, num_experts + 1) ** -float(exponent)
    return np.stack([rng.permutation(by_rank_E) for _ in range(num_layers)])


def drifting_load(
    num_windows: int, num_layers: int, num_experts: int, sigma: float = 0.8, step: float = 0.12, seed: int = 0
) -> np.ndarray:
    """float64 [W, L, E]: log loads follow a stationary autoregressive process. From window to window about step / 2.2
    of the tokens change their expert (total variation)."""
    rng = np.random.default_rng(seed)
    keep = np.sqrt(max(0.0, 1 - (step / sigma) ** 2))
    log_WLE = np.empty((num_windows, num_layers, num_experts))
    log_WLE[0] = rng.normal(scale=sigma, size=log_WLE.shape[1:])
    for window in range(1, num_windows):
        log_WLE[window] = keep * log_WLE[window - 1] + rng.normal(scale=step, size=log_WLE.shape[1:])
    return np.exp(log_WLE)


def topic_trace(
    num_layers: int,
    num_tokens: int,
    num_experts: int,
    top_k: int = 8,
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    num_topics: int = 32,
    strength: float = 1.0,
    skew: float = 0.0,
    seed: int = 0,
    token_seed: int = 0,
) -> RoutingTrace:
    """Routing of tokens that each have a topic, where a topic favours some experts of each layer.

    Scores are the topic's preferences times strength plus noise of the token, both standard normal. As in DeepSeek-V3,
    top_groups of num_groups groups are selected by the sum of their two best scores, and a bias per expert is trained
    until the load of all topics together is even.

    strength: 0 has no structure.
    skew: sigma of the lognormal frequency of the topics, which makes the load uneven again.
    token_seed: another value with the same seed gives other tokens of the same model.
    """
    rng, token_rng = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2, token_seed])
    frequency_Z = rng.lognormal(sigma=skew, size=num_topics)
    layers = []
    for _ in range(num_layers):
        prefer_ZE = rng.normal(size=(num_topics, num_experts)) * strength
        bias_E = _trained_bias(prefer_ZE, top_k, num_groups, top_groups, rng)
        topic_T = token_rng.choice(num_topics, num_tokens, p=frequency_Z / frequency_Z.sum())
        score_TE = prefer_ZE[topic_T] + token_rng.normal(size=(num_tokens, num_experts)) + bias_E
        layers.append(_top_k(score_TE, top_k, num_groups, top_groups))
    return RoutingTrace(tuple(layers))


def _trained_bias(
    prefer_ZE: np.ndarray, top_k: int, num_groups: int, top_groups: int, rng: np.random.Generator
) -> np.ndarray:
    num_topics, num_experts = prefer_ZE.shape
    bias_E = np.zeros(num_experts)
    for rate in np.geomspace(0.6, 0.02, 40):
        topic_T = rng.integers(num_topics, size=2048)
        score_TE = prefer_ZE[topic_T] + rng.normal(size=(2048, num_experts)) + bias_E
        load_E = np.bincount(_top_k(score_TE, top_k, num_groups, top_groups).ravel(), minlength=num_experts)
        bias_E -= rate * np.clip(load_E / load_E.mean() - 1, -1, 1)
    return bias_E


def _top_k(score_TE: np.ndarray, top_k: int, num_groups: int, top_groups: int) -> np.ndarray:
    if top_groups < num_groups:
        score_TGM = score_TE.reshape(len(score_TE), num_groups, -1).copy()
        group_TG = np.partition(score_TGM, -2, axis=2)[..., -2:].sum(2)
        dropped_TG = np.argpartition(-group_TG, top_groups, axis=1)[:, top_groups:]
        np.put_along_axis(score_TGM, dropped_TG[..., None], -np.inf, axis=1)
        score_TE = score_TGM.reshape(score_TE.shape)
    return np.argpartition(-score_TE, top_k - 1, axis=1)[:, :top_k].astype(np.int32)
