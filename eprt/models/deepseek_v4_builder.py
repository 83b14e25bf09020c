"""DeepSeek V4 from a checkpoint: each rank reads every dense tensor, but only its own experts."""

import logging
from dataclasses import replace

import torch

from eprt.config import EngineConfig
from eprt.ep.group.group import EPGroup
from eprt.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights
from eprt.layers.compressor import Compressor, CompressorWeights
from eprt.layers.entry_indexer import EntryIndexer
from eprt.layers.hyper_connections import HyperConnection, StreamHead, StreamWeights
from eprt.layers.kept_tails import KeptTails
from eprt.layers.linear import JoinedLinear, Linear, as_format, plain_weight
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE
from eprt.layers.rope import cos_sin_table
from eprt.models.deepseek import DeepseekModel
from eprt.models.deepseek_builder import CPU, ModelBuilder, Progress, load_deepseek
from eprt.models.deepseek_v4 import DeepseekV4Model, StreamLayer, StreamMtpLayer
from eprt.models.deepseek_v4_tensors import layer_prefix, layer_ratio
from eprt.ops.weight import BLOCK, Weight

log = logging.getLogger(__name__)


def load_deepseek_v4(
    engine: EngineConfig, group: EPGroup, progress: Progress | None = None, device: torch.device = CPU
) -> DeepseekModel:
    """See loader.load_model."""
    return load_deepseek(engine, group, progress, device, V4Builder)


class V4Builder(ModelBuilder):
    """fp8 matrices stay fp8, fp4 experts fp4; with --quantization int8 all become int8."""

    def build(self) -> DeepseekModel:
        c, v = self.config, self.config.v4
        assert v is not None
        if v.drafter and self.group.rank == 0:
            log.warning("the checkpoint's drafter is %s, which is not implemented: served without drafts", v.drafter)
        ropes = {"window": v.window_rope, "compress": c.rope}
        self.cos_sin = {
            name: cos_sin_table(rope, c.qk_rope_head_dim, self.num_positions).to(self.device)
            for name, rope in ropes.items()
        }
        embed_VH = self.read("embed.weight")
        layers = [self.stream_layer(layer_idx) for layer_idx in range(c.num_hidden_layers)]
        head, norm = self.stream_head(""), self.norm("norm.weight", c.rms_norm_eps)
        mtp = self.stream_mtp_layer(c.num_hidden_layers) if self.mtp else None
        lm_head = Linear(Weight(self.read("head.weight")))
        kept_tails = None
        if self.group.size > 1 and self.device.type == "cpu":  # on GPUs ranks that are lost are not replaced
            kept_tails = KeptTails(self.engine.num_speculative_tokens)
        parts = embed_VH, layers, head, norm, lm_head, self.exchange, mtp, kept_tails
        return DeepseekV4Model(c, *parts, self.device)

    def stream_mtp_layer(self, layer_idx: int) -> StreamMtpLayer:
        """Its embedding and head are the model's own."""
        eps, prefix = self.config.rms_norm_eps, layer_prefix(self.config, layer_idx)
        return StreamMtpLayer(
            embed_norm=self.norm(f"{prefix}enorm.weight", eps),
            hidden_norm=self.norm(f"{prefix}hnorm.weight", eps),
            project_embed=self.linear(f"{prefix}e_proj"),
            project_hidden=self.linear(f"{prefix}h_proj"),
            layer=self.stream_layer(layer_idx),
            head=self.stream_head(prefix),
            head_norm=self.norm(f"{prefix}norm.weight", eps),
        )

    def stream_layer(self, layer_idx: int) -> StreamLayer:
        eps, prefix = self.config.rms_norm_eps, layer_prefix(self.config, layer_idx)
        return StreamLayer(
            HyperConnection(self.config, self.stream_weights(f"{prefix}hc_attn_")),
            self.norm(f"{prefix}attn_norm.weight", eps),
            self.compressed_attention(f"{prefix}attn.", layer_ratio(self.config, layer_idx)),
            HyperConnection(self.config, self.stream_weights(f"{prefix}hc_ffn_")),
            self.norm(f"{prefix}ffn_norm.weight", eps),
            self.moe(f"{prefix}ffn.", layer_idx),
        )

    def stream_head(self, prefix: str) -> StreamHead:
        return StreamHead(self.config, self.stream_weights(f"{prefix}hc_head_"))

    def stream_weights(self, prefix: str) -> StreamWeights:
        fn, base, scale = (self.checkpoint.read(f"{prefix}{name}").float() for name in ("fn", "base", "scale"))
        return StreamWeights(fn, base, scale)

    def compressed_attention(self, prefix: str, ratio: int) -> CompressedAttention:
        c, eps = self.config, self.config.rms_norm_eps
        table = self.cos_sin["compress" if ratio else "window"]
        compressor = self.compressor(f"{prefix}compressor.", ratio, c.v_head_dim) if ratio else None
        indexer = self.entry_indexer(f"{prefix}indexer.") if ratio == 4 else None
        weights = CompressedAttentionWeights(
            qkv_a=JoinedLinear((self.linear(f"{prefix}wq_a"), self.linear(f"{prefix}wkv"))),
            q_norm=self.norm(f"{prefix}q_norm.weight", eps),
            q_b=self.linear(f"{prefix}wq_b"),
            kv_norm=self.norm(f"{prefix}kv_norm.weight", eps),
            sink_N=self.checkpoint.read(f"{prefix}attn_sink").float(),
            o_a=self.groups(f"{prefix}wo_a"),
            o_b=self.linear(f"{prefix}wo_b"),
            compressor=compressor,
            indexer=indexer,
            pooled=self.pooled(prefix, indexer is not None) if ratio else None,
        )
        return CompressedAttention(c, weights, table)

    def entry_indexer(self, prefix: str) -> EntryIndexer:
        c = self.config
        assert c.v4 is not None
        compressor = self.compressor(f"{prefix}compressor.", 4, c.v4.index_head_dim)
        return EntryIndexer(c, self.linear(f"{prefix}wq_b"), compressor)

    def compressor(self, prefix: str, ratio: int, size: int) -> Compressor:
        norm = self.norm(f"{prefix}norm.weight", self.config.rms_norm_eps)
        weights = CompressorWeights(self.checkpoint.read(f"{prefix}ape").float(), norm)
        return Compressor(ratio, size, weights, self.cos_sin["compress"])

    def pooled(self, prefix: str, has_indexer: bool) -> JoinedLinear:
        """Of weights as they are in the files: the products are computed in fp32."""
        read = self.checkpoint.read

        def states(of_prefix: str) -> Linear:
            values, gates = (plain_weight(read(f"{of_prefix}{name}.weight")).data for name in ("wkv", "wgate"))
            dtype = torch.promote_types(values.dtype, gates.dtype)
            return Linear(plain_weight(torch.cat((values.to(dtype), gates.to(dtype)))))

        parts = [states(f"{prefix}compressor.")]
        if has_indexer:
            parts.append(states(f"{prefix}indexer.compressor."))
            parts.append(Linear(plain_weight(read(f"{prefix}indexer.weights_proj.weight"))))
        return JoinedLinear(parts)

    def groups(self, name: str) -> Weight:
        """A matrix's rows in equal parts, one for each group of heads. Parts that do not end with a block lose fp8."""
        assert self.config.v4 is not None
        whole, num = self.checkpoint.read_weight(f"{name}.weight"), self.config.v4.o_groups
        fmt, dtype = self.format_of(whole), self.config.dtype
        if whole.scale is not None and whole.shape[0] // num % BLOCK:
            whole, fmt = Weight(whole.dequantize()), "same"
        scale = None if whole.scale is None else whole.scale.unflatten(0, (num, -1))
        return as_format(Weight(whole.data.unflatten(0, (num, -1)), scale), fmt, dtype)

    def moe(self, prefix: str, layer_idx: int) -> EPMoE:
        """As the base class's, whose gate may have a table instead of a bias."""
        c, tensors, read = self.config, self.checkpoint.tensors, self.checkpoint.read
        assert c.moe is not None
        config = replace(c.moe, weight_format=self.expert_format(layer_idx))
        pool = self.pools[config.weight_format]
        where = {"ep": self.exchange, "slot_map": self.slot_map, "pool": pool, "device": self.device.type}
        moe = EPMoE(config, self.group, layer_idx=layer_idx, **where)
        bias, table = f"{prefix}gate.bias", f"{prefix}gate.tid2eid"
        given = (read(name) if name in tensors else None for name in (bias, table))
        moe.load_gate(read(f"{prefix}gate.weight"), *given)
        for slot, expert in enumerate(moe.expert_of_slot):
            if expert >= 0:
                moe.load_expert(slot, *self.swiglu(f"{prefix}experts.{expert}."))
        if c.moe.shared_intermediate_size:
            moe.load_shared(self.mlp(f"{prefix}shared_experts."))
        return moe

    def mlp(self, prefix: str) -> MLP:
        assert self.config.moe is not None
        gate, up, down = self.swiglu(prefix)
        matrix_format = self.format_of(gate, up, down)
        return MLP(gate, up, down, matrix_format, self.config.dtype, self.config.moe.swiglu_limit)
