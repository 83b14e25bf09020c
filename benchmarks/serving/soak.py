"""Many clients at once, for a while: streams of mixed lengths, cancellations and garbage.

    python -m benchmarks.serving.soak --seconds 60 --clients 64 --ranks 4    # starts a server of the demo model
    python -m benchmarks.serving.soak --url http://127.0.0.1:8000             # one that runs; no memory figures

Exit status 1 after any of these: an unexpected answer (any 5xx, an error in a stream, a 4xx for a good request, a 2xx
for a bad one), a KV page in use while no request runs, a fault counted by a rank, memory that grows.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.shapes import DEMO_MODEL
from eprt.serve.running import RunningServer

NUM_RANKS = 0
ON_REQUEST = "a check, writes no figures"

GARBAGE: tuple[bytes, ...] = (
    b"",
    b"{",
    b"\xff\x00\xfe",
    b"[1, 2]",
    b"[" * 2000,
    b'{"prompt": NaN}',
    b'{"prompt": 5}',
    b'{"prompt": ""',
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": "x", "max_tokens": 1e99}',
    b'{"prompt": "x", "n": "many"}',
    b'{"prompt": "x", "temperature": 1e308}',
    b'{"prompt": [[]]}',
    b'{"prompt": "x", "logit_bias": {"-1": 2}}',
    b'{"prompt": "x", "stop": {}}',
    b'{"prompt": "x", "top_p": 0}',
    b'{"prompt": [99999999]}',
)


@dataclass
class SoakOutcome:
    """What the clients saw."""

    counts: Counter = field(default_factory=Counter)  # by kind of answer
    problems: list[str] = field(default_factory=list)  # the first 20
    num_tokens: int = 0

    def add_problem(self, what: str) -> None:
        self.counts["WRONG"] += 1
        if len(self.problems) < 20:
            self.problems.append(what)


async def _stream(client: httpx.AsyncClient, outcome: SoakOutcome, draw: random.Random, cancels: bool) -> None:
    chat = draw.random() < 0.5
    path = "/v1/chat/completions" if chat else "/v1/completions"
    text = " ".join(
        draw.choice(("lime", "wolf", "Count from 3 to 40.", "17 + 25")) for _ in range(draw.randrange(1, 60))
    )
    question = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {
        **question,
        "stream": True,
        "ignore_eos": draw.random() < 0.5,
        "max_tokens": draw.randrange(1, 120),
        "temperature": draw.choice((0, 1)),
        "n": draw.choice((1, 1, 1, 2)),
    }
    stop_after, num_events, last = draw.randrange(1, 20), 0, ""
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            outcome.add_problem(f"{response.status_code} for a good request: {(await response.aread())[:200]!r}")
            return
        async for line in response.aiter_lines():
            if not line:
                continue
            num_events, last = num_events + 1, line
            outcome.num_tokens += line.count('"index"')
            if '"error"' in line:
                outcome.add_problem(f"error in a stream: {line[:200]}")
            if cancels and num_events >= stop_after:
                outcome.counts["cancelled"] += 1
                return
    if last != "data: [DONE]":
        outcome.add_problem(f"a stream ended with {last[:100]!r}")
    outcome.counts["streamed"] += 1


async def _plain(client: httpx.AsyncClient, outcome: SoakOutcome, draw: random.Random) -> None:
    body = {
        "prompt": [draw.randrange(10, 600) for _ in range(draw.randrange(1, 300))],
        "max_tokens": draw.randrange(60),
    }
    response = await client.post("/v1/completions", json={**body, "logprobs": draw.choice((None, 0, 3)), "echo": True})
    if response.status_code != 200:
        outcome.add_problem(f"{response.status_code} for a good request: {response.text[:200]}")
    outcome.counts["answered"] += 1


async def _garbage(client: httpx.AsyncClient, outcome: SoakOutcome, draw: random.Random) -> None:
    path = draw.choice(("/v1/completions", "/v1/chat/completions"))
    response = await client.post(path, content=draw.choice(GARBAGE))
    if response.status_code != 400 or "message" not in json.loads(response.content)["error"]:
        outcome.add_problem(f"{response.status_code} for garbage: {response.text[:200]}")
    outcome.counts["refused"] += 1


async def _client(url: str, seed: int, until_s: float, outcome: SoakOutcome) -> None:
    draw = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        while time.monotonic() < until_s:
            kind = draw.random()
            try:
                if kind < 0.15:
                    await _garbage(client, outcome, draw)
                elif kind < 0.3:
                    await _plain(client, outcome, draw)
                else:
                    await _stream(client, outcome, draw, cancels=kind < 0.5)
            except httpx.HTTPError as error:
                outcome.add_problem(repr(error))


async def soak(url: str, num_clients: int, seconds: float, seed: int = 0) -> SoakOutcome:
    """Runs the clients for `seconds`, waits until the server is idle, and checks that nothing is left over."""
    outcome = SoakOutcome()
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(_client(url, seed * 1000 + i, until_s, outcome) for i in range(num_clients)))
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        ranks: list[dict] = []
        for _ in range(300):
            ranks = (await client.get("/v1/eprt/load")).json()["ranks"]
            if not any(r["num_running_now"] + r["num_waiting_now"] for r in ranks):
                break
            await asyncio.sleep(0.1)
        for r in ranks:
            if r["num_running_now"] + r["num_waiting_now"] + r["kv_pages_used_now"]:
                outcome.add_problem(f"rank {r['rank']} is not empty at idle: {r}")
        # An idle rank checks every page, row and request against each other after a second of quiet.
        await asyncio.sleep(2)
        metrics = (await client.get("/metrics")).text
        if "eprt_faults_total 0.0" not in metrics:
            outcome.add_problem("a rank found a broken invariant; see the server's log")
    return outcome


def memory_mb(pid: int) -> dict[int, float]:
    """Resident memory of a process's whole family, by pid."""
    parent = psutil.Process(pid)
    return {p.pid: p.memory_info().rss / 2**20 for p in (parent, *parent.children(recursive=True))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--most-growth-mb", type=float, default=16, help="of any process, over the second half")
    options = parser.parse_args()
    if options.url:
        outcome = asyncio.run(soak(options.url, options.clients, options.seconds))
    else:
        with RunningServer(DEMO_MODEL, options.ranks) as server:
            # The first half fills caches and allocators; the second must not add to them.
            outcome = asyncio.run(soak(server.url, options.clients, options.seconds / 2))
            before = memory_mb(server.process.pid)
            second = asyncio.run(soak(server.url, options.clients, options.seconds / 2, seed=1))
            after = memory_mb(server.process.pid)
            outcome.counts += second.counts
            outcome.problems += second.problems
            outcome.num_tokens += second.num_tokens
            for pid, mb in after.items():
                print(f"pid {pid}: {before.get(pid, 0):.0f} -> {mb:.0f} MB")
                if mb - before.get(pid, 0) > options.most_growth_mb:
                    outcome.add_problem(f"pid {pid} grew by {mb - before.get(pid, 0):.0f} MB")
        if server.process.returncode != 0:
            outcome.add_problem(f"the drained server ended with {server.process.returncode}")
    print(
        f"{options.clients} clients, {options.seconds:g} s:",
        dict(outcome.counts),
        f"{outcome.num_tokens} stream chunks",
    )
    for problem in outcome.problems:
        print("PROBLEM:", problem)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
