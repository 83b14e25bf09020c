"""RoutingTrace: the experts that sampled tokens chose in each layer.

Co-activation and traffic are counted from it. Knows neither placements nor file formats.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .checks import check_values


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Routing choices of sampled tokens. Layers may have sampled different tokens (and different T); K is the same."""

    topk_idx: tuple[np.ndarray, ...]  # per layer int32 [T, K]: logical experts, -1 for a masked choice
    # Per layer int32 [T]: the rank of each token. None: unknown, every rank equally likely.
    source_gpu: tuple[np.ndarray, ...] | None = None
    # Per layer int32 [T]: the window of the load that each token was in, -1 before the first. None: unknown.
    window: tuple[np.ndarray, ...] | None = None

    def __post_init__(self):
        topk = tuple(_as_topk(idx_TK, layer) for layer, idx_TK in enumerate(self.topk_idx))
        counts = sorted({idx_TK.shape[1] for idx_TK in topk})
        if len(counts) > 1:
            raise ValueError(f"topk_idx has {counts} choices per token; all layers need the same number")
        object.__setattr__(self, "topk_idx", topk)
        for name in ("source_gpu", "window"):
            if (layers := getattr(self, name)) is not None:
                object.__setattr__(self, name, _per_token(layers, name, topk))

    @staticmethod
    def joined(traces: Sequence["RoutingTrace"]) -> "RoutingTrace":
        """The tokens of all traces: at least one, either all or none with sources, and likewise with windows."""

        def concatenated(name: str) -> tuple[np.ndarray, ...] | None:
            parts = [getattr(trace, name) for trace in traces]
            return None if parts[0] is None else tuple(np.concatenate(layer) for layer in zip(*parts, strict=True))

        topk_idx = concatenated("topk_idx")
        assert topk_idx is not None
        return RoutingTrace(topk_idx, concatenated("source_gpu"), concatenated("window"))

    @property
    def num_layers(self) -> int:
        return len(self.topk_idx)

    @property
    def num_tokens(self) -> int:
        """Of the layer with the most tokens."""
        return max(map(len, self.topk_idx), default=0)

    def check_experts(self, num_experts: int) -> None:
        """ValueError names layer, token and choice that is not an expert of a model with num_experts."""
        for layer, idx_TK in enumerate(self.topk_idx):
            rule = f"the model has experts 0 to {num_experts - 1}; the trace is from another model"
            check_values(idx_TK >= num_experts, idx_TK, "topk_idx", (f"layer {layer}, token", "choice"), rule)

    def check_sources(self, num_gpus: int) -> None:
        """ValueError names layer and token whose rank is not below num_gpus."""
        remedy = "leave out source_gpu to plan for a cluster other than the recorded one"
        rule = f"must be from 0 to {num_gpus - 1}; {remedy}"
        for layer, source_T in enumerate(self.source_gpu or ()):
            bad_T = (source_T < 0) | (source_T >= num_gpus)
            check_values(bad_T, source_T, "source_gpu", (f"layer {layer}, token",), rule)

    def check_windows(self, num_windows: int) -> None:
        """ValueError names layer and token whose window is not below num_windows."""
        rule = f"load has windows 0 to {num_windows - 1}, and -1 is before the first"
        for layer, window_T in enumerate(self.window or ()):
            bad_T = (window_T < -1) | (window_T >= num_windows)
            check_values(bad_T, window_T, "topk_window", (f"layer {layer}, token",), rule)

    def without_sources(self) -> "RoutingTrace":
        """The same tokens with unknown ranks."""
        return RoutingTrace(self.topk_idx, None, self.window)

    def every_other(self, start: int) -> "RoutingTrace":
        """Tokens start, start + 2, ... of each layer."""
        return self._select_rows([slice(start, None, 2)] * self.num_layers)

    def in_windows(self, first: int, end: int) -> "RoutingTrace":
        """The tokens of windows first .. end - 1. Needs `window`."""
        assert self.window is not None
        return self._select_rows(tuple(np.flatnonzero((w_T >= first) & (w_T < end)) for w_T in self.window))

    def renumbered_windows(self, window_of: np.ndarray) -> "RoutingTrace":
        """The same tokens with window w renumbered to window_of[w]. window_of: int [W]."""
        if self.window is None:
            return self
        numbers = np.append(window_of, -1).astype(np.int32)  # -1 stays -1
        return replace(self, window=tuple(numbers[window_T] for window_T in self.window))

    def _select_rows(self, rows_L: Sequence[Any]) -> "RoutingTrace":
        def selected(layers: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
            return tuple(array[rows] for array, rows in zip(layers, rows_L))

        return RoutingTrace(
            selected(self.topk_idx),
            self.source_gpu and selected(self.source_gpu),
            self.window and selected(self.window),
        )

    def load(self, num_experts: int) -> np.ndarray:
        """float64 [L, E]: how often each expert was chosen."""
        rows = [np.bincount(idx[idx >= 0], minlength=num_experts) for idx in self.topk_idx]
        return np.stack(rows).astype(np.float64)

    def coactivation(self, num_experts: int) -> np.ndarray:
        """float64 [L, E, E]: tokens that chose both experts; on the diagonal, tokens that chose the expert."""
        matrix_LEE = np.zeros((self.num_layers, num_experts, num_experts))
        for layer, idx_TK in enumerate(self.topk_idx):
            chosen_TE = np.zeros((len(idx_TK), num_experts + 1), dtype=np.float32)
            np.put_along_axis(chosen_TE, np.where(idx_TK < 0, num_experts, idx_TK), 1.0, axis=1)
            chosen_TE = chosen_TE[:, :num_experts]
            matrix_LEE[layer] = chosen_TE.T @ chosen_TE
        return matrix_LEE

    def sample(self, max_tokens: int, seed: int = 0) -> "RoutingTrace":
        """At most max_tokens tokens of each layer, drawn without replacement."""
        if self.num_tokens <= max_tokens:
            return self
        rng = np.random.default_rng(seed)
        return self._select_rows([np.sort(rng.permutation(len(idx_TK))[:max_tokens]) for idx_TK in self.topk_idx])


_LEAST, _MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


def _per_token(layers: Sequence[np.ndarray], name: str, topk: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """`layers` as int32 [T] arrays, one per layer; ValueError names the layer that does not fit topk."""
    arrays = tuple(np.asarray(array) for array in layers)
    if len(arrays) != len(topk):
        raise ValueError(f"{name} has {len(arrays)} layers, topk_idx has {len(topk)}")
    for layer, (idx_TK, array_T) in enumerate(zip(topk, arrays)):
        place = f"{name}[layer {layer}]"
        if array_T.dtype.kind not in "iu":
            raise ValueError(f"{place} has dtype {array_T.dtype}; it must hold integers")
        if array_T.shape != (len(idx_TK),):
            raise ValueError(f"{place} has shape {array_T.shape}; topk_idx has {len(idx_TK)} tokens there")
        bad_T = (array_T < _LEAST) | (array_T > _MOST)
        check_values(bad_T, array_T, name, (f"layer {layer}, token",), "does not fit in 32 bits")
    return tuple(np.ascontiguousarray(array_T, dtype=np.int32) for array_T in arrays)


def _as_topk(idx_TK: np.ndarray | Sequence, layer: int) -> np.ndarray:
    idx_TK = np.asarray(idx_TK)
    if idx_TK.ndim != 2 or idx_TK.shape[1] == 0:
        raise ValueError(f"topk_idx[layer {layer}] has shape {idx_TK.shape}; it must be [tokens, choices]")
    if idx_TK.dtype.kind not in "iu":
        raise ValueError(f"topk_idx[layer {layer}] has dtype {idx_TK.dtype}; it must hold integers")
    rule = "must be an expert (0 or more) or -1 for a masked choice"
    check_values((idx_TK < -1) | (idx_TK > _MOST), idx_TK, "topk_idx", (f"layer {layer}, token", "choice"), rule)
    return np.ascontiguousarray(idx_TK, dtype=np.int32)
