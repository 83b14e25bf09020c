"""A rank that is late while all set up is waited for, and one that is as late in service is not.

For every backend whose waits have a deadline: on the CPU (test_ep.py), on GPUs (tests/gpu) and under emulation.
"""

import torch

from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.errors import EPTimeoutError
from eprt.ep.exchange import Exchange
from eprt.ep.group.group import EPGroup
from eprt.ep.registry import make_backend
from tests.ranks.cases_late_rank import run_once


def only_set_up_waits_for_a_late_rank(group: EPGroup, backend: Backend, late_s: float) -> None:
    """late_s: longer than the backend's deadline. Both calls of the last rank are late while all set up, and its
    combine is in service, where every other rank says so."""
    late = group.rank == group.size - 1
    with Exchange({backend.config.mode: backend}).while_setting_up():
        for call in ("dispatch", "combine"):
            run_once(group, backend, pause_s={call: late_s} if late else {})
        if backend.config.device == "cuda":
            torch.cuda.synchronize()
    backend.check()
    told = ""
    try:
        run_once(group, backend, pause_s={"combine": late_s} if late else {})
    except EPTimeoutError as error:
        told = str(error)
        group.barrier()  # the last of run_once, in which the late rank waits
    try:
        backend.check()  # on a GPU the kernel goes on, and the next call says so
    except EPTimeoutError as error:
        told = str(error)
    assert late or f"rank {group.size - 1} in combine" in told, f"rank {group.rank}: {told or 'no error'}"
    assert not told or "EPConfig.timeout_s" in told, told


def on_cpus(group: EPGroup) -> None:
    for mode in ("low_latency", "normal"):
        config = EPConfig(64, group.size, min(4, group.size), group.size, mode=mode, timeout_s=0.5)
        only_set_up_waits_for_a_late_rank(group, make_backend("cpu", config, group), late_s=1.0)
