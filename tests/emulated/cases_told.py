"""What kernels tell the host of a wait while it lasts, on the emulated GPU."""

import random
import time
from typing import Any

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
            ways = "fused", (0,) * group.size
            cases_low_latency.check_once(backend, cases_low_latency.one_round(everyone), *ways)
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
