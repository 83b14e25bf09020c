"""What --max-lost-ranks costs while no rank is lost: processor time and wall time per token, with the flag and without.

    python -m benchmarks.serving.bench_elastic_cost

Two servers of the demo model, alike but for the flag (replicas, memory and steps are the same), get the same bursts of
requests in turns; which goes first changes from pair to pair. Answers must be equal.

    cpu_ms       processor time of all processes of the server, per generated token; idle_cpu_share: of a core, in a
                 second without requests
    wall_ms      from the first request to the last answer of a burst, per generated token
    cpu_cost     with the flag / without, less 1: median over the pairs, and the range in which its half lies
    wall_cost    likewise; says little where the machine has other work
"""

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.serving.observed_streams import bodies
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

NUM_RANKS = 0
ON_REQUEST = "takes some five minutes; needs a quiet machine"

CPU_RANKS = 4
REDUNDANT = 32  # of the demo model's 32 experts: any half of the ranks can hold all
FLAG = ("--max-lost-ranks", "2")
PATIENCE_S = 600.0


@dataclass
class MeasuredServer:
    """One of the two servers, and what its bursts took."""

    server: RunningServer
    cpu_ms: list[float] = field(default_factory=list)  # per token and burst
    wall_ms: list[float] = field(default_factory=list)  # likewise
    idle_share: list[float] = field(default_factory=list)  # of a core

    def cpu_s(self) -> float:
        """Processor time that all its processes have used so far."""
        launcher = psutil.Process(self.server.process.pid)
        times = [process.cpu_times() for process in (launcher, *launcher.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def burst(self, requests: list[dict], counts: bool) -> list:
        """All requests at once; returns what a flag must not change."""
        begin_cpu_s, begin_s = self.cpu_s(), time.perf_counter()
        answers = asyncio.run(_ask_all(self.server.url, requests))
        wall_s, cpu_s = time.perf_counter() - begin_s, self.cpu_s() - begin_cpu_s
        num_tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        if counts:
            self.cpu_ms.append(1e3 * cpu_s / num_tokens)
            self.wall_ms.append(1e3 * wall_s / num_tokens)
        return [[choice["text"] for choice in answer["choices"]] for answer in answers]

    def rest(self, seconds: float) -> None:
        """Nobody asks for anything."""
        begin_s = self.cpu_s()
        time.sleep(seconds)
        self.idle_share.append((self.cpu_s() - begin_s) / seconds)

    def columns(self) -> dict[str, float]:
        return {
            "cpu_ms": statistics.median(self.cpu_ms),
            "wall_ms": statistics.median(self.wall_ms),
            "idle_cpu_share": statistics.median(self.idle_share),
        }


async def _ask_all(url: str, requests: list[dict]) -> list[dict]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in requests))
    return [answer.raise_for_status().json() for answer in answers]


def _cost(name: str, with_flag: list[float], without: list[float]) -> dict[str, float]:
    costs = sorted(one / other - 1 for one, other in zip(with_flag, without))
    low, middle, high = statistics.quantiles(costs, n=4)
    return {f"{name}_cost": middle, f"{name}_cost_low": low, f"{name}_cost_high": high}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="bursts of each server, default %(default)s")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream, default %(default)s")
    parser.add_argument("--idle", type=float, default=10.0, help="seconds without requests, default %(default)s")
    arguments = parser.parse_args(argv)
    config = {"ranks": CPU_RANKS, "streams": arguments.streams, "tokens": arguments.tokens, "pairs": arguments.pairs}
    report = BenchmarkReport("elastic_cost", {**config, "flag": " ".join(FLAG), "model": DEMO_MODEL.parent.name})
    requests = [{**body, "stream": False} for body in bodies(arguments.streams, arguments.tokens)]
    for body in requests:
        body.pop("stream_options", None)
    common = ["--num-redundant-experts", str(REDUNDANT), "--max-num-seqs", "16", "--bind", "none"]
    with (
        RunningServer(DEMO_MODEL, CPU_RANKS, *common) as plain,
        RunningServer(DEMO_MODEL, CPU_RANKS, *common, *FLAG) as elastic,
    ):
        without, with_flag = MeasuredServer(plain), MeasuredServer(elastic)
        all_equal = True
        for pair in range(-2, arguments.pairs):  # the first two warm up
            turn = (without, with_flag) if pair % 2 else (with_flag, without)
            first, second = (one.burst(requests, counts=pair >= 0) for one in turn)
            all_equal &= first == second
        for one in (without, with_flag):
            one.rest(arguments.idle)
    report.add_row(flag="none", **without.columns())
    report.add_row(
        flag=" ".join(FLAG),
        **with_flag.columns(),
        **_cost("cpu", with_flag.cpu_ms, without.cpu_ms),
        **_cost("wall", with_flag.wall_ms, without.wall_ms),
        all_equal=all_equal,
    )
    report.finish()
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
