"""Model: what the engine asks of a model. deepseek.py implements it; loader.py chooses by config.json's model_type."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.ep.exchange import Exchange
from eprt.layers.batch import ForwardBatch
from eprt.layers.layer_cache import LayerCache
from eprt.layers.moe import EPMoE


class ExpertPlace(NamedTuple):
    """Where an expert is to be."""

    row: int  # of the MoE layer, in moe_layers()
    expert: int  # the logical one
    buffer: int  # of the layer's pool


class Model(Protocol):
    """One rank's part of a model. T tokens, H hidden size, X rows whose logits are wanted, V vocabulary.

    All ranks run the same number of passes; one without requests passes an empty batch. The methods that have a body
    are what a model without MoE layers says; classes that derive from this one inherit them.
    """

    config: ModelConfig
    device: torch.device  # where the tokens and the cache are
    kv_dtype: torch.dtype  # of the cache
    exchange: Exchange  # the communication of all MoE layers; empty without any

    def forward(self, batch: ForwardBatch, cache_L: Sequence[LayerCache]) -> Tensor:
        """fp32 logits [X, V] of rows batch.logits_idx. cache_L: of each layer."""
        ...

    def forward_with_hidden(self, batch: ForwardBatch, cache_L: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """The same logits, and the normalised final hidden states [T, H] that draft() goes on from."""
        ...

    def draft(self, hidden_TH: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Hidden states [T, H] whose logits() predict the token after batch.token_id_T. hidden_TH: of the tokens before
        those, whose positions and cache slots the batch has. cache: of the MTP layer."""
        ...

    def logits(self, hidden_XH: Tensor) -> Tensor:
        """fp32 [X, V] of normalised hidden states."""
        ...

    def draft_logits(self, hidden_XH: Tensor) -> Tensor:
        """fp32 [X, V] of what draft() gave."""
        return self.logits(hidden_XH)

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Of one row of the hidden states that draft() takes."""
        return (self.config.hidden_size,)

    def moe_layers(self) -> list[EPMoE]:
        """Those whose experts are counted and can move, in order; the MTP layer's last, where it is loaded."""
        return []

    def moe_layer_indices(self) -> list[int]:
        """Their numbers in the checkpoint."""
        return []

    def load_experts(self, places: Sequence[ExpertPlace]) -> None:
        """Reads experts into buffers that no slot uses. Raises what the checkpoint does where it is gone."""
        raise NotImplementedError(f"{type(self).__name__} cannot read experts again")

    def expert_load(self) -> list[list[int]]:
        """Tokens routed to each expert slot of this rank since the start, per MoE layer."""
        return []

    def require_restartable(self) -> None:
        """Raises ValueError, saying why, unless it can go on with other ranks."""
        self.exchange.require_restartable()

    def attention_us(self) -> float | None:
        """Time in attention to this rank's tokens since the start; None where it is not measured, as on GPUs."""
        return None

    def reset_counters(self) -> None:
        """Forgets a warm-up: the tokens of its experts, and how long ranks that compiled waited for each other."""

    def close(self) -> None:
        """Frees the communication windows. Collective."""
