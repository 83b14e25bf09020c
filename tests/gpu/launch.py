"""Runs a function on N processes with a GPU each, from a pytest test, and shows what they printed.

    run_gpu_ranks(2, "tests.gpu.cases_low_latency:random_shapes", seed=0)

Every rank calls the function with (group, **kwargs). The group's few collectives go through a key-value store in the
pytest process, so that a rank may be killed without taking the others along, as mpirun would.
"""

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

from eprt import env
from tests.gather_group import GatherGroup
from tests.ranks.launch import ROOT


class StoreGroup(GatherGroup):
    """Over a TCPStore."""

    def __init__(self, rank: int, size: int, port: int):
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        self._num_gathers = 0
        self.rank, self.size = rank, size
        self._join(rank, size)

    def allgather(self, value: Any) -> list[Any]:
        self._num_gathers += 1
        self._store.set(f"{self._num_gathers}/{self.rank}", pickle.dumps(value))
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
    command = [
        *under,
        sys.executable,
        "-m",
        "tests.gpu.launch",
        str(num_ranks),
        str(store.port),
        target,
        json.dumps(kwargs),
    ]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=ROOT,
            env=env.without_mpi(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
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
    size, port, target, kwargs, rank = sys.argv[1:]
    torch.cuda.set_device(int(rank))
    group = StoreGroup(int(rank), int(size), int(port))
    module, function = target.split(":")
    try:
        getattr(import_module(module), function)(group, **json.loads(kwargs))
        group.close()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # peers may be gone: no orderly teardown


if __name__ == "__main__":
    main()
