"""Hyper-connections (DeepSeek-V4, mHC): M residual streams beside each other instead of one.

Before a sublayer the streams become one row (collapse); behind it every stream is a mixture of all of them plus its
share of the sublayer's output (expand). The weights of both come from the streams themselves; those of the mixture are
made doubly stochastic by Sinkhorn's iteration. All in fp32, each row by itself.

T tokens, M streams, H hidden size. Knows nothing of what the sublayers compute.
"""

from dataclasses import dataclass

from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.ops.streams import StreamProjection


@dataclass(frozen=True)
class StreamWeights:
    """Of one collapse: the projection and what is made of it. All fp32."""

    fn_KW: Tensor  # [outputs, M * H]
    base_K: Tensor  # [outputs]
    scale: Tensor  # [3]: of collapse, expand and mixture; the last collapse of a model has the first alone


@dataclass(frozen=True)
class StreamMix:
    """How a sublayer's output goes back into the streams."""

    mixed_TMH: Tensor  # fp32, the mixture of the streams before the sublayer
    post_TM: Tensor  # fp32, each stream's share of the output

    def expand(self, out_TH: Tensor) -> Tensor:
        """The new streams, in out's dtype."""
        return ops.expand_streams(self.mixed_TMH, self.post_TM, out_TH)


class HyperConnection:
    """Around one sublayer."""

    def __init__(self, config: ModelConfig, weights: StreamWeights):
        self.projection = _projection(config, weights)

    def __call__(self, x_TMH: Tensor) -> tuple[Tensor, StreamMix]:
        """(the sublayer's input [T, H], what to do with its output)."""
        row_TH, mixed_TMH, post_TM = ops.mix_streams(x_TMH, self.projection)
        return row_TH, StreamMix(mixed_TMH, post_TM)


class StreamHead:
    """From the streams to one row, behind the last layer."""

    def __init__(self, config: ModelConfig, weights: StreamWeights):
        self.projection = _projection(config, weights)

    def __call__(self, x_TMH: Tensor) -> Tensor:
        return ops.collapse_streams(x_TMH, self.projection)


def _projection(config: ModelConfig, weights: StreamWeights) -> StreamProjection:
    assert config.v4 is not None
    fn_KW, base_K, scale = (each.float().contiguous() for each in (weights.fn_KW, weights.base_K, weights.scale))
    rule = config.v4.hc_eps, config.rms_norm_eps, config.v4.hc_sinkhorn_iters
    return StreamProjection(fn_KW, base_K, scale, *rule)
