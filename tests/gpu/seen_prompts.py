"""SeenPrompts: what one way to compute prompts gave, entries and probabilities, and how far that is from another way's.

Every answer is forced, so that all ways continue the same texts. Knows nothing of ranks that share prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt import LLM, SamplingParams
from eprt.ops.kv_format import KVFormat

NUM_TOKENS = 4  # of an answer, a page's boundary or not
_LIKELIEST = 20


@dataclass(frozen=True, eq=False)
class SeenPrompts:
    """Of the first rank's engine. L layers, T tokens, D values of an entry."""

    entries_LTD: Tensor | None  # float32: of the first prompt and its answer, but the last token; None on other ranks
    likely: list[dict[int, float]]  # of each token of each answer: the likeliest tokens' probabilities

    @staticmethod
    def of(llm: LLM, prompts: Sequence[Sequence[int]], one_by_one: bool) -> "SeenPrompts":
        """All prompts twice: the second time they find their pages. The first prompt is computed alone. Collective."""
        vocab_size = llm.engine.model.config.vocab_size
        params = [_forced(1 + (5 + 7 * i) % (vocab_size - 1)) for i in range(len(prompts))]
        row = llm.engine.scheduler.rows._unused[-1]  # the next request's
        outputs = llm.generate([prompts[0]], [params[0]])
        entries = _entries(llm, row, len(prompts[0]) + NUM_TOKENS - 1) if llm.group.rank == 0 else None
        for _ in range(2):
            if one_by_one:
                for prompt, how in zip(prompts, params):
                    outputs += llm.generate([prompt], [how])
            else:
                outputs += llm.generate(prompts, params)
        likely = [_probabilities(top) for output in outputs for top in output.outputs[0].top_logprobs or ()]
        assert len(likely) == NUM_TOKENS * len(outputs)
        return SeenPrompts(entries, likely)

    def distances(self, other: "SeenPrompts") -> Tensor:
        """Of each distribution, from 0 to 1: the total variation that the likeliest tokens show."""
        return torch.tensor([_distance(*pair) for pair in zip(self.likely, other.likely, strict=True)])

    def entry_errors(self, other: "SeenPrompts") -> Tensor:
        """[L, T]: the length of the difference of two entries over the other one's."""
        assert self.entries_LTD is not None and other.entries_LTD is not None
        return (self.entries_LTD - other.entries_LTD).norm(dim=2) / other.entries_LTD.norm(dim=2)


def require_no_worse(
    name: str,
    got: SeenPrompts,
    usual: SeenPrompts,
    exact: SeenPrompts,
    num_smooth: int,
    rounding: float = 2.0**-8,
    slack: float = 0.01,
) -> None:
    """That `got` is about as far from `exact` as `usual` is.

    num_smooth: the first so many layers' entries depend on no choice of experts, which a last bit can change: none of
    their entries may be off. In other layers half of the entries say it.
    rounding, slack: error of an entry, and mean error of probabilities, allowed where the usual way has none.
    """
    if got.entries_LTD is not None:
        _compare_entries(name, got, usual, exact, num_smooth, rounding)
    ours, theirs = got.distances(exact), usual.distances(exact)
    text = f"{name}: probabilities off by {ours.mean():.5f} (at most {ours.max():.3f}), usually {theirs.mean():.5f}"
    print(f"{text} ({theirs.max():.3f}); from the usual {got.distances(usual).mean():.5f}", flush=True)
    assert ours.mean() <= 2 * theirs.mean() + slack, name


def _compare_entries(
    name: str, got: SeenPrompts, usual: SeenPrompts, exact: SeenPrompts, num_smooth: int, rounding: float
) -> None:
    ours, theirs, apart = got.entry_errors(exact), usual.entry_errors(exact), got.entry_errors(usual)
    for layer, (our_T, their_T, apart_T) in enumerate(zip(ours, theirs, apart)):
        same = (apart_T == 0).float().mean()
        print(
            f"{name}, layer {layer}: {same:.0%} of entries have the usual bits; off by {our_T.median():.5f} (at most "
            f"{our_T.max():.4f}), usually {their_T.median():.5f} ({their_T.max():.4f}); from the usual "
            f"{apart_T.median():.5f} ({apart_T.max():.4f}, of token {int(apart_T.argmax())})",
            flush=True,
        )
    for layer, (our_T, their_T) in enumerate(zip(ours, theirs)):
        assert our_T.median() <= 1.25 * their_T.median() + rounding, (name, layer)
        assert layer >= num_smooth or our_T.max() <= 2 * their_T.max() + rounding, (name, layer, int(our_T.argmax()))


def _forced(token_id: int) -> SamplingParams:
    bias = {"logit_bias": {token_id: 100.0}, "temperature": 0}  # log-probabilities are those before the bias
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=_LIKELIEST, **bias)


def _probabilities(top: Sequence[tuple[int, float]]) -> dict[int, float]:
    return {token_id: math.exp(logprob) for token_id, logprob in top}


def _distance(a: dict[int, float], b: dict[int, float]) -> float:
    """A token that only one has is at most as likely in the other as the least likely there."""
    both = sum(abs(a[i] - b[i]) for i in a.keys() & b.keys())
    one = sum(max(0.0, p - min(y.values())) for x, y in ((a, b), (b, a)) for i, p in x.items() if i not in y)
    return (both + one) / 2


def _entries(llm: LLM, row: int, num_tokens: int) -> Tensor:
    """Of the request that had the row last, which is not used any more."""
    engine, config = llm.engine, llm.engine.model.config
    cache_L, rows = engine.runner.cache_L, engine.runner.rows
    entry = KVFormat(config.kv_lora_rank, config.qk_rope_head_dim, cache_L[0].latents.dtype)
    pages = rows.page_table_MP[row, : -(-num_tokens // rows.page_size)].tolist()
    entries_L = [entry.decode(cache.latents[pages].flatten(0, 1)[:num_tokens].cpu()) for cache in cache_L]
    return torch.stack(entries_L)
