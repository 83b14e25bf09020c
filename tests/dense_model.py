"""DenseModel: a Model without MoE layers, for made-up models of tests."""

from collections.abc import Sequence

import torch
from torch import Tensor

from eprt.ep.exchange import Exchange
from eprt.layers.batch import ForwardBatch
from eprt.layers.layer_cache import LayerCache
from eprt.models.model import ExpertPlace, Model


class DenseModel(Model):
    """Subclasses have config and forward()."""

    device = torch.device("cpu")
    kv_dtype = torch.float32
    exchange = Exchange({})

    def forward_with_hidden(self, batch: ForwardBatch, cache_L: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def draft(self, hidden_TH: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden_XH: Tensor) -> Tensor:
        raise NotImplementedError

    def load_experts(self, places: Sequence[ExpertPlace]) -> None:
        raise AssertionError("a model without experts")
