"""MemoryPlan: what a rank's weights, cache and buffers will take, before they are there, and what there is.

    plan = MemoryPlan.for_rank(config, num_ranks=8)
    print(plan.table())

On GPUs the buffers of exchanges and steps are part of what --memory-fraction leaves. Knows nothing of how weights are
read.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from eprt import env, machine
from eprt.config import EngineConfig, ModelConfig
from eprt.engine.cache_size import CacheSize
from eprt.engine.kv_cache import KVCache
from eprt.ep.cpu.backend import window_bytes
from eprt.ep.exchange import ep_configs
from eprt.ep.group.group import EPGroup
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.attention_team import RoomSizes
from eprt.layers.head_shares import HeadShares
from eprt.models.deepseek_builder import open_checkpoint
from eprt.models.hf_config import read_model_config
from eprt.models.model import Model
from eprt.models.v4_weight_memory import V4WeightMemory
from eprt.models.weight_memory import WeightMemory

_log = logging.getLogger(__name__)

GB = 2**30
# Python, torch and the kernels of a rank that has computed a step; measured with the demo model, rounded up.
_PROGRAM_BYTES = 200 << 20
DEFAULT_FRACTION = {"cpu": 0.5, "cuda": 0.8}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank."""

    device: str  # "cpu" or "cuda"
    dense: int  # weights that every rank has
    experts: int  # weights of its own experts, replicas and room for those that move
    exchange: int  # buffers between ranks; on GPUs 0: part of what the fraction leaves
    program: int  # Python, torch and the buffers of a step, about
    left: int  # for the cache, by the fraction
    cache: CacheSize
    share: int | None  # memory there is for one rank; None: unknown
    fraction: float
    has_cache_size: bool  # --kv-cache-gb says it

    @staticmethod
    def for_rank(
        engine: EngineConfig,
        num_ranks: int,
        *,
        device: str = "cpu",
        ranks_on_host: int | None = None,
        gpu_bytes: int | None = None,
    ) -> "MemoryPlan":
        """Of each of num_ranks ranks, ranks_on_host (default: all) of them here. ValueError for what cannot be."""
        config = read_model_config(engine)
        checkpoint = open_checkpoint(engine, config)
        weights = (WeightMemory if config.v4 is None else V4WeightMemory)(engine, config, checkpoint)
        dense, experts = weights.dense_bytes(), weights.expert_bytes(num_ranks)
        checkpoint.close()
        exchange, program, share = 0, 0, gpu_bytes
        fraction = engine.memory_fraction or DEFAULT_FRACTION[device]
        if device == "cpu":
            exchange = _exchange_bytes(engine, config, num_ranks) + _team_bytes(engine, config)
            program = _PROGRAM_BYTES + _step_bytes(engine, config)
            share = machine.memory_bytes() // (ranks_on_host or num_ranks)
        left = GB if share is None else int(fraction * share) - dense - experts - exchange - program
        cache = CacheSize.for_config(engine, config, config.dtype, left)
        has_cache_size = engine.kv_cache_gb is not None
        return MemoryPlan(device, dense, experts, exchange, program, left, cache, share, fraction, has_cache_size)

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.exchange + self.program + self.cache.num_bytes

    @property
    def fits(self) -> bool:
        return self.share is None or self.total <= self.share

    def line(self) -> str:
        """For the log."""
        parts = [("weights", self.dense), ("experts", self.experts), ("KV cache", self.cache.num_bytes)]
        parts += [("exchange", self.exchange), ("program and steps", self.program)]
        listed = ", ".join(f"{name} {_size(size)}" for name, size in parts if size)
        there = "" if self.share is None else f" of {_size(self.share)}"
        more = f", exchange and steps at most {1 - self.fraction:.0%}" if self.device == "cuda" else ""
        room = f"{self.cache.num_tokens} tokens{self._each()}"
        return f"memory of each rank: {_size(self.total)}{there}: {listed}{more}; {room}"

    def _each(self) -> str:
        cache = self.cache
        longest = min(cache.num_tokens, cache.max_model_len)
        return f", {cache.layout.token_bytes:g} bytes each, longest context {longest} tokens"

    def require_fit(self) -> None:
        """MemoryError with the arithmetic and the remedy."""
        if not self.fits:
            raise MemoryError(
                f"{self.line()}: does not fit; lower --kv-cache-gb, --max-num-seqs or --spare-experts, take more ranks "
                "on more hosts, or --quantization int8"
            )

    def table(self) -> str:
        """For `--dry-run`."""
        where = "this host's memory / ranks" if self.device == "cpu" else "the GPU's memory"
        rows = [
            ("weights that every rank has", _size(self.dense)),
            ("weights of its experts", _size(self.experts)),
            ("KV cache", f"{_size(self.cache.num_bytes)}   {self.cache.num_tokens} tokens{self._each()}"),
            ("exchange between ranks", _size(self.exchange)),
            ("program and steps, about", _size(self.program)),
            ("together", _size(self.total)),
            (where, "unknown" if self.share is None else _size(self.share)),
        ]
        if self.device == "cuda":
            rows[3:5] = [(f"exchange and steps, at most {1 - self.fraction:.0%}", "of the GPU's memory")]
        if self.share is None and not self.has_cache_size:
            text = f"what --memory-fraction leaves: {self.cache.num_tokens} tokens in {_size(self.cache.num_bytes)}"
            rows[2] = ("KV cache", text)
            rows[4] = ("together, with that cache", _size(self.total))
        lines = [f"{name:34} {text}" for name, text in rows]
        lines += [f"note: {self.cache.note}"] if self.cache.note and self.share is not None else []
        if self.share is None:
            return "\n".join([*lines, "whether it fits is not known: there is no GPU here"])
        return "\n".join([*lines, "it fits" if self.fits else "it does not fit"])

    def to_json(self) -> dict[str, Any]:
        cache = {"kv_cache": self.cache.num_bytes, "kv_tokens": self.cache.num_tokens}
        parts = {"dense": self.dense, "experts": self.experts, "exchange": self.exchange, "program": self.program}
        return {**parts, **cache, "total": self.total, "share": self.share, "fits": self.fits}


def tell_memory(engine: EngineConfig, group: EPGroup) -> None:
    """Logs, before anything is loaded, what each rank will take. MemoryError where it surely does not fit."""
    ranks_on_host = group.size if group.joins else group.num_ranks_on_host
    gpu_bytes = gpu_share(ranks_on_host, bool(group.gpus)) if engine.device != "cpu" else None
    if engine.device == "cuda" and gpu_bytes is None:
        return  # whoever takes the GPUs tells of the rank that has none
    device = "cpu" if gpu_bytes is None else "cuda"
    plan = MemoryPlan.for_rank(engine, group.size, device=device, ranks_on_host=ranks_on_host, gpu_bytes=gpu_bytes)
    if group.rank == 0:
        _log.info(plan.line())
    plan.require_fit()


def gpu_share(ranks_on_host: int, are_chosen: bool = False) -> int | None:
    """Bytes of a GPU for each rank of this host; None without one. Takes no memory of a GPU. are_chosen: as
    EPGroup.gpus."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return None
    return torch.cuda.get_device_properties(0).total_memory // _num_sharers(ranks_on_host, gpus, are_chosen)


def _num_sharers(ranks_on_host: int, num_gpus: int, are_chosen: bool) -> int:
    """Ranks that a GPU may have to make room for."""
    return env.get("EPRT_RANKS_PER_GPU") if are_chosen else -(-ranks_on_host // num_gpus)


def make_cache(engine: EngineConfig, group: EPGroup, model: Model, *, has_files: bool) -> KVCache:
    """The cache of a loaded model. has_files: whether it came from engine.model_dir; else the cache takes 1 GB by
    default. Collective."""
    left = cache_bytes_left(engine, group, model.device) if has_files else GB
    return KVCache.for_model(engine, group, model, left)


def cache_bytes_left(engine: EngineConfig, group: EPGroup, device: torch.device) -> int:
    """What --memory-fraction leaves for the cache of each rank, once weights are there. Collective; a rank that joins
    is on the host of the others and takes what it finds itself. 0 where --kv-cache-gb says how much."""
    if engine.kv_cache_gb is not None:
        return 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        sharers = _num_sharers(group.num_ranks_on_host, torch.cuda.device_count(), bool(group.gpus))
        left = int(free - (1 - (engine.memory_fraction or DEFAULT_FRACTION["cuda"])) * total) // sharers
    else:
        ranks_on_host = group.size if group.joins else group.num_ranks_on_host
        left = MemoryPlan.for_rank(engine, group.size, ranks_on_host=ranks_on_host).left
    everyones = group.allgather(left)  # also by a rank that joins, which repeats its predecessor's calls
    return left if group.joins else min(everyones)


def _exchange_bytes(engine: EngineConfig, config: ModelConfig, num_ranks: int) -> int:
    """Of CPU ranks on one node."""
    if config.moe is None:
        return 0
    slot_map = SlotMap.contiguous(config.moe.num_experts, num_ranks, engine.num_redundant_experts)
    modes = {"normal": None, "low_latency": engine.low_latency_max_tokens}
    configs = ep_configs(config.moe, slot_map.num_slots, modes)
    return sum(window_bytes(each, num_ranks) for each in configs.values())


def _team_bytes(engine: EngineConfig, config: ModelConfig) -> int:
    """Of what a rank shows those that share attention with it."""
    if engine.attention_tp == 1:
        return 0
    return RoomSizes.for_config(engine, config, HeadShares.for_config(engine, config)).num_row_bytes


def _step_bytes(engine: EngineConfig, config: ModelConfig) -> int:
    """About what a step's tensors take: rows of logits, and the widest of a layer's rows."""
    widest = max(config.intermediate_size, config.num_attention_heads * (config.qk_head_dim + config.v_head_dim))
    logits = 2 * engine.max_running * config.vocab_size * 4
    return logits + engine.chunk_size * (widest + 4 * config.hidden_size) * 4


def _size(num_bytes: int) -> str:
    if num_bytes < 0:
        return f"-{_size(-num_bytes)}"
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB // 10 else f"{num_bytes / 2**20:.1f} MB"
