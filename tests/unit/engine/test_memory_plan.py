"""The memory that is told before loading is what is there after it: byte by byte, for every kind of checkpoint."""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eprt import machine
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.memory_plan import MemoryPlan, tell_memory
from eprt.ep.group.group import EPGroup
from eprt.layers.moe import EPMoE
from tests import tiny

SIZES = {"page_size": 4, "max_num_seqs": 3, "chunk_size": 32}


def bytes_of(*roots: Any) -> int:
    """Of all tensors that these hold, each memory once."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    todo = list(roots)
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, (list, tuple, set)):
            todo += each
        elif isinstance(each, EPMoE):  # its experts lie in pools
            todo += [each._gate, each._shared]
        elif type(each).__module__.startswith("eprt."):
            todo += vars(each).values() if hasattr(each, "__dict__") else []
            todo += [getattr(each, name, None) for name in getattr(each, "__slots__", ())]
    return sum(storages.values())


CASES = [(name, {}) for name in tiny.VARIANTS]
CASES += [("v3", {"quantization": "int8"}), ("v2_lite", {"dtype": "bfloat16", "max_model_len": 100}), ("fp8", {})]


@pytest.mark.parametrize("name, options", CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_weights_and_cache_take_what_was_told(name, options, tmp_path):
    model_of = tiny.make_model("v3") if name == "fp8" else tiny.make_variant(name)
    tiny.save(model_of, tmp_path)
    if name == "fp8":
        tiny.quantize_checkpoint(tmp_path)
    config = EngineConfig(str(tmp_path), **SIZES, **options)
    plan = MemoryPlan.for_rank(config, 1)
    engine = Engine(config)
    model: Any = engine.model
    pools = {id(moe.pool): moe.pool for moe in engine.model.moe_layers()}
    assert sum(pool.expert_bytes * len(pool.parts[0]) for pool in pools.values()) == plan.experts
    assert bytes_of(model.embed_VH, model.layers, model.norm, model.lm_head, model.mtp) == plan.dense
    assert bytes_of(engine.runner.cache_L) == plan.cache.num_bytes
    assert engine.limits.kv_tokens == plan.cache.num_tokens
    engine.close()


def test_the_fraction_sizes_the_cache_and_a_given_size_goes_before_it(tmp_path, monkeypatch):
    tiny.save(tiny.make_model("v3"), tmp_path)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 900 << 20)

    def plan(**options: Any) -> MemoryPlan:
        return MemoryPlan.for_rank(EngineConfig(str(tmp_path), max_num_seqs=2000, **options), 2)

    half, more = plan(memory_fraction=0.6), plan(memory_fraction=0.8)
    assert half.fits and more.fits and half.cache.num_tokens < more.cache.num_tokens
    assert abs(half.total - 0.6 * (450 << 20)) < 1 << 17 and plan().total < half.total
    assert plan(kv_cache_gb=0.01).cache.num_bytes < 0.011 * 2**30
    too_much = plan(kv_cache_gb=2.0)
    assert not too_much.fits and "it does not fit" in too_much.table()
    with pytest.raises(
        MemoryError, match=r"memory of each rank: 1\.\d+ GB of 0\.44 GB: .* KV cache 0\.\d+ GB.*lower --kv-"
    ):
        too_much.require_fit()
    with pytest.raises(ValueError, match=r"no memory is left for a KV cache: .* more than --memory-fraction allows"):
        plan(memory_fraction=0.1)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_is_told_of_too_and_what_does_not_fit_is_not_loaded(device, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    tiny.save(tiny.make_model("v3"), tmp_path)
    engine, group = EngineConfig(str(tmp_path), device=device), EPGroup.single()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    tell_memory(engine, group)
    assert re.fullmatch(
        r"memory of each rank: .* of 1\.00 GB: weights .*, experts .*, KV cache .*, exchange and steps at most 20%; "
        r"\d+ tokens, 480 bytes each, longest context 256 tokens",
        caplog.messages[-1],
    )
    with pytest.raises(MemoryError, match="does not fit"):
        tell_memory(replace(engine, kv_cache_gb=2.0, max_num_seqs=100_000), group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caplog.clear()
    tell_memory(engine, group)
    assert len(caplog.messages) == (device == "auto"), "without a GPU, auto is the CPU's memory"


def test_what_would_not_be_used_is_not_taken_and_that_is_told(tmp_path):
    tiny.save(tiny.make_model("v3"), tmp_path)
    plan = MemoryPlan.for_rank(EngineConfig(str(tmp_path), kv_cache_gb=1000.0), 1)
    assert plan.cache.num_bytes < 2**30 and plan.fits
    assert "of --kv-cache-gb 1000.0: it holds 4 times what --max-num-seqs 64 requests of 256" in plan.cache.note


def test_memory_is_taken_by_pages_that_are_written(tmp_path):
    tiny.save(tiny.make_model("v3"), tmp_path)
    engine = Engine(EngineConfig(str(tmp_path), kv_cache_gb=0.5, max_num_seqs=2000, chunk_size=2000))
    cache = engine.runner.cache_L[0].latents
    assert cache.untyped_storage().nbytes() > 400 << 20
    start = cache.data_ptr()
    with open("/proc/self/smaps") as smaps:
        lines = smaps.read().splitlines()
    areas = [i for i, line in enumerate(lines) if "-" in line.split(" ")[0] and covers(line, start)]
    (resident,) = [int(line.split()[1]) for line in lines[areas[0] : areas[0] + 6] if line.startswith("Rss:")]
    assert resident < 50 << 10  # KB
    engine.close()


def covers(line: str, address: int) -> bool:
    first, _, rest = line.partition("-")
    try:
        return int(first, 16) <= address < int(rest.split(" ")[0], 16)
    except ValueError:
        return False
