"""What every rank does in test_diagnose.py: real dispatches with one rank held up, written as a diagnosis log."""

import time

import torch

from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.registry import make_backend
from eprt.ep.wait_log import WaitLog

CALLS_PER_WINDOW = 25


def write_logs(group: EPGroup, directory: str, late_rank: int, late_s: float) -> None:
    """late_s: at least; longer where the machine is so crowded that ranks wait for each other as long anyway."""
    blocked_us = write_log(group, f"{directory}/usual", late_rank, 0.0, "nowhere", num_windows=1)
    late_s = max(late_s, 2e-6 * max(group.allgather(blocked_us)))
    for where in ("before", "experts", "messages"):
        write_log(group, f"{directory}/{where}", late_rank, late_s, where)


def write_log(group: EPGroup, directory: str, late_rank: int, late_s: float, where: str, num_windows: int = 3) -> float:
    """late_rank spends late_s more per call: "before" the MoE layer, or in its "experts"; or its "messages" do.

    Returns how long this rank waited per call of the last window, in microseconds.
    """
    config = EPConfig(hidden_size=64, num_slots=2 * group.size, top_k=2, num_max_tokens_per_rank=16)
    backend = make_backend("cpu", config, group)
    if where == "messages" and group.rank != late_rank:
        backend.delay_link(late_rank, late_s)
    x_TH = torch.randn(16, 64).bfloat16()
    with WaitLog(directory, group, [backend, backend], CALLS_PER_WINDOW) as log:
        for call in range(num_windows * CALLS_PER_WINDOW):
            generator = torch.Generator().manual_seed(10 * call + group.rank)
            slots_TK = torch.rand(16, config.num_slots, generator=generator).argsort(1)[:, :2]
            _hold_up(group.rank == late_rank and where == "before", late_s)
            handle = backend.dispatch_send(x_TH, slots_TK, torch.full((16, 2), 0.5))
            received = backend.dispatch_recv(handle)
            time.sleep(0.0005)
            _hold_up(group.rank == late_rank and where == "experts", late_s)
            backend.combine_send(received.x_RH, handle)
            backend.combine_recv(handle)
            log.step()
    backend.close()
    assert log.latest is not None and log.latest.blocked_us is not None
    return log.latest.blocked_us / log.latest.num_calls


def _hold_up(held: bool, seconds: float) -> None:
    if held:
        time.sleep(seconds)
