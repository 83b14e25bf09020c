"""Hyper-connections (DeepSeek-V4, mHC): M residual streams beside each other instead of one.

Before a sublayer the streams become one row (collapse); behind it every stream is a mixture of all of them plus its
share of the sublayer's output (expand). The weights of both come from the streams themselves; those of the mixture are
made doubly stochastic by Sinkhorn's iteration. All in fp32, each row by itself: sums are written out, because torch's
reductions may add in another order in another batch.

T tokens, M streams, H hidden size. Knows nothing of what the sublayers compute.
"""

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.linear import Linear, plain_weight

_LANES = 16  # columns per row that a vectorised function of torch gets whole, whatever the number of rows


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
        return (self.mixed_TMH + self.post_TM.unsqueeze(-1) * out_TH.float().unsqueeze(1)).to(out_TH.dtype)


class _StreamProjection:
    def __init__(self, config: ModelConfig, weights: StreamWeights):
        assert config.v4 is not None
        self.num_streams, self.hc_eps, self.norm_eps = config.v4.hc_mult, config.v4.hc_eps, config.rms_norm_eps
        self.linear = Linear(plain_weight(weights.fn_KW.float().contiguous()))
        self.base_K, self.scale = weights.base_K.float(), weights.scale.float()
        self._ones = torch.ones(weights.fn_KW.shape[1])

    def _project(self, x_TMH: Tensor) -> Tensor:
        """fp32 [T, outputs] of the normalised streams."""
        return self.linear(ops.rms_norm(x_TMH.flatten(1).float(), self._ones, self.norm_eps))

    def _collapse(self, x_TMH: Tensor, pre_TM: Tensor) -> Tensor:
        parts = (pre_TM[:, j, None] * x_TMH[:, j].float() for j in range(self.num_streams))
        return reduce(add, parts).to(x_TMH.dtype)


class HyperConnection(_StreamProjection):
    """Around one sublayer."""

    def __init__(self, config: ModelConfig, weights: StreamWeights):
        super().__init__(config, weights)
        assert config.v4 is not None
        self.num_iterations = config.v4.hc_sinkhorn_iters

    def __call__(self, x_TMH: Tensor) -> tuple[Tensor, StreamMix]:
        """(the sublayer's input [T, H], what to do with its output)."""
        num = self.num_streams
        projected_TK = self._project(x_TMH)
        scale_K = self.scale.repeat_interleave(torch.tensor([num, num, num * num]))
        weight_TK = projected_TK * scale_K + self.base_K
        open_TK = _sigmoid(weight_TK[:, : 2 * num])
        comb_TMM = self._doubly_stochastic(weight_TK[:, 2 * num :].unflatten(1, (num, num)))
        mixed = [reduce(add, (comb_TMM[:, j, k, None] * x_TMH[:, j].float() for j in range(num))) for k in range(num)]
        mix = StreamMix(torch.stack(mixed, dim=1), 2 * open_TK[:, num:])
        return self._collapse(x_TMH, open_TK[:, :num] + self.hc_eps), mix

    def _doubly_stochastic(self, logits_TMM: Tensor) -> Tensor:
        """comb[j, k]: the weight of old stream j in new stream k."""
        comb = logits_TMM.softmax(dim=-1) + self.hc_eps
        comb = comb / (_sum(comb, 1) + self.hc_eps)
        for _ in range(self.num_iterations - 1):
            comb = comb / (_sum(comb, 2) + self.hc_eps)
            comb = comb / (_sum(comb, 1) + self.hc_eps)
        return comb


class StreamHead(_StreamProjection):
    """From the streams to one row, behind the last layer."""

    def __call__(self, x_TMH: Tensor) -> Tensor:
        weight_TM = self._project(x_TMH) * self.scale + self.base_K
        return self._collapse(x_TMH, _sigmoid(weight_TM) + self.hc_eps)


def _sigmoid(x_TK: Tensor) -> Tensor:
    """In rows of whole vectors: torch computes what is left behind the last one in another way."""
    size = x_TK.shape[1]
    return torch.nn.functional.pad(x_TK, (0, -size % _LANES)).sigmoid()[:, :size]


def _sum(x: Tensor, dim: int) -> Tensor:
    return reduce(add, x.split(1, dim=dim))
