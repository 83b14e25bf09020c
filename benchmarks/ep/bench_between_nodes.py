"""Low latency between virtual nodes of one host, by NVSHMEM over NVLink, beside the exchange within one node.

    mpirun -n 2 python -m benchmarks.ep.bench_between_nodes

The candidates take turns on the same GPUs, from event to event around one call on a cold L2, as in bench_ep:

    nvlink_us       all ranks on one node
    rank_us         nodes of --node-ranks ranks, a copy of a token for each rank that it goes to
    node_us         the same, a copy for each node, which a rank there hands on (copies="node")
    rank_to_nvlink, node_to_nvlink   what the wire costs on this host
    rank_crossed, node_crossed       rows that a rank sent to other nodes in a call, in the mean over ranks
    planned         copies that the planner expects for node_crossed (eprt.cluster.crossings)
    nvlink_error, rank_error, node_error   of dispatch and combine around experts that change nothing, as in bench_ep

NVSHMEM carries them over NVLink here. Nothing of this is a network's time.
"""

import argparse
import copy
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from benchmarks.ep.columns import identity_error, rounded
from benchmarks.ep.low_latency import LowLatencyCase, LowLatencySetting
from benchmarks.tools.gpu_timer import GpuTimer
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.cluster.crossings import ExpertChoice, parts_elsewhere
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.low_latency import kernel_sources
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.nvshmem_backend import NvshmemBackend
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.gpu.nvshmem import nvshmem_files
from eprt.gpu.nvshmem_kernel import linked_cubin

NUM_RANKS = (2, 4, 8)
NEEDS_GPU = True
NEEDS = "NVLink; NVSHMEM's wheel"
TOKENS = (8, 32, 128)
SAMPLES = 50
COPIES = ("rank", "node")


def split_into_nodes(group: EPGroup, node_ranks: int) -> EPGroup:
    """The same ranks on virtual nodes, as EPRT_RANKS_PER_NODE would have them."""
    split = copy.copy(group)
    split.node_of_rank = tuple(rank // node_ranks for rank in range(group.size))
    return split


def build_kernels(shape: LowLatencyHeap) -> None:
    """Compiles and links them into the cache, side by side. Needs no GPU."""
    shapes = [replace(shape, layered=copies == "node") for copies in COPIES]
    sources = [source for each in shapes for source in kernel_sources(each).values()]
    with ProcessPoolExecutor(len(sources)) as pool:
        list(pool.map(linked_cubin, sources, [nvshmem_files()] * len(sources)))


def crossed_by(group: EPGroup, case: LowLatencyCase) -> list[float]:
    """Messages and rows of one dispatch and combine that leave a rank's node, in the mean over ranks."""
    assert isinstance(case.backend, NvshmemBackend)
    before = case.backend.crossings()
    case.dispatch()
    case.combine()
    torch.cuda.synchronize()
    mine = [now - then for now, then in zip(case.backend.crossings(), before)]
    return [sum(column) / group.size for column in zip(*group.allgather(mine))]


def rows(
    report: BenchmarkReport, group: EPGroup, split: EPGroup, timer: GpuTimer, config: EPConfig, tokens: int
) -> None:
    cases = {"nvlink": LowLatencyCase(group, LowLatencySetting(config, NvlinkOptions()), tokens)}
    for copies in COPIES:
        setting = LowLatencySetting(config, NvlinkOptions(copies=copies))
        cases[copies] = LowLatencyCase(split, setting, tokens, backend_type=NvshmemBackend)
    times = timer.in_turns({name: [case.dispatch, case.combine] for name, case in cases.items()}, SAMPLES)
    both = timer.in_turns({name: [pair(case)] for name, case in cases.items()}, SAMPLES)
    crossed = {copies: crossed_by(group, cases[copies]) for copies in COPIES}
    errors = {
        f"{name}_error": identity_error(group, case.backend, case.x, case.slots, case.weights)
        for name, case in cases.items()
    }
    gate = ExpertChoice(config.num_slots, config.top_k)
    for i, call in enumerate(("dispatch fp8", "combine bf16", "both")):
        row: dict = {"tokens": tokens, "call": call}
        timings = {name: both[name][0] if call == "both" else times[name][i] for name in cases}
        for name, timing in timings.items():
            row |= timing.columns(name)
        for copies in COPIES:
            row[f"{copies}_to_nvlink"] = timings[copies].median_s / timings["nvlink"].median_s
            row[f"{copies}_crossed"] = sum(crossed[copies]) if call == "both" else crossed[copies][i]
        row["planned"] = tokens * parts_elsewhere(gate, split.num_nodes) * (2 if call == "both" else 1)
        report.add_row(**rounded(row | errors))
    for case in cases.values():
        case.backend.close()


def pair(case: LowLatencyCase):
    def dispatch_and_combine() -> None:
        case.dispatch()
        case.combine()

    return dispatch_and_combine


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_between_nodes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--node-ranks", type=int, default=1, help="ranks of a virtual node, default %(default)s")
    arguments = parser.parse_args()
    group = EPGroup.from_mpi()
    if torch.cuda.device_count() < group.size:
        if group.rank == 0:
            print(f"bench_between_nodes: {group.size} ranks need as many GPUs: there are {torch.cuda.device_count()}")
        return group.close()
    torch.cuda.set_device(group.rank)
    split, experts = split_into_nodes(group, arguments.node_ranks), arguments.experts // group.size * group.size
    most = max(*arguments.tokens, 128)
    sizes = group.size, most, arguments.hidden, arguments.top_k, experts // group.size
    if group.rank == 0:
        build_kernels(LowLatencyHeap(*sizes, "fp8", False, 2, node_ranks=arguments.node_ranks))
    group.barrier()
    settings = {"ranks": group.size, "node_ranks": arguments.node_ranks, "gpu": torch.cuda.get_device_name()}
    settings |= {"hidden": arguments.hidden, "experts": experts, "top_k": arguments.top_k}
    report = BenchmarkReport(f"ep_between_nodes_{group.size}gpu", settings)
    timer = GpuTimer(group)
    config = EPConfig(
        arguments.hidden, experts, arguments.top_k, most, payload="fp8", mode="low_latency", device="cuda"
    )
    for tokens in arguments.tokens:
        rows(report, split, timer, config, tokens)
    timer.close()
    if group.rank == 0:
        print(report.finish())
    group.close()


if __name__ == "__main__":
    main()
