"""What kernels tell the host of a wait while it lasts, and what the host tells them, on the emulated GPU."""

import random
import threading
import time
from typing import Any

import torch

from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup
from tests.gpu import cases_low_latency, cases_normal
from tests.ranks.cases_ep import make_tokens

PATIENCE_S = 100.0


def told_wait(group: EPGroup, mode: str, backends: dict[int, Any]) -> None:
    """The last rank dispatches only once the kernels of all others tell that they wait for it. backends: shared."""
    late = group.size - 1
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    shape = (256, 4 if mode == "low_latency" else 9, 4, 9, "same", False)
    backends[group.rank] = backend = cases.make(group, cases.make_config(group, shape, timeout_s=2 * PATIENCE_S))
    everyone = make_tokens(random.Random(3), backend.config, group.size, "uniform")

    def check() -> None:
        if mode == "low_latency":
            cases_low_latency.check_once(backend, cases_low_latency.one_round(everyone), "fused")
        else:
            cases_normal.check_once(backend, everyone, "fused")

    check()
    group.barrier()
    if group.rank == late:
        for rank in range(late):
            wait = _await_word(backends[rank])
            assert wait.peer == late and "dispatch" in wait.phase, wait
            assert time.monotonic() - wait.since_s > 0.25, wait
    check()
    group.barrier()
    backend.close()


def _await_word(backend: Any) -> CurrentWait:
    deadline_s = time.monotonic() + PATIENCE_S
    while (wait := backend.current_wait()) is None:
        assert time.monotonic() < deadline_s, "no kernel tells of its wait"
        time.sleep(0.01)
    return wait


def masked_behind_a_copy_that_waits(group: EPGroup, mode: str) -> None:
    """The last rank makes no call. The others mask it while their kernels wait, and CUDA holds the copy of the mask up
    until those have ended, as it does while another thread loads a kernel's code."""
    last = group.size - 1
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    shape = (256, 4 if mode == "low_latency" else 9, 4, 9, "same", False)
    backend = cases.make(group, cases.make_config(group, shape, timeout_s=20.0), num_sms=3)
    ended, mask, tokens = threading.Event(), backend.kernels.rank_mask, backend.config.num_max_tokens_per_rank
    copy = mask._copy
    mask._copy = lambda *args: ended.wait(PATIENCE_S) and copy(*args)
    if group.rank != last:
        x = torch.ones(tokens, 256, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(tokens * 4, device="cuda").view(tokens, 4) % backend.config.num_slots
        watcher = threading.Timer(0.2, backend.mask_rank, [last])
        watcher.start()
        handle, received = backend.dispatch(x, slots, torch.ones(tokens, 4, device="cuda"))
        assert not ended.is_set() and backend.query_mask().tolist() == [int(r == last) for r in range(group.size)]
        ended.set()
        watcher.join()
        y_TH = backend.combine(torch.ones_like(received.x_RH, dtype=torch.bfloat16), handle)
        outputs = 4 - (slots // (backend.config.num_slots // group.size) == last).sum(1)
        assert torch.equal(y_TH.float(), outputs[:, None].float().expand(y_TH.shape)), (y_TH[:, 0], outputs)
        backend.check()
    group.barrier()
    backend.close()
