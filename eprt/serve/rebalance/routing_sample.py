"""RoutingSample: which experts the latest sampled tokens of all ranks chose, as the ranks told it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eprt.balancer import RoutingTrace
from eprt.serve.ranks.messages import Sampled


@dataclass(frozen=True, eq=False)
class RoutingSample:
    """L MoE layers, T tokens, K choices. topk_idx: int16 [L, T, K], logical experts, -1: masked. source_gpu: int32
    [L, T], each token's rank. topk_step: int64 [L, T], the step it was computed in. Named as load files name them."""

    topk_idx: np.ndarray
    source_gpu: np.ndarray
    topk_step: np.ndarray

    @staticmethod
    def of(told: Sequence[Sampled]) -> "RoutingSample":
        """told: every rank's, in rank order."""
        samples = [np.frombuffer(s.topk_idx, dtype=f"i{s.item_bytes}").reshape(s.shape) for s in told]
        source_T = np.concatenate([np.full(s.shape[1], rank, dtype=np.int32) for rank, s in enumerate(samples)])
        step_T = np.concatenate([np.frombuffer(s.steps, dtype=np.int64) for s in told])
        topk_LTK = np.concatenate(samples, axis=1).astype(np.int16)
        return RoutingSample(topk_LTK, *(np.tile(of_T, (len(topk_LTK), 1)) for of_T in (source_T, step_T)))

    def trace(self, max_tokens: int) -> RoutingTrace:
        """At most max_tokens of each layer, for a plan."""
        return RoutingTrace(tuple(self.topk_idx), tuple(self.source_gpu)).sample(max_tokens)
