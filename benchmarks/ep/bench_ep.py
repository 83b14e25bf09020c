"""Dispatch and combine between GPUs: low latency up to 256 tokens, normal mode above.

    mpirun -n 4 python -m benchmarks.ep.bench_ep

Columns of both modes (low_latency.py and normal_mode.py have the tables); the candidates take turns on the same GPUs:

    X_us          from event to event around one call on a cold L2, all ranks started together; an empty call takes
                  about 3 us of it. Of the ranks' medians the largest counts
    X_kernel_us   duration of the kernel, which DeepEP's own tests print
    face          eprt through DeepEP's interface, where only combine is given the weights
    GB_s          logical, as DeepEP counts: the payload of every (token, expert) pair over eprt_us
    floor_us      the bytes that must cross (each token once to each other rank it goes to, each sum back once) over
                  450 GB/s
    to_X          eprt_us / X_us: below 1 eprt is faster
    error_to_fp32 of dispatch and combine around experts that change nothing, against fp32 from the tokens as they were
"""

import argparse

import torch

from benchmarks.ep import low_latency, normal_mode
from benchmarks.tools.gpu_timer import GpuTimer
from eprt import EPGroup

NUM_RANKS = (2, 4, 8)
NEEDS_GPU = True
NEEDS = "NVLink; DeepEP V1 beside it where installed"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_ep", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*")
    parser.add_argument("--sms", type=int)
    parser.add_argument("--exact", action="store_true", help="a row per expert crosses in combine, unsummed")
    parser.add_argument("--brief", action="store_true", help="only the comparison, not the parts")
    parser.add_argument("--profile", action="store_true", help="print when each stage of a kernel is reached, too")
    arguments = parser.parse_args()
    from mpi4py import MPI

    group = EPGroup.from_mpi()
    if torch.cuda.device_count() < group.size:
        if group.rank == 0:
            print(
                f"bench_ep: {group.size} ranks need {group.size} GPUs, there are {torch.cuda.device_count()}: not run"
            )
        return group.close()
    torch.cuda.set_device(group.rank)
    timer = GpuTimer(group)
    reports = low_latency.reports(group, MPI.COMM_WORLD, timer, arguments)
    tokens = [t for t in arguments.tokens or normal_mode.TOKENS if t > max(low_latency.TOKENS)]
    if tokens:
        reports += normal_mode.reports(group, MPI.COMM_WORLD, timer, arguments, tokens)
    timer.close()
    if group.rank == 0:
        for report in reports:
            print(report.finish())
    group.close()


if __name__ == "__main__":
    main()
