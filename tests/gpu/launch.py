"""Runs a function on N processes with a GPU each, or a shared one, from a pytest test, and shows what they printed.

    run_gpu_ranks(2, "tests.gpu.cases_low_latency:random_shapes", seed=0)

Every rank calls the function with (group, **kwargs). The group's few collectives go through a key-value store in the
pytest process, so that a rank may be killed without taking the others along, as mpirun would.
"""

import contextlib
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.gather_group import GatherGroup
from tests.gpu import spare_ranks


class StoreGroup(GatherGroup):
    """Over a TCPStore."""

    def __init__(self, rank: int, size: int, port: int):
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        self._num_gathers = 0
        self.rank, self.size = rank, size
        self._join(rank, size)

    def allgather(self, value: Any) -> list[Any]:
        self._num_gathers += 1
        self._store.set(f"{self._num_gathers}/{self.rank}", pickle.dumps(value))  # type: ignore
        return [pickle.loads(self._store.get(f"{self._num_gathers}/{r}")) for r in range(self.size)]

    def barrier(self) -> None:
        self.allgather(None)

    def close(self) -> None:
        self._watch.close()


def run_gpu_ranks(
    num_ranks: int,
    target: str,
    *,
    timeout_s: float = 120,
    killed: tuple[int, ...] = (),
    under: Sequence[str] = (),
    **kwargs: Any,
) -> str:
    """Calls target ("module:function") on every rank; returns what was printed. killed: ranks that die on purpose.
    under: a program, with its options, that starts each rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = json.dumps({"size": num_ranks, "port": store.port, "target": target, "kwargs": kwargs})
    module = target.partition(":")[0]
    if under:
        ranks = [spare_ranks.start(rank, module, job, under=tuple(under)) for rank in range(num_ranks)]
    else:
        ranks = spare_ranks.SPARES.take_ranks(num_ranks, module)
        for process in ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its exit status and what it printed say why
                process.stdin.write(job + "\n")
                process.stdin.flush()
    printed, late = [], []
    for rank, process in enumerate(ranks):
        try:
            printed.append(process.communicate(timeout=timeout_s)[0])
        except subprocess.TimeoutExpired:
            late.append(rank)
            process.kill()
            printed.append(process.communicate()[0])
    text = "\n".join(f"--- rank {rank}: {out}" for rank, out in enumerate(printed))
    failed = [rank for rank, process in enumerate(ranks) if process.returncode and rank not in killed]
    assert not late, f"ranks {late} of {target} did not finish in {timeout_s} s:\n{text}"
    assert not failed, f"ranks {failed} of {target} failed:\n{text}"
    return text


def main() -> None:
    """RANK MODULE [JOB]: without a job it comes as a line of standard input; no line means that there is none."""
    rank, module, *job = sys.argv[1:]
    try:
        import_module(module)
        line = job[0] if job else sys.stdin.readline()
        if line:
            run_job(int(rank), **json.loads(line))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # peers may be gone: no orderly teardown


def run_job(rank: int, size: int, port: int, target: str, kwargs: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    group = StoreGroup(rank, size, port)
    module, function = target.split(":")
    getattr(import_module(module), function)(group, **kwargs)
    group.close()


if __name__ == "__main__":
    main()
