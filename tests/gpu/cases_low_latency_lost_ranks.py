"""What every rank does in test_low_latency.py: low latency with a rank that is killed, masked, late, or returns."""

import os
import signal as signals
import threading
import time

import torch

from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from tests.gpu.cases_low_latency import make, make_config
from tests.gpu.identity import assert_near, expected_identity, identity_step
from tests.gpu.shared import needs_own_gpu


def killed_rank(group: EPGroup, victim: int) -> None:
    """A rank is killed between two steps; the others are told who, go on without it, and their results stay right."""
    config = make_config(group, (2048, 8, 4, 32, "same", False), timeout_s=1.0)
    backend = make(group, config)
    generator = torch.Generator("cuda").manual_seed(group.rank)

    def step(masked: tuple[int, ...]) -> None:
        x = torch.randn(32, 2048, device="cuda", generator=generator).bfloat16()
        slots = torch.randint(0, config.num_slots, (32, 4), device="cuda", generator=generator)
        weights = torch.rand(32, 4, device="cuda", generator=generator)
        got = identity_step(backend, x, slots, weights)
        for rank in masked:
            slots = torch.where(slots // 8 == rank, -1, slots)
        torch.cuda.synchronize()
        assert_near(got, expected_identity(x, slots, weights), f"step without {masked}")

    for _ in range(5):
        step(())
    group.barrier()
    if group.rank == victim:
        os.kill(os.getpid(), signals.SIGKILL)
    while victim not in group.lost_ranks():
        time.sleep(0.01)
    started = time.monotonic()
    step((victim,))  # runs into the deadline, without the victim's outputs
    try:
        step((victim,))
        raise AssertionError("the deadline passed without an error")
    except EPTimeoutError as error:
        assert error.rank == group.rank and error.peer == victim and "dispatch" in error.phase, error
        print(f"after {time.monotonic() - started:.1f} s: {error}")
    assert backend.query_mask().tolist() == [int(r == victim) for r in range(group.size)]
    before = time.monotonic()
    for _ in range(50):
        step((victim,))
    assert time.monotonic() - before < 5, "masked ranks must not be waited for"
    backend.close()


def masked_before(group: EPGroup) -> None:
    """mask_rank: the last rank takes no part from the start; nobody waits for it."""
    config = make_config(group, (2048, 8, 4, 32, "same", True), timeout_s=5.0)
    backend = make(group, config)
    last = group.size - 1
    if group.rank != last:
        backend.mask_rank(last)
        generator = torch.Generator("cuda").manual_seed(group.rank)
        for _ in range(5):
            x = torch.randn(32, 2048, device="cuda", generator=generator).bfloat16()
            slots = torch.randint(0, config.num_slots, (32, 4), device="cuda", generator=generator)
            weights = torch.rand(32, 4, device="cuda", generator=generator)
            got = identity_step(backend, x, slots, weights)
            assert_near(got, expected_identity(x, torch.where(slots // 8 == last, -1, slots), weights), "masked")
    group.barrier()
    backend.close()


def masked_while_awaited(group: EPGroup, timeout_s: float = 60.0) -> None:
    """mask_rank ends a wait of a kernel that runs, long before its deadline."""
    for unlaunched in ("none", "one of the exchange", "one of torch"):
        config = make_config(group, (2048, 8, 4, 32, "same", False), timeout_s=timeout_s)
        backend = make(group, config)
        _mask_who_is_awaited(group, backend, unlaunched)
        group.barrier()
        backend.close()


def _mask_who_is_awaited(group: EPGroup, backend: NvlinkLowLatencyBackend, unlaunched: str) -> None:
    """unlaunched: which kernel, of those behind the dispatch that waits, was never launched before. CUDA loads its code
    then, which may take until the GPU is idle, in the thread that launches it."""
    last, x = group.size - 1, torch.randn(32, 2048, device="cuda").bfloat16()
    slots = torch.randint(0, backend.config.num_slots, (32, 4), device="cuda")
    weights = torch.rand(32, 4, device="cuda")
    first, received = backend.dispatch(x, slots, weights)
    y = torch.zeros_like(received.x_RH, dtype=torch.bfloat16)
    if unlaunched != "one of the exchange":
        backend.combine(y, first)
    torch.cuda.synchronize()
    group.barrier()
    if group.rank == last:
        return
    masked_s: list[float] = []

    def mask() -> None:
        masked_s.append(time.monotonic())
        backend.mask_rank(last)

    watcher = threading.Timer(0.3, mask)
    watcher.start()
    handle, _ = backend.dispatch(x, slots, weights)
    if unlaunched == "one of torch":
        torch.digamma(weights)
    backend.combine(y, first if unlaunched == "one of the exchange" else handle)
    launched_s = time.monotonic()
    torch.cuda.synchronize()
    ended_s = time.monotonic()
    watcher.join()
    assert ended_s > masked_s[0], "nobody waited"
    held = " and held its launch up" if launched_s > masked_s[0] else ""
    print(f"mask_rank ended the wait after {ended_s - masked_s[0]:.4f} s; never launched: {unlaunched}{held}")
    backend.check()  # raises if the kernel waited until its deadline


@needs_own_gpu
def late_rank(group: EPGroup) -> None:
    """Statistics against the truth: who was late and when, tokens from and to each rank."""
    config = make_config(group, (2048, 8, 4, 32, "same", False))
    backend, last = make(group, config), group.size - 1
    generator = torch.Generator("cuda").manual_seed(group.rank)
    for late_in in ("dispatch", "combine"):
        backend.stats(reset=True)
        every_slot = []
        for step in range(4):
            x = torch.randn(32, 2048, device="cuda", generator=generator).bfloat16()
            slots = torch.randint(-1, config.num_slots, (32, 4), device="cuda", generator=generator)
            every_slot.append(slots)
            torch.cuda.synchronize()
            group.barrier()
            if group.rank == last and step == 2 and late_in == "dispatch":
                torch.cuda._sleep(20_000_000)  # about 10 ms
            handle, received = backend.dispatch(x, slots, torch.rand(32, 4, device="cuda", generator=generator))
            torch.cuda.synchronize()
            group.barrier()
            if group.rank == last and step == 2 and late_in == "combine":
                torch.cuda._sleep(20_000_000)
            backend.combine(received.x_RH, handle)
        stats, most_us = backend.stats(), backend.kernels.totals.wait_ns[:, 1].cpu().numpy() / 1e3
        to_rank = torch.where(torch.stack(every_slot) >= 0, torch.stack(every_slot) // 8, group.size)
        sent = [int((to_rank == r).any(-1).sum()) for r in range(group.size)]
        everyone = group.allgather(sent)
        assert stats.num_calls == 4 and stats.sent_tokens_N.tolist() == sent
        assert stats.recv_tokens_N.tolist() == [row[group.rank] for row in everyone]
        waits = {"dispatch": stats.dispatch_wait_us_N, "combine": stats.combine_wait_us_N}
        least_us, most_all_us = sum(w.max() for w in waits.values()), sum(w.sum() for w in waits.values())
        assert least_us - 1 <= stats.blocked_us <= most_all_us + 1, stats  # type: ignore
        assert backend.recent_stats().num_calls == stats.num_calls  # the GPU has nothing to do
        for verb, waited_us in waits.items():
            late = [verb == late_in and r == last != group.rank for r in range(group.size)]
            assert [us > 3000 for us in waited_us] == late, (verb, late_in, waited_us)
        longest = most_us[("dispatch", "combine").index(late_in)]
        assert (longest <= waits[late_in] + 1).all() and (group.rank == last or longest[last] > 3000)
    backend.close()


def rank_returns(group: EPGroup) -> None:
    """A rank that others have masked comes back: at once when it missed nothing, by readmit when it did."""
    config = make_config(group, (2048, 8, 4, 32, "same", True), timeout_s=1.0)
    backend = make(group, config)
    last = group.size - 1
    generator = torch.Generator("cuda").manual_seed(group.rank)

    def step(masked: set[int]) -> None:
        x = torch.randn(32, 2048, device="cuda", generator=generator).bfloat16()
        slots = torch.randint(0, config.num_slots, (32, 4), device="cuda", generator=generator)
        weights = torch.rand(32, 4, device="cuda", generator=generator)
        got = identity_step(backend, x, slots, weights)
        for rank in masked:
            slots = torch.where(slots // 8 == rank, -1, slots)
        torch.cuda.synchronize()
        assert_near(got, expected_identity(x, slots, weights), f"without {masked}")

    others = set(range(group.size)) - {group.rank}
    for turn in range(3):
        group.barrier()
        for rank in others if group.rank == last else {last}:  # all agree, and make the same calls
            backend.mask_rank(rank)
        for _ in range(turn + 1):
            step(others if group.rank == last else {last})
        torch.cuda.synchronize()
        group.barrier()
        for rank in others:
            backend.mask_rank(rank, masked=False)
        for _ in range(6):
            step(set())
    if group.rank != last:  # now it misses calls, which the others learn by their deadline
        step({last})
        try:
            step({last})
        except EPTimeoutError as error:
            assert error.peer == last
        else:
            raise AssertionError("nobody missed the last rank")
        for _ in range(6):
            step({last})
    backend.readmit()
    assert backend.query_mask().tolist() == [0] * group.size
    for _ in range(12):
        step(set())
    backend.close()
