"""Configuration of a model: frozen, built once, checked once. Everything downstream may trust it.

Knows nothing of files (models/hf_config.py reads config.json) or of how the model is served (config.py). Importing it
does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _bfloat16() -> torch.dtype:
    import torch

    return torch.bfloat16


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer."""

    hidden_size: int  # H
    intermediate_size: int  # I of each routed expert
    num_experts: int  # logical ones
    top_k: int
    shared_intermediate_size: int = 0  # width of the shared expert, 0 for none
    # How gate logits become scores and a choice:
    #   "softmax"       DeepSeek V2: softmax over all experts, group score = max, weights renormalised only where
    #                   norm_topk_prob says so
    #   "sigmoid"       DeepSeek V3: sigmoid, correction bias on the choice only, group score = sum of the top two
    #   "sqrtsoftplus"  DeepSeek V4: the root of softplus, correction bias on the choice only
    #   "softmax_topk"  Mixtral, Qwen3-MoE: softmax, top-k, renormalised where norm_topk_prob says so
    scoring: str = "sigmoid"
    # Group-limited routing: the experts form n_group groups, of which a token may use topk_group; 1, 1 for none.
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0  # multiplies the gate weights
    num_max_tokens_per_rank: int = 1024  # tokens of one dispatch; more are split into rounds
    payload: str = "same"  # what dispatch sends: "same" (dtype) or "fp8"
    # Of expert weights: "same" (dtype), "fp8" (e4m3, 128x128 blocks), "int8" (per row) or "fp4" (e2m1, 32 columns).
    weight_format: str = "same"
    # Of every expert, the shared one too: gate is cut to at most this, up to -limit..limit. None: neither is.
    swiglu_limit: float | None = None
    dtype: torch.dtype = field(default_factory=_bfloat16)

    def __post_init__(self):
        scorings = ("softmax", "sigmoid", "softmax_topk", "sqrtsoftplus")
        self._must("scoring", self.scoring in scorings, "softmax, sigmoid, softmax_topk or sqrtsoftplus")
        self._must("top_k", 1 <= self.top_k <= self.num_experts, f"in 1..num_experts ({self.num_experts})")
        require(
            self.n_group >= 1 and self.num_experts % self.n_group == 0,
            f"n_group={self.n_group} does not divide num_experts={self.num_experts}",
        )
        self._must("topk_group", 1 <= self.topk_group <= self.n_group, f"in 1..n_group ({self.n_group})")
        num_eligible = self.topk_group * (self.num_experts // self.n_group)
        require(
            self.top_k <= num_eligible,
            f"top_k={self.top_k}: the {self.topk_group} groups that a token may use hold only {num_eligible} experts",
        )
        self._must("payload", self.payload in ("same", "fp8"), "same or fp8")
        self._must("weight_format", self.weight_format in ("same", "fp8", "int8", "fp4"), "same, fp8, int8 or fp4")
        self._must("swiglu_limit", self.swiglu_limit is None or self.swiglu_limit > 0, "above 0")
        multiple = self.weight_format != "fp4" or (self.hidden_size % 32 == 0 and self.intermediate_size % 32 == 0)
        self._must("weight_format", multiple, "not fp4: hidden and intermediate size must be multiples of 32 for that")
        require(
            str(self.dtype) in ("torch.float32", "torch.bfloat16"), f"dtype={self.dtype}: must be float32 or bfloat16"
        )
        require(
            min(self.hidden_size, self.intermediate_size, self.num_max_tokens_per_rank) >= 1,
            "hidden_size, intermediate_size and num_max_tokens_per_rank must be at least 1",
        )

    def _must(self, name: str, ok: bool, want: str) -> None:
        require(ok, f"{name}={getattr(self, name)!r}: must be {want}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. Names follow the checkpoints."""

    theta: float = 10000.0
    kind: str = "default"  # or "yarn", which all fields below belong to
    factor: float = 1.0
    original_max_position_embeddings: float = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None  # multiplies cos and sin; None: from factor, mscale and mscale_all_dim
    truncate: bool = True  # round the range of interpolated dimensions to whole dimensions

    def __post_init__(self):
        require(self.kind in ("default", "yarn"), f"rope type {self.kind!r}: must be default or yarn")
        require(self.theta > 0 and self.factor > 0, f"rope theta={self.theta}, factor={self.factor}: must be above 0")
        if self.kind == "yarn":
            require(self.theta > 1, f"rope theta={self.theta}: must be above 1 for yarn")
            length = self.original_max_position_embeddings
            require(length >= 1, f"rope original_max_position_embeddings={length}: must be at least 1")
            require(
                min(self.beta_fast, self.beta_slow) > 0,
                f"rope beta_fast={self.beta_fast}, beta_slow={self.beta_slow}: must be above 0",
            )


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses the tokens that DeepSeek-V3.2's attention reads."""

    num_heads: int
    head_dim: int  # of its queries and of its one key
    top_k: int  # tokens that a query attends to

    def __post_init__(self):
        smallest = min(self.num_heads, self.head_dim, self.top_k)
        require(smallest >= 1, f"index_n_heads, index_head_dim, index_topk are {self}: each must be at least 1")


@dataclass(frozen=True)
class V4Config:
    """What DeepSeek V4 has beyond ModelConfig. Names follow the checkpoints.

    Its attention caches one vector per token, key and value at once: ModelConfig's v_head_dim values, of which the last
    qk_rope_head_dim are rotated. ModelConfig.rope is the rotation of layers that compress.
    """

    # Per layer, tokens of a compressed entry: 0 (a window alone), 4 (an indexer chooses entries) or 128 (all are read).
    compress_ratios: tuple[int, ...]
    window_rope: RopeConfig  # of layers of ratio 0, MTP layers among them
    o_groups: int  # of heads, in the first product behind the attention
    o_lora_rank: int  # outputs of each of these groups
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int = 128  # tokens that every layer reads as they are, the query's own among them
    hc_mult: int = 4  # residual streams
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    num_hash_layers: int = 0  # leading layers whose experts a table gives for each token id
    expert_dtype: str = "fp4"  # of dummy weights, where the model is quantised; files say it themselves
    drafter: str = ""  # of the files, where it is not the MTP layer; not implemented then

    def __post_init__(self):
        known = all(ratio in (0, 4, 128) for ratio in self.compress_ratios)
        require(known, f"compress_ratios={list(self.compress_ratios)}: each must be 0, 4 or 128")
        require(self.sliding_window == 128, f"sliding_window={self.sliding_window}: must be 128")
        sizes = {name: getattr(self, name) for name in ("o_groups", "o_lora_rank", "index_n_heads", "index_head_dim")}
        require(min(*sizes.values(), self.index_topk) >= 1, f"{sizes}, index_topk={self.index_topk}: must be above 0")
        require(self.hc_mult >= 1, f"hc_mult={self.hc_mult}: must be at least 1")
        require(self.hc_sinkhorn_iters >= 1, f"hc_sinkhorn_iters={self.hc_sinkhorn_iters}: must be at least 1")
        require(self.hc_eps > 0, f"hc_eps={self.hc_eps}: must be above 0")


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek model, as models/hf_config.py reads it from config.json. Names follow the checkpoints."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    moe: MoEConfig | None
    dtype: torch.dtype = field(default_factory=_bfloat16)  # of activations, KV cache and unquantised weights
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_interleave: bool = True  # rotary pairs are (2i, 2i + 1), else (i, i + R/2)
    num_nextn_predict_layers: int = 0  # MTP layers in the files
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # of config.json and generation_config.json together
    quant_method: str | None = None  # "fp8" or None
    indexer: IndexerConfig | None = None  # of sparse attention (V3.2)
    v4: V4Config | None = None

    def __post_init__(self):
        require(self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim={self.qk_rope_head_dim}: must be even")
        if self.indexer is not None:
            self._check_indexer(self.indexer)

    def _check_indexer(self, indexer: IndexerConfig) -> None:
        size = indexer.head_dim
        require(
            size >= self.qk_rope_head_dim,
            f"index_head_dim={size}: must be at least qk_rope_head_dim ({self.qk_rope_head_dim}), which it rotates",
        )
        require(self.q_lora_rank is not None, "q_lora_rank is null: the indexer's queries come from the query latent")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_dim(self) -> int:
        """Values cached per token and layer: the latent and the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer_idx: int) -> bool:
        return self.moe is not None and layer_idx >= self.first_k_dense_replace
