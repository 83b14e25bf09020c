"""DeepseekModel: DeepSeek V2, V3, R1 and V3.2.

One forward per step, over a batch that mixes prompts and single new tokens.

T tokens, H hidden size, X rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.ep.exchange import Exchange
from eprt.gpu.readback import Readback
from eprt.layers.attention_team import AttentionTeam
from eprt.layers.batch import ForwardBatch
from eprt.layers.lanes import Lanes, StreamLanes
from eprt.layers.layer_cache import LayerCache
from eprt.layers.layer_step import Layer, Microbatch
from eprt.layers.linear import Linear
from eprt.layers.mla import MLA
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE
from eprt.layers.norm import RMSNorm
from eprt.layers.overlap import run_layers
from eprt.models.expert_source import ExpertSource
from eprt.models.model import ExpertPlace, Model


class DecoderLayer:
    """Attention and MLP, each behind a norm and added to the residual stream, which stays in the model's dtype."""

    def __init__(self, attention_norm: RMSNorm, attention: MLA, mlp_norm: RMSNorm, mlp: MLP | EPMoE):
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self._attend_decodes = attention.between(attention_norm, mlp_norm)

    def attend(self, microbatch: Microbatch, cache: LayerCache) -> tuple[Tensor, Tensor]:
        m = microbatch
        if self._attend_decodes is not None:
            both = self._attend_decodes(m.x_TH, m.batch, cache)
            if both is not None:
                return both
        attended_TH = self.attention(m.x_TH, self.attention_norm, m.batch, cache, m.plans)
        return self.mlp_norm.add(attended_TH, m.x_TH)

    def add_output(self, microbatch: Microbatch, y_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        return ops.add_rows(microbatch.x_TH, y_TH, shared_TH)


class MtpLayer:
    """Multi-token prediction: from the model's hidden state at a position and the embedding of the token that follows,
    to the hidden state from which the model's head reads the token after that one."""

    def __init__(
        self, embed_norm: RMSNorm, hidden_norm: RMSNorm, project: Linear, layer: DecoderLayer, head_norm: RMSNorm
    ):
        self.embed_norm, self.hidden_norm, self.project = embed_norm, hidden_norm, project
        self.layer, self.head_norm = layer, head_norm

    def __call__(
        self, hidden_TH: Tensor, embedded_TH: Tensor, batch: ForwardBatch, cache: LayerCache, lanes: Lanes
    ) -> Tensor:
        both_T2H = torch.cat((self.embed_norm(embedded_TH), self.hidden_norm(hidden_TH)), dim=-1)
        return self.head_norm(run_layers([self.layer], self.project(both_T2H), batch, [cache], lanes))


class DraftingLayer(Protocol):
    """What a model drafts with."""

    layer: Any  # its decoder layer

    def __call__(
        self, hidden_TH: Tensor, embedded_TH: Tensor, batch: ForwardBatch, cache: Any, lanes: Lanes
    ) -> Tensor: ...


class DeepseekModel(Model):
    """Dense weights are whole on each rank, and attention's, but for heads that a team shares. Batch-invariant: a row's
    logits depend neither on the rest of the batch nor on the number of ranks inside a node."""

    def __init__(
        self,
        config: ModelConfig,
        embed_VH: Tensor,
        layers: Sequence[Layer],
        norm: RMSNorm,
        lm_head: Linear,
        exchange: Exchange,
        mtp: DraftingLayer | None = None,
        device: torch.device | str = "cpu",
    ):
        self.config, self.kv_dtype, self.device = config, config.dtype, torch.device(device)
        self.embed_VH, self.layers, self.norm, self.lm_head = embed_VH, list(layers), norm, lm_head
        self.exchange, self.mtp = exchange, mtp
        self.expert_source: ExpertSource | None = None  # for load_experts(); the builder sets it
        self.attention_team: AttentionTeam | None = None  # that the layers' heads are spread over; the builder sets it
        self._decoder_layers = self.layers if mtp is None else [*self.layers, mtp.layer]
        loads = [moe.load_S for moe in self.moe_layers()]
        self._load = Readback(loads) if loads else None
        self.lanes = StreamLanes() if self.device.type == "cuda" else Lanes()

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, cache_L: Sequence[LayerCache]) -> Tensor:
        return self.logits(self.norm(self._run_layers(batch, cache_L)[batch.logits_idx]))

    @torch.no_grad()
    def forward_with_hidden(self, batch: ForwardBatch, cache_L: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        hidden_TH = self.norm(self._run_layers(batch, cache_L))
        return self.logits(hidden_TH[batch.logits_idx]), hidden_TH

    @torch.no_grad()
    def draft(self, hidden_TH: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        assert self.mtp is not None, "the model was loaded without its MTP layer"
        return self.mtp(hidden_TH, self._embed(batch), batch, cache, self.lanes)

    def logits(self, hidden_XH: Tensor) -> Tensor:
        # Normalised in the model's dtype, then not rounded again: bf16 logits would tie too often for sampling.
        return self.lm_head(hidden_XH, torch.float32)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        return self.embed_VH[batch.token_id_T.clamp(min=0)]

    def _run_layers(self, batch: ForwardBatch, cache_L: Sequence[LayerCache]) -> Tensor:
        return run_layers(self.layers, self._embed(batch), batch, cache_L, self.lanes)

    def moe_layers(self) -> list[EPMoE]:
        return [layer.mlp for layer in self._decoder_layers if isinstance(layer.mlp, EPMoE)]

    def moe_layer_indices(self) -> list[int]:
        return [i for i, layer in enumerate(self._decoder_layers) if isinstance(layer.mlp, EPMoE)]

    def load_experts(self, places: Sequence[ExpertPlace]) -> None:
        assert self.expert_source is not None, "the builder has not said where experts come from"
        self.expert_source.load(places, self.moe_layers())

    def expert_load(self) -> list[list[int]]:
        """As Model's; on a GPU as recent as Readback says."""
        return [] if self._load is None else [load_S.tolist() for load_S in self._load.read()]

    def require_restartable(self) -> None:
        if self.attention_team is not None:
            raise ValueError(
                f"other ranks cannot take part: ranks {self.attention_team.ranks} share attention (--attention-tp), "
                "and nobody else has their heads"
            )
        super().require_restartable()

    def attention_us(self) -> float | None:
        # A team's ranks compute each other's, whoever has the tokens.
        return self.lanes.attention_us() if self.attention_team is None else None

    def reset_counters(self) -> None:
        for moe in self.moe_layers():
            moe.reset_load()
        self.exchange.reset_stats()

    def close(self) -> None:
        self.exchange.close()
        if self.attention_team is not None:
            self.attention_team.close()
        if self.expert_source is not None:
            self.expert_source.close()
