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


def only_the_late_rank_is_charged(group: EPGroup, backend: Backend, late: int, late_s: float) -> None:
    """late_s: long beside all that ranks do not do at the same moment, which counts as waiting too. The first call of
    each kind, in which nobody is late, is not counted."""
    for late_in in ("dispatch", "combine"):
        run_once(group, backend, pause_s={})
        backend.stats(reset=True)
        run_once(group, backend, pause_s={late_in: late_s} if group.rank == late else {})
        stats = backend.stats()
        assert stats is not None
        waited_s = {"dispatch": stats.dispatch_wait_us_N / 1e6, "combine": stats.combine_wait_us_N / 1e6}
        where = f"rank {group.rank} of {group.size}, rank {late} late in {late_in} by {late_s} s: {waited_s}"
        if group.rank != late:
            assert late_s * 0.5 < waited_s[late_in][late] < late_s * 2, where
            waited_s[late_in][late] = 0.0
        assert np.concatenate([*waited_s.values()]).max() < INNOCENT_SHARE * late_s, where


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
