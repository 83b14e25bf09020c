"""Frozen configuration, built once and validated once. Everything downstream may trust it.

Knows nothing of files (models/hf_config.py reads config.json) or of the environment (env.py). Importing it does not
load torch: the launcher and the HTTP frontend check flags with EngineConfig in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _any_of(choices: tuple[str | None, ...]) -> str:
    *words, last = [choice for choice in choices if choice is not None]
    return f"{', '.join(words)} or {last}" if words else last


def _graph_sizes(sizes: Any) -> tuple[int, ...]:
    """Ascending, each once."""
    listed = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    _require(
        isinstance(sizes, Iterable) and all(type(size) is int and size >= 1 for size in listed),
        f"--graph-sizes {' '.join(map(str, listed))}: must be whole numbers of at least 1",
    )
    return tuple(sorted(set(listed)))


def _bfloat16() -> torch.dtype:
    import torch

    return torch.bfloat16


@dataclass(frozen=True)
class MoEConfig:
    """One MoE layer.

    hidden_size H; intermediate_size I of each routed expert; num_experts (logical); top_k.
    shared_intermediate_size: width of the shared expert, 0 for none.
    scoring: how gate logits become scores and a choice:
        "softmax" (DeepSeek V2: softmax over all, group score = max, weights not renormalised unless norm_topk_prob),
        "sigmoid" (DeepSeek V3: sigmoid, correction bias on the choice only, group score = sum of the top two),
        "softmax_topk" (Mixtral, Qwen3-MoE: softmax, top-k, renormalised when norm_topk_prob).
    n_group, topk_group: group-limited routing (1, 1 for none). routed_scaling_factor multiplies the weights.
    num_max_tokens_per_rank: tokens of one dispatch; more are split into rounds. payload: "same" or "fp8".
    weight_format: how expert weights are kept: "same" (dtype), "fp8" (e4m3, 128x128 blocks) or "int8" (per row).
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    shared_intermediate_size: int = 0
    scoring: str = "sigmoid"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_max_tokens_per_rank: int = 1024
    payload: str = "same"
    weight_format: str = "same"
    dtype: torch.dtype = field(default_factory=_bfloat16)

    def __post_init__(self):
        _require(
            self.scoring in ("softmax", "sigmoid", "softmax_topk"),
            f"scoring={self.scoring!r}: must be softmax, sigmoid or softmax_topk",
        )
        _require(
            1 <= self.top_k <= self.num_experts, f"top_k={self.top_k}: must be in 1..num_experts ({self.num_experts})"
        )
        _require(
            self.n_group >= 1 and self.num_experts % self.n_group == 0,
            f"n_group={self.n_group} does not divide num_experts={self.num_experts}",
        )
        _require(
            1 <= self.topk_group <= self.n_group,
            f"topk_group={self.topk_group}: must be in 1..n_group ({self.n_group})",
        )
        _require(
            self.top_k <= self.topk_group * (self.num_experts // self.n_group),
            f"top_k={self.top_k}: the {self.topk_group} kept groups hold only "
            f"{self.topk_group * (self.num_experts // self.n_group)} experts",
        )
        _require(self.payload in ("same", "fp8"), f"payload={self.payload!r}: must be same or fp8")
        _require(
            self.weight_format in ("same", "fp8", "int8"),
            f"weight_format={self.weight_format!r}: must be same, fp8 or int8",
        )
        _require(
            str(self.dtype) in ("torch.float32", "torch.bfloat16"), f"dtype={self.dtype}: must be float32 or bfloat16"
        )
        _require(
            min(self.hidden_size, self.intermediate_size, self.num_max_tokens_per_rank) >= 1,
            "hidden_size, intermediate_size and num_max_tokens_per_rank must be at least 1",
        )


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. kind: "default" or "yarn" (the remaining fields are YaRN's, names as in the checkpoints).

    attention_factor multiplies cos and sin; None derives it from factor, mscale and mscale_all_dim.
    truncate: round the range of interpolated dimensions to whole dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: float = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _require(self.kind in ("default", "yarn"), f"rope type {self.kind!r}: must be default or yarn")
        _require(self.theta > 0 and self.factor > 0, f"rope theta={self.theta}, factor={self.factor}: must be above 0")
        if self.kind == "yarn":
            _require(self.theta > 1, f"rope theta={self.theta}: must be above 1 for yarn")
            length = self.original_max_position_embeddings
            _require(length >= 1, f"rope original_max_position_embeddings={length}: must be at least 1")
            _require(
                min(self.beta_fast, self.beta_slow) > 0,
                f"rope beta_fast={self.beta_fast}, beta_slow={self.beta_slow}: must be above 0",
            )


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek V2 / V3 / R1 model, as models/hf_config.py reads it from config.json. Names follow the checkpoints.

    dtype: of activations, cache and unquantised weights. rope_interleave: rotary pairs are (2i, 2i+1), else
    (i, i + R/2). num_nextn_predict_layers: MTP layers in the files.
    eos_token_ids: of config.json and generation_config.json together. quant_method: "fp8" or None.
    """

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
    dtype: torch.dtype = field(default_factory=_bfloat16)
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_interleave: bool = True
    num_nextn_predict_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quant_method: str | None = None

    def __post_init__(self):
        _require(self.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim={self.qk_rope_head_dim}: must be even")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_dim(self) -> int:
        """Values cached per token and layer: the latent and the rotated shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def is_moe_layer(self, layer_idx: int) -> bool:
        return self.moe is not None and layer_idx >= self.first_k_dense_replace


@dataclass(frozen=True)
class ParallelConfig:
    """Where this rank stands and what of the machine it may use. bind: "numa", "core" or "none"."""

    rank: int = 0
    num_ranks: int = 1
    bind: str = "core"
    backend: str = "auto"
    num_threads: int | None = None

    def __post_init__(self):
        _require(self.bind in ("numa", "core", "none"), f"--bind {self.bind}: must be numa, core or none")
        _require(0 <= self.rank < self.num_ranks, f"rank {self.rank} is not in 0..{self.num_ranks - 1}")


# What EngineConfig's fields may be, and the least of its numbers.
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "quantization": (None, "int8"),
    "load_format": ("auto", "dummy"),
    "kv_cache_dtype": ("auto", "bf16", "fp8"),
    "ep_payload": ("same", "fp8"),
    "speculative_acceptance": ("exact", "rejection"),
    "replica_routing": ("weights", "local", "batch", "batch-lp"),
    "overlap": ("none", "tbo", "sbo", "auto"),
}
_LEAST = {
    "page_size": 1,
    "chunk_size": 1,
    "max_num_seqs": 1,
    "max_queue": 1,
    "low_latency_max_tokens": 1,
    "num_redundant_experts": 0,
    "spare_experts": 0,
    "seed": 0,
}
_MOST = (1 << 31) - 1  # of what memory is taken for: 32-bit integers hold its indices
_WITHOUT_MOST = ("max_queue", "seed")


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one rank's engine. All sizes are per rank.

    dtype: "auto" (the checkpoint's), "float32", "bfloat16". quantization: None or "int8" (weights, at load).
    device: "cpu", "cuda" (one GPU per rank) or "auto". load_format: "auto" (the files), or "dummy": random weights of
    the shape that config.json says. num_hidden_layers: fewer layers than config.json says, with dummy weights only.
    graph_sizes: numbers of decodes that a GPU step is recorded for (a step takes the next larger one), and besides
    the most that low_latency_max_tokens and max_num_seqs allow, beyond which sizes are left out; empty for none.
    kv_cache_gb: memory for the paged cache. kv_cache_dtype: "auto" (dtype), "bf16" or "fp8" (see
    ops/kv_format.py). page_size: tokens per KV page; default 16, with device "cuda" or "auto" 64.
    chunk_size: most tokens one step computes. max_num_seqs: most requests running at once.
    max_queue: most requests waiting; one more is refused with 429.
    num_speculative_tokens: tokens the checkpoint's MTP layer drafts for each running request and step; 0 for none.
    overlap_schedule: prepare each step while the one before computes (engine/engine.py); None: on GPUs.
    speculative_acceptance: "exact": tokens are those without drafts, whatever is drafted; or "rejection": more drafts
    of sampling requests hold, and tokens follow the same distribution but are others (engine/acceptance.py).
    low_latency_max_tokens: steps of at most this many tokens on every rank use the low-latency mode.
    num_redundant_experts: slots of all ranks beyond one per expert, in each MoE layer, for replicas; rounded up so that
    all ranks have equally many. spare_experts: experts a rank has memory for while they move; 0: they cannot.
    overlap: what a step computes while its tokens and outputs travel: "none", "tbo" (a step's two halves take turns),
    "sbo" (decodes: the shared expert and the experts' second product), "auto" (docs/overlap.md). overlap_sms: SMs of a
    GPU that send outputs beside the experts ("sbo", "auto"); None: as many as pay, by sm_split.py.
    replica_routing: how tokens choose among replicas: "weights" (as the placement says, on every rank alike), "local"
    (the same totals, but each rank prefers its own replica, then its node's), "batch" or "batch-lp" (anew in each step
    and layer, as all ranks' tokens of that step ask; by water-filling, or the exact minimum).
    exact_combine: between GPUs, outputs of a rank's experts cross one by one, so that where experts live changes no bit
    of a result; by default a rank adds up its own before they cross, for fewer bytes.
    """

    model_dir: str
    dtype: str = "auto"
    device: str = "cpu"
    quantization: str | None = None
    load_format: str = "auto"
    num_hidden_layers: int | None = None
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    max_model_len: int | None = None
    kv_cache_gb: float = 1.0
    kv_cache_dtype: str = "auto"
    page_size: int = None  # type: ignore[assignment]  # None: the default, filled in below
    chunk_size: int = 512
    max_num_seqs: int = 64
    max_queue: int = 256
    enable_prefix_cache: bool = True
    ep_payload: str = "same"
    num_speculative_tokens: int = 0
    speculative_acceptance: str = "exact"
    overlap_schedule: bool | None = None
    low_latency_max_tokens: int = 64
    num_redundant_experts: int = 0
    spare_experts: int = 2
    replica_routing: str = "weights"
    exact_combine: bool = False
    overlap: str = "auto"
    overlap_sms: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.page_size is None:
            object.__setattr__(self, "page_size", 16 if self.device == "cpu" else 64)
        self._check_types()
        object.__setattr__(self, "graph_sizes", _graph_sizes(self.graph_sizes))
        for name, choices in _CHOICES.items():
            _require(getattr(self, name) in choices, f"{self._given(name)}: must be {_any_of(choices)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            _require(value >= least, f"{self._given(name)}: must be at least {least}")
            _require(value <= _MOST or name in _WITHOUT_MOST, f"{self._given(name)}: must be at most {_MOST}")
        self._check_model()
        self._check_drafts()
        self._check_overlap()

    @property
    def max_running(self) -> int:
        """Most requests that run at once: each has a token in every step, and one more for each draft."""
        return min(self.max_num_seqs, self.chunk_size // (1 + self.num_speculative_tokens))

    def _given(self, name: str) -> str:
        """The field as it is written on the command line."""
        return f"--{name.replace('_', '-')} {getattr(self, name)}"

    def _check_types(self) -> None:
        """Of numbers and switches: of another type some would be taken for something else, others fail much later."""
        kinds = {"int": (Integral, "a whole number"), "float": (Real, "a number"), "bool": (bool, "True or False")}
        for each in fields(self):
            name, _, or_none = str(each.type).partition(" | ")
            value = getattr(self, each.name)
            if name in kinds and not (value is None and or_none):
                kind, want = kinds[name]
                right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
                _require(right, f"--{each.name.replace('_', '-')} {value!r}: must be {want}")

    def _check_model(self) -> None:
        _require(
            self.quantization is None or self.device != "cuda",
            "--quantization int8: int8 weights run on the CPU only; on GPUs serve an fp8 checkpoint, or --device cpu",
        )
        _require(
            self.num_hidden_layers is None or (self.load_format == "dummy" and self.num_hidden_layers >= 1),
            f"{self._given('num_hidden_layers')}: at least 1, and with --load-format dummy only",
        )
        _require(
            self.max_model_len is None or self.max_model_len >= 2, f"{self._given('max_model_len')}: must be at least 2"
        )
        _require(0 < self.kv_cache_gb <= _MOST, f"{self._given('kv_cache_gb')}: must be above 0 and at most {_MOST}")

    def _check_drafts(self) -> None:
        most = min(self.page_size, self.chunk_size - 1)  # one new page at most per step; one whole request per step
        _require(
            0 <= self.num_speculative_tokens <= most,
            f"{self._given('num_speculative_tokens')}: must be in 0..{most} "
            f"({self._given('page_size')}, {self._given('chunk_size')})",
        )
        _require(
            self.speculative_acceptance == "exact" or self.num_speculative_tokens > 0,
            "--speculative-acceptance rejection: says which guesses hold; it needs --num-speculative-tokens above 0",
        )
        _require(
            not (self.overlap_schedule and self.num_speculative_tokens),
            "--overlap-schedule: steps wait for their drafts to be counted; leave it out, or "
            + self._given("num_speculative_tokens"),
        )

    def _check_overlap(self) -> None:
        if self.overlap_sms is None:
            return
        _require(1 <= self.overlap_sms <= 64, f"{self._given('overlap_sms')}: must be in 1..64")
        _require(
            self.overlap in ("sbo", "auto") and self.device != "cpu",
            f"{self._given('overlap_sms')}: divides a GPU for single-batch overlap; it needs --overlap sbo or auto, "
            "and --device cuda",
        )
