"""Planning in a process of its own: its answer, its refusal, and one that takes too long."""

import asyncio
import sys

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.job import PlanRequest

from eprt.serve.errors import ApiError
from eprt.serve.rebalance import planning
from eprt.serve.rebalance.planning import solve_apart

REQUEST = PlanRequest(
    Placement(np.array([[0, 1, 2, 0]]), num_gpus=2), Placement(np.array([[1, 2, 0, 1]]), num_gpus=2), spare=1
)


def test_a_plan_is_made_and_comes_back():
    answer = asyncio.run(solve_apart(REQUEST))
    assert answer.target.physical_to_logical_map.tolist() == [[1, 2, 0, 1]] and answer.rounds


@pytest.mark.parametrize(
    "code, status, message",
    [
        ("sys.exit(3)", 500, "no plan: exit status 3"),
        ("sys.stderr.write('warning\\nno room'); sys.exit(2)", 400, "no plan: no room"),
    ],
)
def test_a_process_that_fails_or_refuses_is_told_with_its_last_line(monkeypatch, code, status, message):
    run = asyncio.create_subprocess_exec
    script = f"import sys; sys.stdin.buffer.read(); {code}"
    monkeypatch.setattr(
        planning.asyncio, "create_subprocess_exec", lambda *_, **pipes: run(sys.executable, "-c", script, **pipes)
    )
    with pytest.raises(ApiError) as caught:
        asyncio.run(solve_apart(REQUEST))
    assert (caught.value.status, caught.value.code, caught.value.message) == (status, "planning_failed", message)


def test_a_process_that_takes_too_long_is_killed(monkeypatch):
    started = []
    run = asyncio.create_subprocess_exec

    async def never_ends(*_, **pipes) -> asyncio.subprocess.Process:
        started.append(await run(sys.executable, "-c", "while True: input()", **pipes))
        return started[0]

    monkeypatch.setattr(planning.asyncio, "create_subprocess_exec", never_ends)
    monkeypatch.setattr(planning, "_TIMEOUT_S", 0)

    async def plan() -> int:
        with pytest.raises(ApiError, match="no plan within 0 s"):
            await solve_apart(REQUEST)
        return await started[0].wait()

    assert asyncio.run(plan()) != 0
