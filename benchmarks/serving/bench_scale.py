"""The planner under a real load: a second prefill instance is started, and retired when the load is over.

    python -m benchmarks.serving.bench_scale

One prefill and one decode instance of the demo model, with --scale auto. Long prompts come at --rate for --seconds,
faster than one prefill instance computes them, then at a rate that one bears. The rows are what /v1/eprt/instances said
once a second: prefill instances that are ready, predicted time to first token, what was started and retired so far, and
the requests that were sent, answered and failed.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

NUM_RANKS = 0
ON_REQUEST = "takes two minutes; starts and retires instances of its own server"

_FLAGS = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0", "--bind", "none", "--max-num-seqs", "64")
_FLAGS += ("--scale", "auto", "--scale-prefill", "1:2", "--scale-decode", "1:1")
_FLAGS += ("--scale-window", "1", "--scale-cooldown", "5", "--scale-target", "0.6,1")
_PROMPT_TOKENS = 1500
_PATIENCE_S = 180.0


class ScaledServer:
    """Sends prompts, and looks at the instances meanwhile."""

    def __init__(self, client: httpx.AsyncClient, report: BenchmarkReport):
        self._client, self._report, self._start_s = client, report, time.monotonic()
        self._numbers = itertools.count()
        self.has_sent_all = False
        self.num_sent = self.num_answered = self.num_failed = 0

    async def ask(self) -> None:
        number = next(self._numbers)
        prompt = [5 + (7 * number + k) % 490 for k in range(_PROMPT_TOKENS)]  # no two begin alike
        self.num_sent += 1
        answer = await self._client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
        self.num_answered += 1
        self.num_failed += answer.status_code != 200

    async def send(self, rate: float, seconds: float) -> list[asyncio.Task]:
        tasks, end_s = [], time.monotonic() + seconds
        while time.monotonic() < end_s:
            tasks.append(asyncio.create_task(self.ask()))
            await asyncio.sleep(1 / rate)
        return tasks

    async def look(self) -> dict[str, Any]:
        document = (await self._client.get("/v1/eprt/instances")).json()
        scale = document["scale"]["roles"]["prefill"]
        ready = [one for one in document["instances"] if one["role"] == "prefill" and one["state"] == "ready"]
        row = {"at_s": time.monotonic() - self._start_s, "ready": len(ready), "predicted_s": scale["predicted_s"]}
        row |= {name: scale[name] for name in ("wanted", "started", "retired")}
        row |= {"sent": self.num_sent, "answered": self.num_answered, "failed": self.num_failed}
        self._report.add_row(**row)
        return row

    async def watch(self) -> None:
        """Until a prefill instance was started and retired, and all requests are answered."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            row = await self.look()
            if row["retired"] and row["ready"] == 1 and self.has_sent_all and self.num_sent == self.num_answered:
                return
            await asyncio.sleep(1)
        raise TimeoutError(f"no prefill instance was started and retired within {_PATIENCE_S:g} s: {row}")


async def measure(url: str, report: BenchmarkReport, rate: float, seconds: float) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits) as client:
        server = ScaledServer(client, report)
        watching = asyncio.create_task(server.watch())
        tasks = await server.send(rate, seconds)
        tasks += await server.send(0.5, seconds / 2)
        server.has_sent_all = True
        await asyncio.gather(*tasks, watching)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=4.0, help="prompts per second, default %(default)s")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they come, default %(default)s")
    args = parser.parse_args(argv)
    report = BenchmarkReport(
        "scale",
        {"rate": args.rate, "seconds": args.seconds, "prompt_tokens": _PROMPT_TOKENS, "flags": " ".join(_FLAGS)},
    )
    with RunningServer(DEMO_MODEL, 0, *_FLAGS) as server:
        asyncio.run(measure(server.url, report, args.rate, args.seconds))
    report.finish()


if __name__ == "__main__":
    main()
