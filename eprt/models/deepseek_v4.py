"""DeepseekV4Model: DeepSeek V4. As deepseek.py, with several residual streams and attention to compressed entries.

T tokens, M streams, H hidden size, X rows whose logits are wanted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.ep.exchange import Exchange
from eprt.layers.batch import ForwardBatch
from eprt.layers.compressed_attention import CompressedAttention
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.hyper_connections import HyperConnection, StreamHead
from eprt.layers.kept_tails import KeptTails
from eprt.layers.lanes import Lanes
from eprt.layers.layer_step import Microbatch
from eprt.layers.linear import Linear
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE
from eprt.layers.norm import RMSNorm
from eprt.layers.overlap import run_layers
from eprt.models.deepseek import DeepseekModel


class StreamLayer:
    """Attention and MoE, each between a collapse of the streams and their expansion."""

    def __init__(
        self,
        attention_mix: HyperConnection,
        attention_norm: RMSNorm,
        attention: CompressedAttention,
        mlp_mix: HyperConnection,
        mlp_norm: RMSNorm,
        mlp: EPMoE,
    ):
        self.attention_mix, self.attention_norm, self.attention = attention_mix, attention_norm, attention
        self.mlp_mix, self.mlp_norm = mlp_mix, mlp_norm
        self.mlp: MLP | EPMoE = mlp

    def attend(self, microbatch: Microbatch, cache: LayerPages) -> tuple[Tensor, Tensor]:
        m = microbatch
        row_TH, mix = self.attention_mix(m.x_TH)
        streams_TMH = mix.expand(self.attention(row_TH, self.attention_norm, m.batch, cache, m.plans))
        row_TH, m.mix = self.mlp_mix(streams_TMH)
        return self.mlp_norm(row_TH), streams_TMH

    def add_output(self, microbatch: Microbatch, y_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        return microbatch.mix.expand(y_TH if shared_TH is None else y_TH + shared_TH)


class StreamMtpLayer:
    """Multi-token prediction: from the model's streams at a position and the embedding of the token that follows, to
    streams of the same kind, which a head of its own collapses."""

    def __init__(
        self,
        embed_norm: RMSNorm,
        hidden_norm: RMSNorm,
        project_embed: Linear,
        project_hidden: Linear,
        layer: StreamLayer,
        head: StreamHead,
        head_norm: RMSNorm,
    ):
        self.embed_norm, self.hidden_norm = embed_norm, hidden_norm
        self.project_embed, self.project_hidden = project_embed, project_hidden
        self.layer, self.head, self.head_norm = layer, head, head_norm

    def __call__(
        self, hidden_TH: Tensor, embedded_TH: Tensor, batch: ForwardBatch, cache: LayerPages, lanes: Lanes
    ) -> Tensor:
        """hidden_TH: the streams, [T, M, H]."""
        streams_TMH = self.project_hidden(self.hidden_norm(hidden_TH.flatten(0, 1))).view(hidden_TH.shape)
        streams_TMH = streams_TMH + self.project_embed(self.embed_norm(embedded_TH)).unsqueeze(1)
        return run_layers([self.layer], streams_TMH, batch, [cache], lanes)


class DeepseekV4Model(DeepseekModel):
    """hidden states between steps are the streams, [T, M, H]. Batch-invariant.

    kept_tails: where steps may be thrown away and computed again. The MTP layer's rings are not among them: what it
    drafts is checked.
    """

    def __init__(
        self,
        config: ModelConfig,
        embed_VH: Tensor,
        layers: Sequence[StreamLayer],
        head: StreamHead,
        norm: RMSNorm,
        lm_head: Linear,
        exchange: Exchange,
        mtp: StreamMtpLayer | None = None,
        kept_tails: KeptTails | None = None,
        device: torch.device | str = "cpu",
    ):
        super().__init__(config, embed_VH, layers, norm, lm_head, exchange, mtp, device)
        self.stream_mtp, self.kept_tails = mtp, kept_tails
        assert config.v4 is not None
        self.head, self.num_streams = head, config.v4.hc_mult

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        return self.num_streams, self.config.hidden_size

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, cache_L: Sequence[Any]) -> Tensor:
        return self.logits(self._collapsed(self._run_layers(batch, cache_L)[batch.logits_idx]))

    @torch.no_grad()
    def forward_with_hidden(self, batch: ForwardBatch, cache_L: Sequence[Any]) -> tuple[Tensor, Tensor]:
        streams_TMH = self._run_layers(batch, cache_L)
        return self.logits(self._collapsed(streams_TMH[batch.logits_idx])), streams_TMH

    def draft_logits(self, hidden_XH: Tensor) -> Tensor:
        assert self.stream_mtp is not None, "the model was loaded without its MTP layer"
        return self.logits(self.stream_mtp.head_norm(self.stream_mtp.head(hidden_XH)))

    def _collapsed(self, streams_XMH: Tensor) -> Tensor:
        return self.norm(self.head(streams_XMH))

    def _run_layers(self, batch: ForwardBatch, cache_L: Sequence[Any]) -> Tensor:
        if self.kept_tails is not None:
            self.kept_tails.begin(batch, cache_L)
        streams_TMH = self._embed(batch).unsqueeze(1).repeat(1, self.num_streams, 1)
        return run_layers(self.layers, streams_TMH, batch, cache_L, self.lanes)
