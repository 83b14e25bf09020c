"""What every rank does in test_normal.py: normal mode with a rank that is killed or late."""

import os
import signal as signals
import time

import torch

from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from tests.gpu.cases_normal import make, make_config
from tests.gpu.identity import assert_near, expected_identity, identity_step


def killed_rank(group: EPGroup, victim: int) -> None:
    """A rank is killed between two steps; the others are told who, go on without it, and their results stay right."""
    config = make_config(group, (2048, 8 * group.size, 4, 200, "same", False), timeout_s=1.0)
    backend = make(group, config, max_recv_rows=group.size * 200 * 4)
    generator = torch.Generator("cuda").manual_seed(group.rank)

    def step(masked: tuple[int, ...]) -> None:
        x = torch.randn(200, 2048, device="cuda", generator=generator).bfloat16()
        slots = torch.randint(0, config.num_slots, (200, 4), device="cuda", generator=generator)
        weights = torch.rand(200, 4, device="cuda", generator=generator)
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
    step((victim,))  # runs into the deadline, without the victim's outputs
    try:
        step((victim,))
        raise AssertionError("the deadline passed without an error")
    except EPTimeoutError as error:
        assert error.rank == group.rank and error.peer == victim and "dispatch" in error.phase, error
        print(error)
    assert backend.query_mask().tolist() == [int(r == victim) for r in range(group.size)]
    before = time.monotonic()
    for _ in range(50):
        step((victim,))
    assert time.monotonic() - before < 5, "masked ranks must not be waited for"
    backend.close()


def late_rank(group: EPGroup) -> None:
    """Statistics name who was waited for."""
    config = make_config(group, (1024, 8 * group.size, 4, 64, "same", False))
    backend = make(group, config, max_recv_rows=group.size * 64 * 4)
    x = torch.ones(64, 1024, dtype=torch.bfloat16, device="cuda")
    slots = (torch.arange(256, device="cuda") % config.num_slots).view(64, 4)
    for _ in range(3):
        identity_step(backend, x, slots, torch.ones(64, 4, device="cuda"))
    backend.stats(reset=True)
    group.barrier()
    if group.rank == group.size - 1:
        torch.cuda._sleep(10_000_000)  # about 5 ms
    identity_step(backend, x, slots, torch.ones(64, 4, device="cuda"))
    stats = backend.stats()
    if group.rank != group.size - 1:
        assert stats.dispatch_wait_us_N[-1] > 1000 and stats.dispatch_wait_us_N[:-1].max() < 1000, stats
    assert stats.compute_us > 0
    backend.close()
