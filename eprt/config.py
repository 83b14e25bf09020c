"""Configuration of one rank's engine: frozen, built once, checked once. Everything downstream may trust it.

Importing it does not load torch: the launcher and the HTTP frontend check flags with EngineConfig in milliseconds.
Knows nothing of command lines beyond the flags' names, and nothing of the environment (env.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from eprt.model_config import IndexerConfig, ModelConfig, MoEConfig, RopeConfig, V4Config, require

__all__ = ["EngineConfig", "IndexerConfig", "MoEConfig", "ModelConfig", "RopeConfig", "V4Config"]


def _any_of(choices: tuple[str | None, ...]) -> str:
    *words, last = [choice for choice in choices if choice is not None]
    return f"{', '.join(words)} or {last}" if words else last


def _graph_sizes(sizes: Any) -> tuple[int, ...]:
    """Ascending, each once."""
    listed = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    require(
        isinstance(sizes, Iterable) and all(type(size) is int and size >= 1 for size in listed),
        f"--graph-sizes {' '.join(map(str, listed))}: must be whole numbers of at least 1",
    )
    return tuple(sorted(set(listed)))


# What EngineConfig's fields may be, and the least of its numbers.
_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "quantization": (None, "int8"),
    "load_format": ("auto", "dummy"),
    "kv_cache_dtype": ("auto", "bf16", "fp8"),
    "index_cache_dtype": ("auto", "fp4"),
    "ep_payload": ("same", "fp8"),
    "speculative_acceptance": ("exact", "rejection"),
    "replica_routing": ("weights", "local", "batch", "batch-lp"),
    "expert_host_copies": ("off", "node"),
    "overlap": ("none", "tbo", "sbo", "auto"),
    "attention_tp_form": ("gather", "reduce"),
}
_LEAST = {
    "page_size": 1,
    "chunk_size": 1,
    "max_num_seqs": 1,
    "max_queue": 1,
    "low_latency_max_tokens": 1,
    "prompt_ranks": 1,
    "attention_tp": 1,
    "num_redundant_experts": 0,
    "spare_experts": 0,
    "seed": 0,
}
_MOST = (1 << 31) - 1  # for what memory is allocated by: 32-bit integers hold its indices
_WITHOUT_MOST = ("max_queue", "seed")


@dataclass(frozen=True)
class EngineConfig:
    """What one rank's engine runs, and within which limits. All sizes are per rank."""

    model_dir: str
    dtype: str = "auto"  # "auto" (the checkpoint's), "float32" or "bfloat16"
    device: str = "cpu"  # "cpu", "cuda" (one GPU per rank) or "auto"
    quantization: str | None = None  # "int8": quantise the weights of layers at load
    load_format: str = "auto"  # "auto" (the files) or "dummy" (random weights of the shape that config.json says)
    num_hidden_layers: int | None = None  # fewer layers than config.json says; with dummy weights only
    # Numbers of decodes for which a GPU step is recorded; a step takes the next larger one. The most decodes that
    # low_latency_max_tokens and max_num_seqs allow are recorded too, and larger sizes are left out. Empty: none.
    graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    max_model_len: int | None = None  # tokens of prompt and completion together; None: the model's
    kv_cache_gb: float | None = None  # memory of the paged KV cache, in 2**30 bytes; None: by memory_fraction
    # Of the memory there is for a rank (its share of the host's, or its GPU's), what weights, cache and buffers may
    # take together, where kv_cache_gb is None. None: 0.5 of a host's, 0.8 of a GPU's.
    memory_fraction: float | None = None
    kv_cache_dtype: str = "auto"  # "auto" (dtype), "bf16" or "fp8" (ops/kv_format.py; V4: ops/entry_format.py)
    # Of the keys of DeepSeek V4's indexer: "auto" (as kv_cache_dtype says) or "fp4" (ops/index_format.py).
    index_cache_dtype: str = "auto"
    page_size: int = None  # type: ignore[assignment]  # tokens per KV page; None: 16, with device "cuda" or "auto" 64
    chunk_size: int = 512  # largest number of tokens that one step computes
    max_num_seqs: int = 64  # requests that run at once
    max_queue: int = 256  # requests that wait; one more is refused with 429
    enable_prefix_cache: bool = True  # reuse the KV pages of an equal beginning of a prompt
    ep_payload: str = "same"  # what dispatch sends: "same" (dtype) or "fp8"
    num_speculative_tokens: int = 0  # tokens that the MTP layer drafts for each running request and step; 0 for none
    # Which drafted tokens are accepted. "exact": those that would have been generated without drafts. "rejection": with
    # a temperature more of them; tokens follow the same distribution, but are others (engine/acceptance.py).
    speculative_acceptance: str = "exact"
    # Ranks that compute each other's prompts, a part of the tokens each (docs/prompt-ranks.md); 1: each its own.
    prompt_ranks: int = 1
    # Ranks that share attention, each for heads of its own, whose weights it alone has (docs/attention-tp.md); 1: each
    # computes its own requests'.
    attention_tp: int = 1
    # How their results become one: "gather" (each computes columns of the output, to the bit as one rank would) or
    # "reduce" (their parts of it are added up: one wait less in each layer, and other last bits).
    attention_tp_form: str = "gather"
    overlap_schedule: bool | None = None  # prepare each step while the one before computes; None: on GPUs
    low_latency_max_tokens: int = 64  # steps of at most this many tokens on every rank use the low-latency mode
    # Slots of all ranks beyond one per expert, in each MoE layer, for replicas; rounded up so that all ranks have
    # equally many.
    num_redundant_experts: int = 0
    spare_experts: int = 2  # experts that a rank has memory for while they move; 0: experts cannot move
    # Copies of all experts in host memory, for ranks that are to hold what a lost rank held: "off" (they read the
    # checkpoint) or "node" (one copy per host, shared by its ranks).
    expert_host_copies: str = "off"
    # How tokens choose among an expert's replicas:
    #   "weights"   as the placement says, on every rank alike
    #   "local"     in the same totals, but each rank prefers its own replica, then one on its node
    #   "batch"     anew in each step and layer, for the tokens of all ranks in that step, by water-filling
    #   "batch-lp"  likewise, by the exact minimum
    replica_routing: str = "weights"
    # Between GPUs: outputs of a rank's experts cross one by one, so that where experts live changes no bit of a result.
    # By default a rank adds up its own outputs before they cross, which takes fewer bytes.
    exact_combine: bool = False
    # What a step computes while its tokens and outputs travel (docs/overlap.md): "none", "tbo" (a step's two halves
    # take turns), "sbo" (decodes: the shared expert beside gate and dispatch) or "auto".
    overlap: str = "auto"
    overlap_sms: int | None = None  # SMs of a GPU that send outputs in "sbo"; None: as many as pay (layers/sm_split.py)
    # Requests come from, or go to, engines of other instances (engine/handoff.py), which read each other's KV pages.
    hands_over: bool = False
    seed: int = 0  # of requests that bring no seed
    # Where sampling defaults and further EOS tokens come from: "auto" (the model's generation_config.json, if it has
    # one), "none", or another directory with such a file.
    generation_config: str = "auto"

    def __post_init__(self):
        if self.page_size is None:
            object.__setattr__(self, "page_size", 16 if self.device == "cpu" else 64)
        self._check_types()
        object.__setattr__(self, "graph_sizes", _graph_sizes(self.graph_sizes))
        for name, choices in _CHOICES.items():
            self._require(getattr(self, name) in choices, name, f"must be {_any_of(choices)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            self._require(value >= least, name, f"must be at least {least}")
            self._require(value <= _MOST or name in _WITHOUT_MOST, name, f"must be at most {_MOST}")
        self._check_model()
        self._check_drafts()
        self._check_overlap()
        self._check_teams()

    def _check_teams(self) -> None:
        """Of ranks that share prompts or attention."""
        where = f"on CPUs only, so far, not with --device {self.device}; leave it out"
        goes = self.prompt_ranks == 1 or not self.hands_over or self.device == "cpu"
        self._require(goes, "prompt_ranks", f"one prompt over several ranks of an instance works {where}")
        on_cpu = self.attention_tp == 1 or self.device == "cpu"
        self._require(on_cpu, "attention_tp", f"attention over several ranks works {where}")
        goes = self.attention_tp > 1 or self.attention_tp_form == "gather"
        self._require(goes, "attention_tp_form", "is for --attention-tp above 1; give that too, or leave it out")

    @property
    def max_running(self) -> int:
        """Most requests that run at once: each has a token in every step, and one more for each draft."""
        return min(self.max_num_seqs, self.chunk_size // (1 + self.num_speculative_tokens))

    def _given(self, name: str) -> str:
        """The field as it is written on the command line."""
        return f"--{name.replace('_', '-')} {getattr(self, name)}"

    def _require(self, condition: bool, name: str, want: str) -> None:
        require(condition, f"{self._given(name)}: {want}")

    def _check_types(self) -> None:
        """Numbers and switches. Values of another type would be misread in some places, and fail late in others."""
        kinds = {"int": (Integral, "a whole number"), "float": (Real, "a number"), "bool": (bool, "True or False")}
        for each in fields(self):
            name, _, or_none = str(each.type).partition(" | ")
            value = getattr(self, each.name)
            if name in kinds and not (value is None and or_none):
                kind, want = kinds[name]
                right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
                require(right, f"--{each.name.replace('_', '-')} {value!r}: must be {want}")

    def _check_model(self) -> None:
        layers, length = self.num_hidden_layers, self.max_model_len
        few = layers is None or (self.load_format == "dummy" and layers >= 1)
        self._require(few, "num_hidden_layers", "at least 1, and with --load-format dummy only")
        self._require(length is None or length >= 2, "max_model_len", "must be at least 2")
        size, fraction = self.kv_cache_gb, self.memory_fraction
        self._require(size is None or 0 < size <= _MOST, "kv_cache_gb", f"must be above 0 and at most {_MOST}")
        self._require(fraction is None or 0 < fraction <= 1, "memory_fraction", "must be above 0 and at most 1")
        both = size is not None and fraction is not None
        require(not both, f"--memory-fraction {fraction}: sizes the KV cache, as --kv-cache-gb {size} does; give one")

    def _check_drafts(self) -> None:
        most = min(self.page_size, self.chunk_size - 1)  # one new page at most per step; one whole request per step
        why = f"{self._given('page_size')}, {self._given('chunk_size')}"
        fits = 0 <= self.num_speculative_tokens <= most
        self._require(fits, "num_speculative_tokens", f"must be in 0..{most} ({why})")
        require(
            self.speculative_acceptance == "exact" or self.num_speculative_tokens > 0,
            "--speculative-acceptance rejection: chooses among drafts; it needs --num-speculative-tokens above 0",
        )
        require(
            not (self.overlap_schedule and self.num_speculative_tokens),
            "--overlap-schedule: steps wait for their drafts to be counted; leave it out, or "
            + self._given("num_speculative_tokens"),
        )

    def _check_overlap(self) -> None:
        if self.overlap_sms is None:
            return
        self._require(1 <= self.overlap_sms <= 64, "overlap_sms", "must be in 1..64")
        divides = self.overlap in ("sbo", "auto") and self.device != "cpu"
        want = "divides a GPU for single-batch overlap; it needs --overlap sbo or auto, and --device cuda"
        self._require(divides, "overlap_sms", want)
