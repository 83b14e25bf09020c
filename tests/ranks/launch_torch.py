"""Like launch.py, for EPGroup.from_torch: plain processes that meet through torch.distributed, no MPI anywhere."""

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from eprt import env
from tests.ranks.forked import ForkedRank
from tests.ranks.launch import PATIENCE


def start_torch_ranks(
    num_ranks: int, target: str, *, extra_env: dict[str, str] | None = None, **kwargs
) -> list[ForkedRank]:
    """One process per rank, each calling target ("module:function") with (group, **kwargs)."""
    meeting = Path(tempfile.mkdtemp(prefix="eprt-test-")) / "store"
    environment = {**env.without_mpi(), **PATIENCE, **(extra_env or {})}
    arguments = [target, json.dumps(kwargs), str(meeting), str(num_ranks)]
    return [ForkedRank(main, *arguments, str(rank), environment=environment) for rank in range(num_ranks)]


def finish(processes: Sequence[ForkedRank | subprocess.Popen[str]], timeout_s: float) -> list[tuple[int, str]]:
    """Exit status and output of each; those not done in time are killed and fail the test."""
    deadline = time.monotonic() + timeout_s
    results = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert process.returncode is not None
            results.append((process.returncode, output))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def run_torch_ranks(num_ranks: int, target: str, *, timeout_s: float = 600, **options) -> None:
    assert_all_ended_well(finish(start_torch_ranks(num_ranks, target, **options), timeout_s))


def assert_all_ended_well(results: list[tuple[int, str]]) -> None:
    for rank, (status, output) in enumerate(results):
        assert status == 0, f"rank {rank} ended with {status}:\n{output}"


def main(target: str, kwargs: str, meeting: str, num_ranks: str, rank: str) -> None:
    import torch.distributed as dist

    from eprt import EPGroup

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(num_ranks))
    group = EPGroup.from_torch()
    module, function = target.split(":")
    getattr(import_module(module), function)(group, **json.loads(kwargs))
    group.close()
    dist.destroy_process_group()
