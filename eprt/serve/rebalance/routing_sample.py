"""RoutingSample: which experts the latest sampled tokens of all ranks chose, from the ranks' replies."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eprt.balancer import RoutingTrace
from eprt.serve.ranks.messages import RoutingReply


@dataclass(frozen=True, eq=False)
class RoutingSample:
    """Choices of T tokens in L MoE layers, K each. Fields are named as load files name them."""

    topk_idx: np.ndarray  # int16 [L, T, K], logical experts, -1: masked
    source_gpu: np.ndarray  # int32 [L, T], each token's rank
    topk_step: np.ndarray  # int64 [L, T], the step in which the token was computed

    @staticmethod
    def from_replies(replies: Sequence[RoutingReply]) -> "RoutingSample":
        """replies: every rank's, in rank order."""
        samples = [np.frombuffer(r.topk_idx, dtype=f"i{r.item_bytes}").reshape(r.shape) for r in replies]
        source_T = np.concatenate([np.full(s.shape[1], rank, dtype=np.int32) for rank, s in enumerate(samples)])
        step_T = np.concatenate([np.frombuffer(r.steps, dtype=np.int64) for r in replies])
        topk_LTK = np.concatenate(samples, axis=1).astype(np.int16)
        return RoutingSample(topk_LTK, *(np.tile(row_T, (len(topk_LTK), 1)) for row_T in (source_T, step_T)))

    def trace(self, max_tokens: int) -> RoutingTrace:
        """At most max_tokens of each layer, for a plan."""
        return RoutingTrace(tuple(self.topk_idx), tuple(self.source_gpu)).sample(max_tokens)


def as_npz(parts: dict[str, np.ndarray]) -> bytes:
    """Not compressed: compressing a large model's load takes seconds."""
    buffer = io.BytesIO()
    np.savez(buffer, **parts)  # type: ignore[arg-type]
    return buffer.getvalue()
