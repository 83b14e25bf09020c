"""What structured outputs cost where they are served: time per token of 32 requests over HTTP, held to a form and free.

    python -m benchmarks.serving.bench_served_forms

One server of one rank, demo model. All 32 requests are sent at once and end together, since forms do not end within so
few tokens; free requests have as many. Free and held turns alternate. Answers come whole: a client that reads 32
streams would take the cores from what is measured. step: median over the turns of the wall time until all have ended,
per step of 32 tokens; so prompts, compiling the form and the frontend are in it. more: how much longer a held turn
takes than the free one beside it: the median over all pairs, the interval that contains the true median in 19 of 20
runs (low, high), and the quartiles of the pairs. cpu: likewise of the processor time of the server's processes.
bench_structured measures the same inside the engine, step by step. Takes three minutes.
"""

import argparse
import asyncio
import time

import httpx
import numpy as np
import psutil

from benchmarks.serving.bench_structured import FORMS, NUM_STREAMS, median_interval
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt import StructuredOutputs
from eprt.serve.running import RunningServer

NUM_RANKS = 0


class Turns:
    """Requests to a server, and what they take."""

    def __init__(self, server: RunningServer, num_tokens: int):
        self._server, self._num_tokens = server, num_tokens
        root = psutil.Process(server.process.pid)
        self._processes = [root, *root.children(recursive=True)]

    def take(self, form: StructuredOutputs | None) -> np.ndarray:
        """[wall, cpu], seconds per step of a token for each stream."""
        wall, cpu = time.perf_counter(), self._cpu_s()
        asyncio.run(self._ask_all(form))
        return np.array([time.perf_counter() - wall, self._cpu_s() - cpu]) / self._num_tokens

    def _cpu_s(self) -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in self._processes))

    async def _ask_all(self, form: StructuredOutputs | None) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=300) as client:
            await asyncio.gather(*(self._ask(client, form, seed) for seed in range(NUM_STREAMS)))

    async def _ask(self, client: httpx.AsyncClient, form: StructuredOutputs | None, seed: int) -> None:
        body = {"prompt": "Tell me about it.", "max_tokens": self._num_tokens, "temperature": 1, "seed": seed}
        body |= {"ignore_eos": True} if form is None else {"structured_outputs": _as_field(form)}
        response = await client.post("/v1/completions", json=body)
        answer = response.raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == self._num_tokens, answer


def _as_field(form: StructuredOutputs) -> dict[str, object]:
    return {name: value for name in ("json", "regex", "grammar") if (value := getattr(form, name)) is not None}


def measure_form(turns: Turns, form: StructuredOutputs, rounds: int) -> dict[str, float]:
    turns.take(form)  # compiled once
    pairs = []
    for turn in range(rounds):
        order = (None, form) if turn % 2 else (form, None)
        taken = [turns.take(each) for each in order]
        pairs.append(taken if turn % 2 else taken[::-1])
    free, held = np.array(pairs).transpose(1, 2, 0)
    columns: dict[str, float] = {"pairs": rounds}
    for row, what in ((0, "step"), (1, "cpu")):
        more = 100 * (held[row] / free[row] - 1)
        columns |= {f"free_{what}_us": 1e6 * float(np.median(free[row]))}
        columns |= {f"held_{what}_us": 1e6 * float(np.median(held[row]))}
        names = ("percent", "low_percent", "high_percent", "p25_percent", "p75_percent")
        values = (np.median(more), *median_interval(more), *np.quantile(more, (0.25, 0.75)))
        columns |= {f"{what}_more_{name}": float(value) for name, value in zip(names, values)}
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    config = {"model": "demo", "ranks": 1, "streams": NUM_STREAMS, "rounds": args.rounds, "tokens": args.tokens}
    report = BenchmarkReport("served_forms", config)
    with RunningServer(DEMO_MODEL, 1) as server:
        turns = Turns(server, args.tokens)
        turns.take(None)
        for name in args.forms:
            report.add_row(form=name, **measure_form(turns, FORMS[name], args.rounds))
    report.finish()


if __name__ == "__main__":
    main()
