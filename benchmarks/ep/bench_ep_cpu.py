"""Dispatch and combine among CPU ranks, beside one MPI Alltoallv and one gloo all-to-all of the same bytes.

    mpirun -n 4 python -m benchmarks.ep.bench_ep_cpu

eprt's time covers both ways: dispatch of every token to the ranks of its experts (rows sorted by expert), outputs back,
weighted sum; the experts compute nothing. The others move bytes one way, once, as a dispatch without deduplication
does: one row per (token, expert), already packed by destination. All in one run, alternating.

    zero_copy    eprt with the outputs written into combine_buffer
    per_rank     Alltoallv of one row per (token, rank): the fewest bytes that a dispatch can send
    ratio        eprt / other, below 1 eprt is faster; both_ways counts the collective twice, there and back
"""

import socket
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing, measure
from eprt import EPGroup
from eprt.ep.config import EPConfig
from eprt.ep.registry import make_backend

NUM_RANKS = 4
TOP_K = 8
SLOTS_PER_RANK = 16
CASES = [  # tokens per rank, hidden, payload
    (1, 2048, "same"),
    (8, 2048, "same"),
    (32, 2048, "same"),
    (32, 2048, "fp8"),
    (32, 7168, "same"),
    (128, 2048, "same"),
    (512, 2048, "same"),
]


def route(rank: int, num_ranks: int, T: int) -> torch.Tensor:
    """TOP_K distinct slots of all ranks for each token, uniform."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(T, SLOTS_PER_RANK * num_ranks, generator=generator).argsort(1)[:, :TOP_K]


def eprt_pair(group: EPGroup, x_TH: torch.Tensor, payload: str, zero_copy: bool) -> tuple[Callable[[], None], Callable]:
    """A call that dispatches and combines, and the call that closes its backend."""
    T, H = x_TH.shape
    backend = make_backend(
        "cpu", EPConfig(H, SLOTS_PER_RANK * group.size, TOP_K, T, payload=payload, mode="low_latency"), group
    )
    slot_idx_TK = route(group.rank, group.size, T)
    weights_TK = torch.full((T, TOP_K), 1 / TOP_K)
    y_RH = torch.ones(backend.max_rows, H, dtype=torch.bfloat16)

    def call() -> None:
        handle = backend.dispatch_send(x_TH, slot_idx_TK, weights_TK)
        received = backend.dispatch_recv(handle)
        backend.combine_send(backend.combine_buffer(handle, received) if zero_copy else y_RH, handle)
        backend.combine_recv(handle)

    return call, backend.close


def sizes(group: EPGroup, T: int, row_bytes: int, per_rank: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bytes this rank sends to and gets from each rank, one row per (token, expert) or per (token, rank)."""
    rows = np.zeros((group.size, group.size), dtype=np.int64)
    for source in range(group.size):
        for chosen in (route(source, group.size, T) // SLOTS_PER_RANK).tolist():
            for target in set(chosen) if per_rank else chosen:
                rows[source, target] += 1
    return rows[group.rank] * row_bytes, rows[:, group.rank] * row_bytes


def mpi_alltoallv(comm: MPI.Comm, group: EPGroup, T: int, row_bytes: int, per_rank: bool) -> Callable[[], None]:
    sent, got = sizes(group, T, row_bytes, per_rank)
    outbox, inbox = np.ones(sent.sum(), dtype=np.uint8), np.empty(got.sum(), dtype=np.uint8)
    return lambda: comm.Alltoallv([outbox, sent, MPI.BYTE], [inbox, got, MPI.BYTE])


def gloo_all_to_all(group: EPGroup, T: int, row_bytes: int) -> Callable[[], None]:
    sent, got = (s.tolist() for s in sizes(group, T, row_bytes, per_rank=False))
    outbox, inbox = torch.ones(sum(sent), dtype=torch.uint8), torch.empty(sum(got), dtype=torch.uint8)
    return lambda: dist.all_to_all_single(inbox, outbox, got, sent)


def start_gloo(group: EPGroup) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = group.allgather(probe.getsockname()[1])[0]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=group.rank, world_size=group.size)


def run_case(comm: MPI.Comm, group: EPGroup, T: int, H: int, payload: str) -> dict[str, Timing]:
    x_TH = torch.ones(T, H, dtype=torch.bfloat16)
    row_bytes = H if payload == "fp8" else 2 * H
    eprt, close = eprt_pair(group, x_TH, payload, zero_copy=False)
    zero_copy, close_zero_copy = eprt_pair(group, x_TH, payload, zero_copy=True)
    times = measure(
        {
            "eprt": eprt,
            "zero_copy": zero_copy,
            "alltoallv": mpi_alltoallv(comm, group, T, row_bytes, per_rank=False),
            "per_rank": mpi_alltoallv(comm, group, T, row_bytes, per_rank=True),
            "gloo": gloo_all_to_all(group, T, row_bytes),
        },
        samples=21,
        calls_per_sample=10 if T < 512 else 3,
        before=comm.Barrier,
    )
    close()
    close_zero_copy()
    return times


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    group = EPGroup.from_mpi(comm)
    start_gloo(group)
    report = BenchmarkReport(
        "ep_cpu", {"ranks": group.size, "top_k": TOP_K, "slots": SLOTS_PER_RANK * group.size, "dtype": "bf16"}
    )
    for T, H, payload in CASES:
        times = run_case(comm, group, T, H, payload)
        kilobytes = int(sizes(group, T, H if payload == "fp8" else 2 * H, per_rank=False)[0].sum()) // 1000
        columns = {k: v for name, timing in times.items() for k, v in timing.columns(name).items()}
        ratios = {
            "ratio": times["eprt"].median_s / times["alltoallv"].median_s,
            "zero_copy_ratio": times["zero_copy"].median_s / times["alltoallv"].median_s,
            "zero_copy_both_ways_ratio": times["zero_copy"].median_s / (2 * times["alltoallv"].median_s),
            "gloo_ratio": times["eprt"].median_s / times["gloo"].median_s,
        }
        report.add_row(tokens=T, hidden=H, payload=payload, kB=kilobytes, **columns, **ratios)
    if group.rank == 0:
        report.finish()
    dist.destroy_process_group()
    group.close()


if __name__ == "__main__":
    main()
