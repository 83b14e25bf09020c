"""One rank is late: the others' statistics charge it with what it cost, and nobody else with any of that.

For every backend that keeps statistics: on the CPU (test_ep.py), on GPUs (tests/gpu) and under emulation.
"""

import time

import numpy as np
import torch

from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.registry import make_backend

INNOCENT_SHARE = 0.05  # of the late rank's wait, that another rank may be charged with


MOST_TRIES = 5


def only_the_late_rank_is_charged(group: EPGroup, backend: Backend, late: int, late_s: float) -> None:
    """late_s: long beside all that ranks do not do at the same moment, which counts as waiting too. A rank that the
    machine holds up is charged with that, or waits less itself, so a call is repeated until each innocent rank was
    charged with little once, and the late one with what it cost. The first call of each kind, in which nobody is late,
    is not counted."""
    for late_in in ("dispatch", "combine"):
        run_once(group, backend, pause_s={})
        least_2N, nearest_s = np.full((2, group.size), np.inf), np.inf
        for _ in range(MOST_TRIES):
            innocents_2N, by_late_s = charged(group, backend, late, late_in, late_s)
            least_2N = np.minimum(least_2N, innocents_2N)
            nearest_s = min(nearest_s, by_late_s, key=lambda seconds: abs(seconds - late_s))
            is_right = least_2N.max() < INNOCENT_SHARE * late_s and late_s * 0.5 < nearest_s < late_s * 2
            if all(group.allgather(bool(is_right))):
                break
        where = f"rank {group.rank} of {group.size}, rank {late} late in {late_in} by {late_s} s"
        assert is_right, f"{where}: for it {nearest_s}, for others {least_2N}"


def charged(group: EPGroup, backend: Backend, late: int, late_in: str, late_s: float) -> tuple[np.ndarray, float]:
    """Seconds [dispatch and combine, rank] that this rank waited for the others, 0 for the late one in its call; and
    those for the late one there, which it is not asked itself."""
    backend.stats(reset=True)
    run_once(group, backend, pause_s={late_in: late_s} if group.rank == late else {})
    stats = backend.stats()
    assert stats is not None
    waited_2N = np.stack([np.asarray(stats.dispatch_wait_us_N), np.asarray(stats.combine_wait_us_N)]) / 1e6
    if group.rank == late:
        return waited_2N, late_s
    by_late = (int(late_in == "combine"), late)
    by_late_s = float(waited_2N[by_late])
    waited_2N[by_late] = 0.0
    return waited_2N, by_late_s


def on_cpus(group: EPGroup) -> None:
    for mode in ("low_latency", "normal"):
        config = EPConfig(64, group.size, min(4, group.size), group.size, mode=mode)
        backend = make_backend("cpu", config, group)
        only_the_late_rank_is_charged(group, backend, late=group.size - 2, late_s=1.0)
        backend.close()


def run_once(group: EPGroup, backend: Backend, pause_s: dict[str, float]) -> None:
    """A dispatch and a combine in which every rank has a token for every other."""
    config, on_gpu = backend.config, backend.config.device == "cuda"
    T, K, per_rank, device = config.num_max_tokens_per_rank, config.top_k, config.num_slots // group.size, config.device
    token_T1 = torch.arange(T, device=device)[:, None]
    slot_TK = (token_T1 + torch.arange(K, device=device)) % group.size * per_rank + token_T1 % per_rank
    x_TH = torch.ones(T, config.hidden_size, dtype=config.dtype, device=device)
    weights_TK = torch.ones(T, K, device=device)
    begin_together(group, on_gpu)
    time.sleep(pause_s.get("dispatch", 0.0))
    handle, received = backend.dispatch(x_TH, slot_TK, weights_TK)
    y_RH = backend.combine_buffer(handle, received)
    y_RH.fill_(1.0)
    begin_together(group, on_gpu)
    time.sleep(pause_s.get("combine", 0.0))
    backend.combine(y_RH, handle)
    begin_together(group, on_gpu)


def begin_together(group: EPGroup, on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
    group.barrier()
