"""Ranks that are killed while streams run: failed requests, tokens that differ, the longest silence, what is left over.

    python -m benchmarks.serving.bench_lost_ranks --kills 100 --streams 32

A server of the demo model loses ranks at random moments, and `eprt join` brings each back. Every burst of streams is
compared with the same burst without a fault: tokens, text, log-probabilities, finish reason and usage must be equal.
With --device cuda it has a rank on each GPU of this host, and the share of tokens that differ is told instead.

    silence_ms    the longest time between two events of one stream, over the streams of a burst that stay where they
                  are: median and largest; moved_silence_ms: over those of a lost rank, whose prompts are computed again
    noticed_ms    from the signal until the frontend knew: median and largest (replaced ranks excepted)
    return        nobody is killed, and a rank that was lost before enters: change_ms is how long the others pause
    change_ms     of that, from the frontend's noticing until all ranks have entered the new view: median and largest
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from benchmarks.serving.observed_streams import KillTally, ObservedStream, bodies
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

NUM_RANKS = 0
ON_REQUEST = "takes some ten minutes; kills ranks of its own server"

CPU_RANKS = 4
REDUNDANT = 32  # each of the demo model's 32 experts has two slots: any half of the ranks can hold all
PATIENCE_S = 120.0
_NO_KILLS = ("warm-up", "none", "none, at last", "SIGSTOP", "return")


class LostRanksBench:
    """One server and the bursts that its faults are measured by."""

    def __init__(self, server: RunningServer, num_ranks: int, num_streams: int, num_tokens: int, seed: int):
        self._server, self._num_ranks, self._random = server, num_ranks, random.Random(seed)
        self._bodies = bodies(num_streams, num_tokens)
        # None is kept alive: the server closes one that was idle for 5 s, which may be when it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits)
        self._joiners: dict[int, asyncio.subprocess.Process] = {}  # by rank
        self.expected: list[ObservedStream] = []
        self.burst_s = 0.0
        self._num_bursts = 0
        self.num_rolled_back = 0  # migrations that a kill ended
        self._killed_s: dict[int, float] = {}  # Unix time, by rank
        self._kind = "none"  # of the latest burst
        self._num_lost = 0  # ranks that the server should have noticed by now
        self.tallies: dict[str, KillTally] = {}

    # -- streams --

    async def _stream(self, body: dict[str, Any], request_id: str) -> ObservedStream:
        stream, last_s = ObservedStream(), None
        try:
            headers = {"x-request-id": request_id}
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        stream.silence_s = max(stream.silence_s, now_s - (last_s or now_s))
                        last_s = now_s
                        stream.take_event(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            stream.error = repr(error)
        return stream

    async def burst(self, kind: str, fault: Callable[[], Awaitable[int]] | None = None) -> None:
        """All streams at once, and meanwhile the fault, which returns how many ranks it killed."""
        self._kind = kind
        tally = self.tallies.setdefault(kind, KillTally())
        before = await self._changes()
        self._num_bursts += 1
        ids = [f"burst-{self._num_bursts}-{i}" for i in range(len(self._bodies))]
        running = [asyncio.ensure_future(self._stream(body, one)) for body, one in zip(self._bodies, ids)]
        if fault is not None:
            tally.num_faults += await fault()
        streams = await asyncio.gather(*running)
        if not self.expected:
            self.expected = streams
        failed = [stream.error for stream in streams if stream.error]
        tally.num_requests += len(streams)
        tally.num_failed += len(failed)
        tally.first_error = tally.first_error or (failed[0] if failed else "")
        for stream, wanted in zip(streams, self.expected):
            if not stream.error:
                tally.compare(stream, wanted)
        moved = set(re.findall(r"\[(burst-\d+-\d+)\].*, moved \d", self._server.output()))
        stayed_s = [stream.silence_s for stream, one in zip(streams, ids) if one not in moved]
        moved_s = [stream.silence_s for stream, one in zip(streams, ids) if one in moved]
        tally.silence_s += [max(stayed_s)] if stayed_s else []
        tally.moved_s += [max(moved_s)] if moved_s else []
        after = await self._changes()
        if after[0] > before[0]:
            tally.change_s.append((after[1] - before[1]) / (after[0] - before[0]))

    async def _changes(self) -> tuple[float, float]:
        """How many views there were, and how long their changes took together."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        names = ("eprt_view_change_seconds_count ", "eprt_view_change_seconds_sum ")
        count, total = (float(line.split()[1]) for name in names for line in lines if line.startswith(name))
        return count, total

    # -- faults --

    async def ranks(self) -> list[dict[str, Any]]:
        return (await self._http.get("/v1/eprt/ranks")).json()["ranks"]

    async def kill(self, *victims: int, number: signal.Signals = signal.SIGKILL) -> int:
        document = (await self._http.get("/v1/eprt/ranks")).json()
        for victim in victims:
            os.kill(document["ranks"][victim]["pid"], number)
            self._killed_s[victim] = time.time()
        self._num_lost = document["ranks_lost"] + len(victims)
        return len(victims)

    async def wait_states(self, wanted: Callable[[list[str]], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            document = (await self._http.get("/v1/eprt/ranks")).json()
            states = [rank["state"] for rank in document["ranks"]]
            # A process that was killed a moment ago still looks ready.
            if wanted(states) and not document["changing"] and document["ranks_lost"] >= self._num_lost:
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the ranks stay {states}; the server printed:\n{self._server.output()[-4000:]}")
            await asyncio.sleep(0.05)

    async def start_joiner(self, rank: int) -> None:
        command = [sys.executable, "-m", "eprt.serve.join", self._server.url, "--rank", str(rank)]
        null = asyncio.subprocess.DEVNULL
        self._joiners[rank] = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null)

    async def rejoin_all(self) -> None:
        """Every slot is taken again."""
        deadline_s = time.monotonic() + PATIENCE_S
        await self.wait_states(lambda states: True)
        for rank in await self.ranks():
            if rank["state"] == "gone" and rank["rank"] in self._killed_s:
                self.tallies[self._kind].noticed_s.append(rank["since_s"] - self._killed_s[rank["rank"]])
        self._killed_s.clear()
        while time.monotonic() < deadline_s:
            ranks = await self.ranks()
            if all(rank["state"] == "ready" for rank in ranks):
                break
            for rank in ranks:
                joiner = self._joiners.get(rank["rank"])
                # One that came before the launcher had seen the end of the rank before has been refused.
                if rank["state"] == "gone" and (joiner is None or joiner.returncode is not None):
                    await self.start_joiner(rank["rank"])
            await asyncio.sleep(0.3)
        await self.wait_states(lambda states: set(states) == {"ready"})

    async def _after(self, low: float, high: float) -> None:
        """Somewhere between these parts of an undisturbed burst."""
        await asyncio.sleep(self._random.uniform(low, high) * self.burst_s)

    def _any_rank(self) -> int:
        return self._random.randrange(self._num_ranks)

    async def _kill_idle(self, rank: int | None = None) -> None:
        tally = self.tallies.setdefault("idle", KillTally())
        tally.num_faults += await self.kill(self._any_rank() if rank is None else rank)
        await self.burst("idle")

    async def _kill_prefill(self) -> int:
        await self._after(0.0, 0.1)
        return await self.kill(self._any_rank())

    async def _kill_decode(self) -> int:
        await self._after(0.2, 0.8)
        return await self.kill(self._any_rank())

    async def _kill_rank0(self) -> int:
        await self._after(0.0, 0.8)
        return await self.kill(0)

    async def _kill_two(self) -> int:
        await self._after(0.0, 0.8)
        return await self.kill(*self._random.sample(range(self._num_ranks), 2))

    async def _migrate(self) -> None:
        """All experts are on their way elsewhere when this returns."""
        placement = (await self._http.get("/v1/eprt/placement")).json()
        for row in placement["physical_to_logical_map"]:
            self._random.shuffle(row)
        body = {"placement": {**placement, "slot_weight": None}}
        answer = await self._http.post("/v1/eprt/rebalance", json=body)
        assert answer.status_code == 202, answer.text

    async def _kill_migration(self) -> int:
        await self._after(0.0, 0.3)
        num = await self.kill(self._any_rank())
        await self.wait_states(lambda states: "gone" in states)
        migration = (await self._http.get("/v1/eprt/rebalance")).json()["migration"]
        self.num_rolled_back += migration["state"] == "rolled_back"
        return num

    async def _kill_join(self) -> int:
        first, second = self._random.sample(range(self._num_ranks), 2)
        await self.kill(first)
        await self.wait_states(lambda states: states[first] == "gone")
        await asyncio.sleep(0.5)
        await self.start_joiner(first)
        await asyncio.sleep(self._random.uniform(0.0, 5.0))
        return 1 + await self.kill(second)

    async def _return_under_load(self) -> None:
        rank = self._any_rank()
        await self.kill(rank)
        await self.wait_states(lambda states: states[rank] == "gone")
        self._killed_s.clear()
        await asyncio.sleep(0.5)
        await self.start_joiner(rank)
        while (await self.ranks())[rank]["state"] != "ready":
            await self.burst("return")

    async def _stop(self) -> int:
        await self._after(0.1, 0.3)
        return await self.kill(self._any_rank(), number=signal.SIGSTOP)

    # -- the whole --

    async def run(self, num_kills: int, num_stops: int) -> dict[str, Any]:
        """Returns what was left over."""
        for _ in range(2):  # the first one also warms up
            await self.burst("warm-up")
        start_s = time.monotonic()
        for _ in range(3):
            await self.burst("none")
        self.burst_s = (time.monotonic() - start_s) / 3
        for rank in range(
            self._num_ranks
        ):  # from here on all ranks are processes that have joined: leaks are counted from here
            await self._kill_idle(rank)
            await self.rejoin_all()
        before = await self.left_over()
        kinds: dict[str, Callable[[], Awaitable[int]] | None] = {
            "idle": None,
            "prefill": self._kill_prefill,
            "decode": self._kill_decode,
            "rank 0": self._kill_rank0,
            "migration": self._kill_migration,
        }
        if self._num_ranks > 3:
            kinds |= {"two at once": self._kill_two, "join": self._kill_join}
        done = self._num_ranks
        while done < num_kills:
            kind = self._random.choice(list(kinds))
            fault = kinds[kind]
            if kind == "migration":
                await self._migrate()
            await (self._kill_idle() if fault is None else self.burst(kind, fault))
            await self.rejoin_all()
            done = sum(tally.num_faults for tally in self.tallies.values())
            wrong = sum(tally.num_failed + tally.num_different for tally in self.tallies.values())
            print(f"{done} kills, {wrong} wrong, after {kind}", file=sys.stderr, flush=True)
        after = await self.left_over()
        for _ in range(num_stops):
            await self.burst("SIGSTOP", self._stop)
            await self.rejoin_all()
        for _ in range(num_stops):
            await self._return_under_load()
            await self.rejoin_all()
        for _ in range(3):
            await self.burst("none, at last")
        return {name: after[name] - before[name] for name in before}

    async def left_over(self) -> dict[str, int]:
        """Of an idle server."""
        await asyncio.sleep(1.0)
        load = (await self._http.get("/v1/eprt/load")).json()
        family = [psutil.Process(self._server.process.pid)]
        family += family[0].children(recursive=True)
        ranks = [psutil.Process(rank["pid"]) for rank in await self.ranks()]
        others = [process for process in family if process not in ranks]
        files = [file for process in others + ranks for file in _open_files(process.pid)]
        return {
            "kv_pages": sum(rank["kv_pages_used_now"] for rank in load["ranks"]),
            "descriptors_of_launcher_and_frontend": sum(len(_open_files(process.pid)) for process in others),
            "shared_segments": sum("memfd:" in file for file in set(files)),
            "files_in_dev_shm": len(os.listdir("/dev/shm")),
            "processes": len(set(family + ranks)),
        }

    async def close(self) -> None:
        for joiner in self._joiners.values():
            if joiner.returncode is None:
                joiner.kill()
        await self._http.aclose()


def _open_files(pid: int) -> list[str]:
    """What the descriptors stand for that still exist when they are looked at."""
    files = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(descriptor))
    return files


async def _run(server: RunningServer, arguments: argparse.Namespace, report: BenchmarkReport) -> bool:
    num_ranks = report.config["ranks"]
    bench = LostRanksBench(server, num_ranks, arguments.streams, arguments.tokens, arguments.seed)
    try:
        left_over = await bench.run(arguments.kills, arguments.stops)
    finally:
        for kind, tally in bench.tallies.items():
            if kind != "warm-up":
                report.add_row(fault=kind, **tally.columns())
            if tally.first_error:
                print(f"{kind}: {tally.first_error}", file=sys.stderr)
        await bench.close()
    kills = [tally for kind, tally in bench.tallies.items() if kind not in _NO_KILLS]
    silence_s = [silence for tally in kills for silence in tally.silence_s]
    noticed_s = [noticed for tally in kills for noticed in tally.noticed_s]
    moved_s = [silence for tally in kills for silence in tally.moved_s]
    report.add_row(
        fault="all kills",
        faults=sum(tally.num_faults for tally in kills),
        requests=sum(tally.num_requests for tally in kills),
        failed=sum(tally.num_failed for tally in kills),
        different=sum(tally.num_different for tally in kills),
        different_tokens=sum(tally.num_different_tokens for tally in kills) / sum(tally.num_tokens for tally in kills),
        silence_median_ms=1e3 * statistics.median(silence_s),
        silence_max_ms=1e3 * max(silence_s),
        moved_silence_median_ms=1e3 * statistics.median(moved_s),
        moved_silence_max_ms=1e3 * max(moved_s),
        migrations_ended=bench.num_rolled_back,
        noticed_median_ms=1e3 * statistics.median(noticed_s),
        noticed_max_ms=1e3 * max(noticed_s),
        **{f"left_over_{name}": count for name, count in left_over.items()},
    )
    # Between GPUs a last digit may depend on the batch.
    may_differ = arguments.device == "cuda"
    return not any(tally.num_failed + (not may_differ and tally.num_different) for tally in bench.tallies.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=3, help="ranks stopped by SIGSTOP, default %(default)s")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream, default %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="default: the checkpoint's")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: as many ranks as GPUs")
    parser.add_argument("--expert-host-copies", default="off", choices=("off", "node"), help="as of `eprt serve`")
    arguments = parser.parse_args(argv)
    num_ranks = CPU_RANKS if arguments.device == "cpu" else torch.cuda.device_count()
    config: dict[str, Any] = {
        "ranks": num_ranks,
        "device": arguments.device,
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "dtype": arguments.dtype,
    }
    config["model"] = DEMO_MODEL.parent.name
    report = BenchmarkReport("lost_ranks" if arguments.device == "cpu" else "lost_ranks_gpu", config)
    flags = ["--max-lost-ranks", str(num_ranks // 2), "--num-redundant-experts", str(REDUNDANT), "--bind", "none"]
    flags += ["--max-num-seqs", "16", "--dtype", arguments.dtype, "--device", arguments.device]
    flags += ["--expert-host-copies", arguments.expert_host_copies]
    with RunningServer(DEMO_MODEL, num_ranks, *flags) as server:
        all_equal = asyncio.run(_run(server, arguments, report))
    report.finish()
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
