"""Schedules as data: what waits for what, and the order of EP calls that they make, by the rules of the backends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eprt import EPGroup, ops
from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.registry import make_backend
from eprt.layers.lanes import Lanes
from eprt.layers.overlap import run_layers
from eprt.layers.schedules import IN_TURN, PAUSE, PLAIN, SINGLE_BATCH, SINGLE_BATCH_TILES, TWO_BATCH
from tests.fake_gpu import Group
from tests.unit.layers.cases import HIDDEN, TOP_K, IdleLayer, IdleMoE, batch_of

SLOTS = 8
ON_CPU = torch.empty(0)  # key-value pages
SCHEDULES = {"none": {"overlap": "none"}, "tbo": {"overlap": "tbo"}, "sbo": {"overlap": "sbo"}}
SCHEDULES["sbo, tile by tile"] = {"overlap": "sbo", "overlap_sms": 4}


@pytest.mark.parametrize("schedule", [TWO_BATCH, SINGLE_BATCH, SINGLE_BATCH_TILES, PLAIN, IN_TURN])
def test_schedules_wait_for_all_that_other_lanes_do(schedule):
    """Each stage on another lane is followed, before the layer ends, by one on the compute lane that needs it or what
    comes behind it on its lane: no lane runs on into the next layer."""
    names = [stage.name for stage in schedule if stage is not PAUSE]
    assert len(names) == len(set(names))
    for i, stage in enumerate(schedule):
        assert not stage.marks or stage.lane == "compute"
        if stage.lane == "compute":
            assert set(stage.needs) <= {earlier.work for earlier in schedule[:i] if earlier.lane != "compute"}
            continue
        behind = [later.work for later in schedule[i:] if later.lane == stage.lane]
        assert any(set(later.needs) & set(behind) for later in schedule[i + 1 :]), stage


def test_sending_tile_by_tile_is_launched_behind_the_experts():
    """Loading its kernel may have to wait for an idle GPU, and it waits for the experts: launched first, it hangs."""
    order = [stage.name for stage in SINGLE_BATCH_TILES]
    assert order.index("dispatch_recv") < order.index("experts") < order.index("combine_send")


def batch_in(mode: str, schedule: dict, num_tokens: int):
    return batch_of([1] * num_tokens, [4] * num_tokens, num_tokens, mode=mode, **{"split": None, **schedule})


def run_steps(
    group: EPGroup, backends: dict[str, Backend], mode: str, schedule: dict, num_layers: int, kv_pages: Any = ON_CPU
) -> None:
    """Several steps, some of them without a token. No backend may refuse a call, nor have a handle left in the end."""
    layers = [IdleLayer(IdleMoE(group, backends, SLOTS)) for _ in range(num_layers)]
    for num_tokens in (6, 1, 0, 5):
        batch = batch_in(mode, schedule, num_tokens)
        x_TH = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
        run_layers(layers, x_TH, batch, [kv_pages] * num_layers, Lanes())
    (backend,) = (backend for of_mode, backend in backends.items() if of_mode == mode)
    assert backend._order.in_flight is None  # type: ignore[attr-defined]
    assert backend._order.num_completed == 4 * num_layers * (2 if schedule["overlap"] == "tbo" else 1)  # type: ignore


def config_in(mode: str, device: str) -> EPConfig:
    return EPConfig(HIDDEN, SLOTS, TOP_K, 16, mode=mode, device=device)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "mode, schedule",
    [("low_latency", schedule) for schedule in SCHEDULES]
    + [("normal", schedule) for schedule in ("none", "tbo", "sbo")],
)
def test_calls_keep_the_order_that_gpu_backends_enforce(gpu, monkeypatch, schedule, mode, num_layers):
    """Kernels that compute nothing behind the real backends: rank 1 of 4."""
    monkeypatch.setattr(ops, "add_rows", lambda x_TH, y_TH, shared_TH: x_TH)
    group = Group(1, 4)
    backends: dict[str, Backend] = {
        "normal": NvlinkNormalBackend(config_in("normal", "cuda"), group, NvlinkOptions(max_recv_rows=64)),
        "low_latency": NvlinkLowLatencyBackend(config_in("low_latency", "cuda"), group),
    }
    run_steps(group, backends, mode, SCHEDULES[schedule], num_layers, SimpleNamespace(is_cuda=True))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", ["cpu", "local", "reference"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_calls_keep_the_order_that_other_backends_enforce(schedule, backend, num_layers):
    group = EPGroup.single()
    for mode in ("normal", "low_latency"):
        backends = {mode: make_backend(backend, config_in(mode, "cpu"), group)}
        run_steps(group, backends, mode, SCHEDULES[schedule], num_layers)
        backends[mode].close()


def test_receives_are_launched_ahead_of_the_other_half(gpu, monkeypatch):
    """What two-batch overlap is for: half b's tokens leave, and its receive is launched, before half a's are used."""
    monkeypatch.setattr(ops, "add_rows", lambda x_TH, y_TH, shared_TH: x_TH)
    group = Group(0, 2)
    backend = NvlinkLowLatencyBackend(config_in("low_latency", "cuda"), group)
    gpu.clear()
    batch = batch_in("low_latency", {"overlap": "tbo"}, 4)
    x_TH = torch.zeros(4, HIDDEN, dtype=torch.bfloat16)
    layers = [IdleLayer(IdleMoE(group, {"low_latency": backend}, SLOTS)) for _ in range(2)]
    run_layers(layers, x_TH, batch, [torch.empty(0)] * 2, Lanes())
    one_layer = ["dispatch"] * 4 + ["combine"] * 4
    send, recv = 1, 2
    assert gpu.names == one_layer[:4] + one_layer[4:6] + ["combine"] * 2 + one_layer, gpu.names
    assert [params.phases for _, params, _ in gpu.launched][:8] == [send, recv] * 4
