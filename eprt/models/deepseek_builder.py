"""DeepSeek V2, V3, R1 and V3.2 from a checkpoint: each rank reads every dense tensor, but only its own experts, and
with --attention-tp only its own heads."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor

from eprt.config import EngineConfig, IndexerConfig, ModelConfig
from eprt.ep.exchange import Exchange, make_exchange
from eprt.ep.group.agreement import all_or_none, first_difference
from eprt.ep.group.group import EPGroup
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.attention_team import AttentionTeam, RoomSizes
from eprt.layers.experts import ExpertPool
from eprt.layers.head_shares import HeadShares
from eprt.layers.indexer import Indexer, IndexerWeights
from eprt.layers.linear import JoinedLinear, Linear, as_format, plain_weight
from eprt.layers.mla import LATENT_NORM_EPS, MLA, MLAWeights
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE
from eprt.layers.norm import RMSNorm
from eprt.layers.rope import cos_sin_table
from eprt.layers.sparse_mla import SparseMLA
from eprt.models.checkpoint import Checkpoint, TensorSource
from eprt.models.deepseek import DecoderLayer, DeepseekModel, MtpLayer
from eprt.models.dummy import DummyCheckpoint
from eprt.models.expert_copies import ExpertCopies
from eprt.models.expert_source import ExpertSource, read_swiglu
from eprt.models.families import family_of
from eprt.models.hf_config import read_model_config
from eprt.models.split_attention import SplitAttention
from eprt.models.tensor_family import expert_number
from eprt.models.weight_memory import expert_format
from eprt.ops.weight import Weight

CPU = torch.device("cpu")
log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


def load_deepseek(
    engine: EngineConfig,
    group: EPGroup,
    progress: Progress | None = None,
    device: torch.device = CPU,
    builder: "type[ModelBuilder] | None" = None,
) -> DeepseekModel:
    """See loader.load_model. builder: default ModelBuilder."""
    with all_or_none(group, "load the model"):
        config = read_model_config(engine)
        shares = HeadShares.for_config(engine, config) if engine.attention_tp > 1 else None
        if shares is not None:
            AttentionTeam.require_fit(engine, group)
        checkpoint = open_checkpoint(engine, config, device)
        names = family_of(config).expected_tensors(config, False)
        fingerprint = checkpoint.fingerprint(name for name in names if expert_number(name) is None)
    _check_same_model(group, engine.model_dir, config, fingerprint)
    exchange, slot_map = Exchange({}), None
    if config.moe is not None:
        slot_map = SlotMap.contiguous(config.moe.num_experts, group.size, engine.num_redundant_experts)
        modes = {"normal": None, "low_latency": engine.low_latency_max_tokens}
        how = {"modes": modes, "device": device.type, "exact_combine": engine.exact_combine}
        exchange = make_exchange(config.moe, group, slot_map.num_slots, **how)
    team = None if shares is None else AttentionTeam(group, shares, RoomSizes.for_config(engine, config, shares))
    with all_or_none(group, "load the model"):
        started_s = time.monotonic()
        how = group, exchange, slot_map, progress, team
        model = (builder or ModelBuilder)(engine, config, checkpoint, *how).build()
        model.attention_team = team
        if device.type == "cuda":
            torch.cuda.synchronize()
        gb, seconds = checkpoint.num_bytes_read / 1e9, max(time.monotonic() - started_s, 1e-9)
        where = f"[rank {group.rank}/{group.size}]"
        log.info(f"{where} loaded {gb:.3f} GB in {seconds:.2f} s: {gb / seconds:.2f} GB/s")
    checkpoint.close()
    copies = ExpertCopies(group, model.moe_layers()) if engine.expert_host_copies == "node" else None
    model.expert_source = ExpertSource(config, checkpoint, copies)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the copy stream, which nothing else would get
    return model


def open_checkpoint(engine: EngineConfig, config: ModelConfig, device: torch.device = CPU) -> TensorSource:
    """The tensors that the configuration asks for. CheckpointError where some are missing or wrong."""
    mtp, family = engine.num_speculative_tokens > 0, family_of(config)
    if mtp:
        family.check_mtp(config, engine.model_dir)
    if engine.load_format == "dummy":
        return DummyCheckpoint(engine.model_dir, config, family.expected_tensors(config, mtp), device)
    checkpoint = Checkpoint(engine.model_dir, device=device)
    family.check_tensors(config, checkpoint, mtp)
    return checkpoint


def _check_same_model(group: EPGroup, model_dir: str, config: ModelConfig, fingerprint: str) -> None:
    """Every rank may read a directory of its own host. ValueError, on all ranks, if they hold different models."""
    fields = asdict(config)
    for part in ("moe", "rope", "indexer", "v4"):
        fields |= {f"{part}.{name}": value for name, value in (fields.pop(part) or {}).items()}
    differs = first_difference(group, {**fields, "weights": fingerprint})
    if differs is None:
        return
    dirs = group.allgather(model_dir)
    what = "other weights" if differs.name == "weights" else f"{differs.name}={differs.value} ({differs.of_rank0})"
    raise ValueError(
        f"[rank {group.rank}/{group.size}] rank {differs.rank} has another model in {dirs[differs.rank]} than rank 0 "
        f"in {dirs[0]}: {what}; give all ranks the same checkpoint"
    )


class ModelBuilder:
    """Reads tensors and puts layers together. fp8 matrices stay fp8; with --quantization int8 all become int8."""

    def __init__(
        self,
        engine: EngineConfig,
        config: ModelConfig,
        checkpoint: TensorSource,
        group: EPGroup,
        exchange: Exchange,
        slot_map: SlotMap | None,
        progress: Progress | None,
        team: AttentionTeam | None = None,
    ):
        self.engine, self.config, self.checkpoint, self.group = engine, config, checkpoint, group
        self.device = checkpoint.device
        self.family, self.exchange, self.slot_map = family_of(config), exchange, slot_map
        self.spare_experts = engine.spare_experts
        self.int8 = engine.quantization == "int8"
        self.num_positions = engine.max_model_len or config.max_position_embeddings
        if self.num_positions > config.max_position_embeddings:
            raise ValueError(
                f"--max-model-len {self.num_positions}: this model has positions up to {config.max_position_embeddings}"
            )
        self.mtp = engine.num_speculative_tokens > 0
        self.pools = self._make_pools()
        self.split = None if team is None else SplitAttention(config, checkpoint, team)
        self._announce_reads(progress)

    def build(self) -> DeepseekModel:
        c = self.config
        embed_VH = self.read("model.embed_tokens.weight")
        head_VH = embed_VH if c.tie_word_embeddings else self.read("lm_head.weight")
        self.cos_sin_PR = cos_sin_table(c.rope, c.qk_rope_head_dim, self.num_positions).to(self.device)
        layers = [self.decoder_layer(layer_idx) for layer_idx in range(c.num_hidden_layers)]
        norm = self.norm("model.norm.weight", c.rms_norm_eps)
        mtp = self.mtp_layer(c.num_hidden_layers) if self.mtp else None
        return DeepseekModel(c, embed_VH, layers, norm, Linear(Weight(head_VH)), self.exchange, mtp, self.device)

    def mtp_layer(self, layer_idx: int) -> MtpLayer:
        """Its embedding and head are the model's own; the checkpoint's copies of them stay on disk."""
        c, prefix = self.config, f"model.layers.{layer_idx}."
        return MtpLayer(
            embed_norm=self.norm(f"{prefix}enorm.weight", c.rms_norm_eps),
            hidden_norm=self.norm(f"{prefix}hnorm.weight", c.rms_norm_eps),
            project=self.linear(f"{prefix}eh_proj"),
            layer=self.decoder_layer(layer_idx),
            head_norm=self.norm(f"{prefix}shared_head.norm.weight", c.rms_norm_eps),
        )

    def decoder_layer(self, layer_idx: int) -> DecoderLayer:
        c, prefix = self.config, f"model.layers.{layer_idx}."
        return DecoderLayer(
            self.norm(f"{prefix}input_layernorm.weight", c.rms_norm_eps),
            self.attention(f"{prefix}self_attn."),
            self.norm(f"{prefix}post_attention_layernorm.weight", c.rms_norm_eps),
            self.moe(f"{prefix}mlp.", layer_idx) if c.is_moe_layer(layer_idx) else self.mlp(f"{prefix}mlp."),
        )

    def attention(self, prefix: str) -> MLA:
        c = self.config
        if self.split is not None:
            return self.split.layer(self, prefix)
        has_lora = c.q_lora_rank is not None
        q, kv = self.linear(prefix + ("q_a_proj" if has_lora else "q_proj")), f"{prefix}kv_a_proj_with_mqa"
        weights = MLAWeights(
            qkv_a=JoinedLinear((q, self.linear(kv))),
            q_a_norm=self.norm(f"{prefix}q_a_layernorm.weight", LATENT_NORM_EPS) if has_lora else None,
            q_b=self.linear(f"{prefix}q_b_proj") if has_lora else None,
            kv_a_norm=self.norm(f"{prefix}kv_a_layernorm.weight", LATENT_NORM_EPS),
            w_kv_b=as_format(self.checkpoint.read_weight(f"{prefix}kv_b_proj.weight"), "same", c.dtype).data,
            o=self.linear(f"{prefix}o_proj"),
        )
        if c.indexer is None:
            return MLA(c, weights, self.cos_sin_PR)
        return SparseMLA(c, weights, self.indexer(c.indexer, f"{prefix}indexer."), self.cos_sin_PR)

    def indexer(self, config: IndexerConfig, prefix: str) -> Indexer:
        """Its norm and the weights of its heads compute in fp32."""
        read = self.checkpoint.read
        weights = IndexerWeights(
            query=self.linear(f"{prefix}wq_b"),
            key=self.linear(f"{prefix}wk"),
            key_norm_D=read(f"{prefix}k_norm.weight").float(),
            key_norm_bias_D=read(f"{prefix}k_norm.bias").float(),
            head_weights=Linear(plain_weight(read(f"{prefix}weights_proj.weight"))),
        )
        return Indexer(config, weights, self.cos_sin_PR)

    def moe(self, prefix: str, layer_idx: int) -> EPMoE:
        assert self.config.moe is not None
        config = replace(self.config.moe, weight_format=self.expert_format(layer_idx))
        pool = self.pools[config.weight_format]
        where = {"ep": self.exchange, "slot_map": self.slot_map, "pool": pool, "device": self.device.type}
        moe = EPMoE(config, self.group, layer_idx=layer_idx, **where)
        bias = f"{prefix}gate.e_score_correction_bias"
        moe.load_gate(
            self.checkpoint.read(f"{prefix}gate.weight"),
            self.checkpoint.read(bias) if bias in self.checkpoint.tensors else None,
        )
        for slot, expert in enumerate(moe.expert_of_slot):
            if expert >= 0:
                moe.load_expert(slot, *self.swiglu(f"{prefix}experts.{expert}."))
        if self.config.moe.shared_intermediate_size:
            moe.load_shared(self.mlp(f"{prefix}shared_experts."))
        return moe

    def mlp(self, prefix: str) -> MLP:
        gate, up, down = self.swiglu(prefix)
        return MLP(gate, up, down, self.format_of(gate, up, down), self.config.dtype)

    def _make_pools(self) -> dict[str, ExpertPool]:
        """One per format: all its layers' slots and the spare experts. On CPUs untouched memory is not used."""
        c = self.config
        if c.moe is None or self.slot_map is None:
            return {}
        layers = [layer_idx for layer_idx in range(c.num_hidden_layers + self.mtp) if c.is_moe_layer(layer_idx)]
        num_slots = self.slot_map.num_slots // self.group.size
        formats = [self.expert_format(layer_idx) for layer_idx in layers]
        return {
            name: ExpertPool(c.moe, formats.count(name) * num_slots + self.spare_experts, name, self.device)
            for name in set(formats)
        }

    # -- single tensors --

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(name).to(self.config.dtype)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.read(name), eps)

    def linear(self, name: str) -> Linear:
        weight, bias = self.checkpoint.read_weight(f"{name}.weight"), f"{name}.bias"
        bias_N = self.read(bias) if bias in self.checkpoint.tensors else None
        return Linear(as_format(weight, self.format_of(weight), self.config.dtype), bias_N)

    def swiglu(self, prefix: str) -> tuple[Weight, Weight, Weight]:
        return read_swiglu(self.checkpoint, prefix, self.family.matrices)

    def expert_format(self, layer_idx: int) -> str:
        """One format for all experts of a layer, those of other ranks included: the same on every rank."""
        return expert_format(self.engine, self.config, self.checkpoint, layer_idx)

    def format_of(self, *weights: Weight) -> str:
        if self.int8:
            return "int8"
        return "fp8" if all(w.data.dtype == torch.float8_e4m3fn for w in weights) else "same"

    # -- what will be read --

    def _announce_reads(self, progress: Progress | None) -> None:
        checkpoint, names = self.checkpoint, self._names_to_read()
        if progress is not None:
            total = sum(checkpoint.tensors[name].num_bytes for name in names)
            checkpoint.on_read = lambda: progress(checkpoint.num_bytes_read, total)
        checkpoint.read_ahead(names)
        needed = set(names)
        left = [name for name in checkpoint.tensors if name not in needed]
        skipped = sum(self.family.is_skipped(self.config, name, checkpoint.tensors) for name in left)
        if skipped and self.group.rank == 0:
            log.info("%d tensors are not needed and stay on disk (MTP layers, computed buffers)", skipped)

    def _names_to_read(self) -> list[str]:
        local = set() if self.slot_map is None else set(self.slot_map.experts_of_rank(self.group.rank, self.group.size))
        names = []
        for name in self.family.expected_tensors(self.config, self.mtp):
            expert = expert_number(name)
            if expert is None or expert in local:
                names.append(name)
                if self.checkpoint.is_quantised(name):
                    names.append(self.checkpoint.scale_name(name))
        return names
