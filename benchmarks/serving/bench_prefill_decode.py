"""Prefill and decode apart: tokens that differ, instances that are killed, clients that leave.

    python -m benchmarks.serving.bench_prefill_decode

Servers of the demo model on CPU ranks, over HTTP. All answers are compared with those of one rank: tokens, text,
log-probabilities, finish reason and usage.

    equal     mixed requests to 1 + 1 and 2 + 1 instances (prefill + decode), without drafts and with two
    kills     a prefill instance, or one of two decode instances, is killed at a random moment of a burst of streams,
              and started again before the next; silence_ms is the longest time between two events of any stream
    clients   clients leave at random moments: then every page must be free or cached; and the second turn of chats:
              pages that were copied, and those that the decode instance had

computed_prompt_tokens counts prompt tokens that decode instances computed: where there are any, prompts ran beside
decodes.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.serving.observed_streams import KillTally, ObservedStream, bodies
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

NUM_RANKS = 0
ON_REQUEST = "takes some ten minutes; kills instances of its own servers"

PATIENCE_S = 300.0
_KILLS_OF_SERVER = 4  # the wait for a successor doubles with each
FLAGS = ("--local-prefill-tokens", "0", "--bind", "none", "--max-num-seqs", "64")


class InstancesBench:
    """One server, of instances or not, and its clients."""

    def __init__(self, server: RunningServer, seed: int):
        self.server, self._random = server, random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._num_killed = 0
        self._http = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def stream(self, body: dict[str, Any], leaves_after: int | None = None) -> ObservedStream:
        """leaves_after: events after which the client leaves."""
        stream, last_s, num_events = ObservedStream(), None, 0
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        stream.silence_s = max(stream.silence_s, now_s - (last_s or now_s))
                        last_s, num_events = now_s, num_events + 1
                        stream.take_event(json.loads(line.removeprefix("data: ")))
                    if num_events == leaves_after:
                        break
        except httpx.HTTPError as error:
            stream.error = repr(error)
        return stream

    async def burst(self, requests: list[dict[str, Any]], at_once: int) -> list[ObservedStream]:
        """All requests, so many at a time."""
        turns = asyncio.Semaphore(at_once)

        async def one(body: dict[str, Any]) -> ObservedStream:
            async with turns:
                return await self.stream(body)

        return await asyncio.gather(*map(one, requests))

    # -- what the server says --

    async def document(self) -> dict[str, Any]:
        return (await self._http.get("/v1/eprt/instances")).json()

    async def wait_ready(self, num_lost: int) -> None:
        """Until so many instances were lost, and have successors."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            now = await self.document()
            if now["instances_lost"] >= num_lost and all(one["state"] == "ready" for one in now["instances"]):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"an instance does not come back:\n{self.server.output()[-4000:]}")
            await asyncio.sleep(0.1)

    async def wait_free(self, within_s: float = 5.0) -> tuple[int, float]:
        """Pages that are still owned when nothing runs, and how long it took until there were none."""
        start_s = time.monotonic()
        while True:
            now = await self.document()
            used = sum(one["kv_pages_used"] for one in now["instances"]) + now["handoffs"]["under_way"]
            took_s = time.monotonic() - start_s
            if not used or took_s > within_s:
                return used, took_s
            await asyncio.sleep(0.02)

    async def num_faults(self) -> int:
        """Broken invariants that idle ranks have found; each looks after a second."""
        await asyncio.sleep(2.0)
        lines = (await self._http.get("/metrics")).text.splitlines()
        return sum(int(float(line.split()[1])) for line in lines if line.startswith("eprt_faults_total "))

    async def computed_prompt_tokens(self) -> int:
        """Of decode instances."""
        names = [one["name"] for one in (await self.document())["instances"] if one["role"] == "decode"]
        loads = [(await self._http.get(f"/v1/eprt/load?instance={name}")).json()["ranks"] for name in names]
        return sum(rank["num_prompt_tokens"] for ranks in loads for rank in ranks)

    # -- faults --

    async def kill_amid(
        self, requests: list[dict[str, Any]], role: str, burst_s: float
    ) -> tuple[list[ObservedStream], int]:
        """A burst in which an instance of the role is killed; and how many sequences it had."""
        await self.wait_ready(self._num_killed)
        there = [one for one in (await self.document())["instances"] if one["role"] == role]
        victim = self._random.choice(there)
        running = asyncio.ensure_future(self.burst(requests, len(requests)))
        await asyncio.sleep(self._random.uniform(0.0, 0.8) * burst_s)
        (now,) = [one for one in (await self.document())["instances"] if one["name"] == victim["name"]]
        os.kill(self._random.choice(victim["ranks"])["pid"], signal.SIGKILL)
        self._num_killed += 1
        return await running, now["sequences"]

    async def leave_all(self, num: int, num_tokens: int) -> None:
        """Clients that leave after some events, or before the first one."""

        async def one(body: dict[str, Any]) -> None:
            if self._random.random() < 0.5:
                await self.stream(body, leaves_after=self._random.randint(1, 6))
                return
            task = asyncio.ensure_future(self.stream(body))
            await asyncio.sleep(self._random.expovariate(1 / 0.1))
            task.cancel()

        requests = bodies(num, num_tokens)
        for begin in range(0, num, 32):
            await asyncio.gather(*map(one, requests[begin : begin + 32]))


def _flags(num_prefill: int, num_decode: int, num_drafts: int) -> list[str]:
    drafts = ["--num-speculative-tokens", str(num_drafts)]
    return ["--prefill", str(num_prefill), "--decode", str(num_decode), *FLAGS, *drafts]


def _alone(num_drafts: int, requests: list[dict[str, Any]], seed: int) -> list[ObservedStream]:
    flags = ["--num-speculative-tokens", str(num_drafts), "--max-num-seqs", "64"]

    async def run(server: RunningServer) -> list[ObservedStream]:
        bench = InstancesBench(server, seed)
        streams = await bench.burst(requests, 32)
        await bench.close()
        return streams

    with RunningServer(DEMO_MODEL, 1, *flags, timeout_s=PATIENCE_S) as server:
        return asyncio.run(run(server))


def _compare(streams: list[ObservedStream], expected: list[ObservedStream]) -> dict[str, int]:
    tally = KillTally()
    for stream, wanted in zip(streams, expected):
        tally.num_failed += stream.error is not None
        tally.compare(stream, wanted)
    return {"requests": len(streams), "failed": tally.num_failed, "different": tally.num_different}


async def _equal(server: RunningServer, requests: list[dict[str, Any]], expected: list, seed: int) -> dict[str, Any]:
    bench = InstancesBench(server, seed)
    streams = await bench.burst(requests, 32)
    pages, _ = await bench.wait_free()
    handoffs = (await bench.document())["handoffs"]
    computed, faults = await bench.computed_prompt_tokens(), await bench.num_faults()
    await bench.close()
    return {
        **_compare(streams, expected),
        "handoffs": handoffs["num_done"],
        "handoff_ms": 1e3 * handoffs["wait_s"] / max(1, handoffs["num_done"]),
        "pulled_pages": handoffs["num_pulled"],
        "shared_pages": handoffs["num_shared"],
        "computed_prompt_tokens": computed,
        "pages_left": pages,
        "faults": faults,
    }


@dataclass
class _Kills:
    """What kills of one role have done."""

    role: str
    rows: list[dict[str, int]] = field(default_factory=list)  # requests, failed, different of each
    silence_s: list[float] = field(default_factory=list)  # the longest of each
    quiet_s: list[float] = field(default_factory=list)  # the same of bursts without a kill
    num_moved: int = 0  # sequences that the killed instances had
    pages_left: int = 0
    faults: int = 0

    async def run(self, server: RunningServer, num: int, seed: int, requests: list[dict[str, Any]], expected) -> None:
        """So many kills of one server."""
        bench, start_s = InstancesBench(server, seed), time.monotonic()
        quiet = await bench.burst(requests, len(requests))
        burst_s = time.monotonic() - start_s
        self.quiet_s.append(max(stream.silence_s for stream in quiet))
        for _ in range(num):
            streams, moved = await bench.kill_amid(requests, self.role, burst_s)
            self.rows.append(_compare(streams, expected))
            self.silence_s.append(max(stream.silence_s for stream in streams))
            self.num_moved += moved
            print(f"{len(self.rows)} kills of a {self.role} instance: {self.rows[-1]}", file=sys.stderr, flush=True)
        pages, _ = await bench.wait_free()
        self.pages_left += pages
        self.faults += await bench.num_faults()
        await bench.close()

    def columns(self) -> dict[str, Any]:
        return {
            "instance": self.role,
            "kills": len(self.rows),
            **{name: sum(row[name] for row in self.rows) for name in self.rows[0]},
            "sequences_there": self.num_moved,
            "silence_median_ms": 1e3 * statistics.median(self.silence_s),
            "silence_max_ms": 1e3 * max(self.silence_s),
            "undisturbed_silence_ms": 1e3 * max(self.quiet_s),
            "pages_left": self.pages_left,
            "faults": self.faults,
        }


async def _leave_and_turn(server: RunningServer, report: BenchmarkReport, arguments: argparse.Namespace) -> int:
    """Pages that were left."""
    bench = InstancesBench(server, arguments.seed)
    await bench.leave_all(arguments.leaves, 60)
    pages, took_s = await bench.wait_free()
    faults = await bench.num_faults()
    report.add_row(part="leave", requests=arguments.leaves, pages_left=pages, free_after_s=took_s, faults=faults)
    before = (await bench.document())["handoffs"]
    num_new = 0
    for i in range(arguments.turns):
        body: dict[str, Any] = {"prompt": [65 + i] * 160, "max_tokens": 33, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        first = await bench.stream(body)
        await bench.stream({**body, "prompt": [*body["prompt"], *first.token_ids, *[66 + i] * 31]})
        num_new += 10 + 2  # of 16 tokens: of the first prompt, and behind its answer in the second one
    after = (await bench.document())["handoffs"]
    report.add_row(
        part="turn",
        requests=2 * arguments.turns,
        new_pages=num_new,
        pulled_pages=after["num_pulled"] - before["num_pulled"],
        shared_pages=after["num_shared"] - before["num_shared"],
    )
    await bench.close()
    return pages + faults


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="of the part `equal`, default %(default)s")
    parser.add_argument("--kills", type=int, default=20, help="of each role, default %(default)s")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40, help="of each stream, default %(default)s")
    parser.add_argument("--leaves", type=int, default=1000, help="clients that leave, default %(default)s")
    parser.add_argument("--turns", type=int, default=10, help="chats of two turns, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    text = "one of the parts, each of which has a result file; default: all"
    parser.add_argument("--part", choices=tuple(_PARTS), help=text)
    arguments = parser.parse_args(argv)
    names = [arguments.part] if arguments.part else list(_PARTS)
    return 1 if sum(_PARTS[name](arguments) for name in names) else 0


def _report(part: str, arguments: argparse.Namespace) -> BenchmarkReport:
    config = {"streams": arguments.streams, "tokens": arguments.tokens, "model": DEMO_MODEL.parent.name}
    return BenchmarkReport(f"prefill_decode_{part}", config)


def _run_equal(arguments: argparse.Namespace) -> int:
    """As all parts: how much was wrong."""
    report, wrong = _report("equal", arguments), 0
    requests = bodies(arguments.requests, arguments.tokens)
    for num_drafts in (0, 2):
        expected = _alone(num_drafts, requests, arguments.seed)
        for num_prefill, num_decode in ((1, 1), (2, 1)):
            flags = _flags(num_prefill, num_decode, num_drafts)
            with RunningServer(DEMO_MODEL, 0, *flags, timeout_s=PATIENCE_S) as server:
                row = asyncio.run(_equal(server, requests, expected, arguments.seed))
            wrong += row["failed"] + row["different"] + row["pages_left"] + row["faults"]
            report.add_row(instances=f"{num_prefill} + {num_decode}", drafts=num_drafts, **row)
            print(report.rows[-1], file=sys.stderr, flush=True)
    report.finish()
    return wrong


def _run_kills(arguments: argparse.Namespace) -> int:
    report, wrong = _report("kills", arguments), 0
    requests = bodies(arguments.streams, arguments.tokens)
    expected = _alone(0, requests, arguments.seed)
    for role in ("prefill", "decode"):
        kills = _Kills(role)
        while len(kills.rows) < arguments.kills:
            num, seed = min(_KILLS_OF_SERVER, arguments.kills - len(kills.rows)), arguments.seed + len(kills.rows)
            flags = [*_flags(1, 2, 0), "--restart-lost-ranks"]
            with RunningServer(DEMO_MODEL, 0, *flags, timeout_s=PATIENCE_S) as server:
                asyncio.run(kills.run(server, num, seed, requests, expected))
        report.add_row(**kills.columns())
        wrong += sum(row["failed"] + row["different"] for row in kills.rows) + kills.pages_left + kills.faults
    report.finish()
    return wrong


def _run_clients(arguments: argparse.Namespace) -> int:
    report = _report("clients", arguments)
    with RunningServer(DEMO_MODEL, 0, *_flags(1, 1, 0), timeout_s=PATIENCE_S) as server:
        wrong = asyncio.run(_leave_and_turn(server, report, arguments))
    report.finish()
    return wrong


_PARTS = {"equal": _run_equal, "kills": _run_kills, "clients": _run_clients}


if __name__ == "__main__":
    sys.exit(main())
