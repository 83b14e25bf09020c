"""Planning in a process of its own (eprt/balancer/job.py), so that no request waits for it. Knows nothing of plans."""

import asyncio
import sys

import msgspec

from eprt.balancer.job import PlanAnswer, PlanRequest
from eprt.serve.errors import ApiError

_TIMEOUT_S = 120.0


async def solve_apart(request: PlanRequest) -> PlanAnswer:
    """The process's answer. ApiError where it refuses (400), fails or takes too long (500)."""
    command, pipe = (sys.executable, "-m", "eprt.balancer.job"), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        given = await asyncio.to_thread(request.to_bytes)
        out, err = await asyncio.wait_for(process.communicate(given), _TIMEOUT_S)
    except TimeoutError:
        raise ApiError(500, f"no plan within {_TIMEOUT_S:g} s", code="planning_failed") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        reason = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        status = 400 if process.returncode == 2 else 500
        raise ApiError(status, f"no plan: {reason[0]}", code="planning_failed")
    return await asyncio.to_thread(lambda: PlanAnswer.from_json(msgspec.json.decode(out)))
