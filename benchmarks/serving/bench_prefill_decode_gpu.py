"""Prefill and decode apart on two GPUs: pulls of KV pages, time between tokens beside prompts, and goodput.

    python -m benchmarks.serving.bench_prefill_decode_gpu
    python -m benchmarks.serving.bench_prefill_decode_gpu --parts pull steps

Layers have DeepSeek-V3's width, --experts experts and dummy weights; there are --layers of them.

    pull      a prompt of 4096 tokens (62 layers' bytes) out of another process's GPU, against one plain copy of as many
              bytes (copy_ms): calls to the driver, and the host's time in them; with all checksums (checked_ms), and
              these alone (sums_ms); by a call for each piece (pieces_ms), and by one cuMemcpyBatchAsync for all
              (batch_ms)
    steps     steps of 32 decodes while such prompts are pulled and checked, against steps alone
    tails     time between tokens of 32 streams: alone, and beside prompts of 4096 tokens at 0.4 of what one prefill
              instance computes. 1 + 1 instances, and the same two GPUs as one group of two ranks, by chunk size
    goodput   requests per second and GPU that meet the limits, the best of several rates, of the same servers: 1.5 s
              and 50 ms, and these times layers / 61 (scaled), since all 61 layers take so much longer

After --limit seconds no further part is begun; the file says which are missing.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serving.dummy_model import shape_with
from benchmarks.serving.open_loop import OpenLoopLoad, drive, summary
from benchmarks.tools.report import RESULTS, BenchmarkReport
from benchmarks.tools.timing import quantile
from eprt import machine
from eprt.serve.running import RunningServer
from eprt.serve.tiers.tier import Tier

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "2 GPUs with NVLink"

PARTS = ("pull", "steps", "tails", "goodput")
STREAMS, PROMPT_TOKENS, SHARE = 32, 4096, 0.4
FULL_LAYERS = 61
_START_S = 70.0
_ALONE_S, _BESIDE_S = 2.0, 5.0


def server_flags(args: argparse.Namespace, chunk_size: int) -> list[str]:
    flags = ["--device", "cuda", "--load-format", "dummy", "--num-hidden-layers", str(args.layers)]
    flags += ["--skip-tokenizer-init", "--spare-experts", "0", "--ep-payload", "fp8", "--bind", "none"]
    flags += [
        "--max-num-seqs",
        "128",
        "--low-latency-max-tokens",
        "128",
        "--graph-sizes",
        "16",
        "32",
        "48",
        "64",
        "128",
    ]
    flags += ["--kv-cache-gb", "4", "--max-model-len", "16384", "--max-queue", "100000"]
    return [*flags, "--chunk-size", str(chunk_size)]


class TailsBench:
    """Streams of one server, and prompts beside them."""

    def __init__(self, url: str, model: str, seed: int = 0):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self._model, self._random = model, random.Random(seed)
        self._token_s: list[list[float]] = []  # when each token of each stream came

    async def close(self) -> None:
        await self._http.aclose()

    def _body(self, num_tokens: int, max_tokens: int) -> dict[str, Any]:
        prompt = [self._random.randrange(3, 500) for _ in range(num_tokens)]
        fields = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True, "model": self._model}
        return {"prompt": prompt, "max_tokens": max_tokens, **fields}

    async def _stream(self, body: dict[str, Any], token_s: list[float]) -> None:
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        token_s += [time.perf_counter()] * len(choice.get("token_ids") or ())

    async def capacity(self, num: int = 8) -> float:
        """Tokens per second of prompts that are there at once."""
        begin_s = time.perf_counter()
        await asyncio.gather(*(self._stream(self._body(PROMPT_TOKENS, 1), []) for _ in range(num)))
        return num * PROMPT_TOKENS / (time.perf_counter() - begin_s)

    async def tails(self, prompts_per_s: float) -> dict[str, Any]:
        self._token_s = [[] for _ in range(STREAMS)]
        streams = [asyncio.ensure_future(self._stream(self._body(512, 15000), token_s)) for token_s in self._token_s]
        try:
            async with asyncio.timeout(60):
                while min(map(len, self._token_s)) < 20:
                    await asyncio.sleep(0.01)
                    for stream in streams:
                        if stream.done():
                            stream.result()
            alone_s = time.perf_counter()
            await asyncio.sleep(_ALONE_S)
            beside_s = time.perf_counter()
            ttft_s, num_late = await self._prompts(prompts_per_s, beside_s)
            end_s = time.perf_counter()
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        alone, beside = self._gaps(alone_s, beside_s), self._gaps(beside_s, end_s)
        row: dict[str, Any] = {"prompts_per_s": prompts_per_s, "prompts": len(ttft_s), "prompts_under_way": num_late}
        for name, gaps in (("alone", alone), ("beside", beside)):
            row |= {f"{name}_p{percent}_ms": quantile(gaps, percent / 100) * 1e3 for percent in (50, 99)}
        row["ttft_p50_ms"] = quantile(sorted(ttft_s), 0.5) * 1e3 if ttft_s else float("nan")
        return row | {f"p99_over_alone_p{p}": row["beside_p99_ms"] / row[f"alone_p{p}_ms"] for p in (50, 99)}

    async def _prompts(self, per_s: float, begin_s: float) -> tuple[list[float], int]:
        """Times to the first token of those that have one in time, and how many have none."""
        tasks, due_s, seen = [], begin_s, []
        while (due_s := due_s + self._random.expovariate(per_s)) < begin_s + _BESIDE_S:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            token_s: list[float] = []
            seen.append((due_s, token_s))
            tasks.append(asyncio.ensure_future(self._stream(self._body(PROMPT_TOKENS, 8), token_s)))
        await asyncio.sleep(max(0.0, begin_s + _BESIDE_S - time.perf_counter()))
        ttft_s = [token_s[0] - due_s for due_s, token_s in seen if token_s]
        await asyncio.gather(*tasks, return_exceptions=True)
        return ttft_s, len(seen) - len(ttft_s)

    def _gaps(self, begin_s: float, end_s: float) -> list[float]:
        return sorted(
            b - a for token_s in self._token_s for a, b in itertools.pairwise(token_s) if begin_s <= b < end_s
        )


class ServersBench:
    """The servers, and their rows: each is written when it is there.

    Args:
        args: of the command line.
        deadline_s: after which nothing more is begun.
    """

    def __init__(self, report: BenchmarkReport, args: argparse.Namespace, deadline_s: float):
        self._report, self._args, self._deadline_s = report, args, deadline_s
        self._capacity = 0.0  # tokens of prompts per second, of one prefill instance

    def measure(self, model_dir: Path) -> None:
        """All servers are started at once; those that are not measured are idle."""
        apart = ["--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0"]
        servers = [({"server": "apart", "chunk_size": 8192}, 0, apart)]
        servers += [({"server": "together", "chunk_size": size}, 2, []) for size in self._args.chunk_size]
        with contextlib.ExitStack() as stack:
            started = []
            for what, num_ranks, flags in servers:
                flags = [*flags, *server_flags(self._args, what["chunk_size"])]
                server = RunningServer(model_dir, num_ranks, *flags, timeout_s=_START_S)
                stack.callback(server.kill)
                started.append((what, server))
            ready = [(what, server) for what, server in started if self._wait_ready(what, server)]
            for part, measure in (("tails", self._tails), ("goodput", self._goodput)):
                for what, server in ready if part in self._args.parts else ():
                    if time.monotonic() > self._deadline_s:
                        self._add(part="not measured", wanted=part, **what)
                        continue
                    try:
                        asyncio.run(measure(what, server))
                    except Exception:  # the other servers can still be measured
                        traceback.print_exc()
                        print(server.output()[-2000:], flush=True)
                        self._add(part="failed", wanted=part, **what)

    def _wait_ready(self, what: dict[str, Any], server: RunningServer) -> bool:
        try:
            server.wait_ready()
        except (RuntimeError, TimeoutError) as error:
            print(f"{what}: {str(error)[-2000:]}", flush=True)
            self._add(part="not started", **what)
            return False
        return True

    def _add(self, **row: Any) -> None:
        self._report.add_row(**row)
        self._report.write(self._args.out)
        print(json.dumps(row), flush=True)

    async def _prepare(self, server: RunningServer) -> tuple[TailsBench, float]:
        bench = TailsBench(server.url, server.model)
        await bench.capacity(2)
        measured = await bench.capacity()
        self._capacity = self._capacity or measured  # the first server's
        return bench, measured

    async def _tails(self, what: dict[str, Any], server: RunningServer) -> None:
        bench, measured = await self._prepare(server)
        try:
            row = await bench.tails(SHARE * self._capacity / PROMPT_TOKENS)
            self._add(part="tails", **what, prompt_tokens_per_s=measured, **row)
        finally:
            await bench.close()

    async def _goodput(self, what: dict[str, Any], server: RunningServer) -> None:
        """Rates rise for as long as at least half of the requests meet the full limits."""
        args = self._args
        if not self._capacity:
            bench, _ = await self._prepare(server)
            await bench.close()
        scale = args.layers / FULL_LAYERS
        tiers = Tier("full", 1.5, 0.05), Tier("scaled", 1.5 * scale, 0.05 * scale)
        for seed, share in enumerate(args.shares):
            if time.monotonic() > self._deadline_s:
                self._add(part="not measured", wanted="goodput", share=share, **what)
                continue
            rate = share * self._capacity / args.input_tokens
            load = OpenLoopLoad(rate, args.seconds, args.input_tokens, args.output_tokens, 0.5, 500, seed)
            served, took_s = await drive(server.url, server.model, load)
            row = summary(load, served, took_s, tiers)
            per_gpu = {f"{tier.name}_goodput_gpu": row[f"{tier.name}_goodput"] / 2 for tier in tiers}
            self._add(part="goodput", **what, share=share, **row, **per_gpu)
            if row["full_share"] < 0.5:
                break


def add_ratios(report: BenchmarkReport) -> None:
    """1 + 1 instances against the best of one group."""

    def rows(part: str, server: str) -> list[dict[str, Any]]:
        return [row for row in report.rows if row["part"] == part and row.get("server") == server]

    if rows("tails", "apart") and (together := rows("tails", "together")):
        (apart,) = rows("tails", "apart")
        best = min(together, key=lambda row: row["beside_p99_ms"])
        ratio = apart["beside_p99_ms"] / best["beside_p99_ms"]
        report.add_row(part="tails ratio", best_chunk_size=best["chunk_size"], p99_over_best_p99=ratio)
    for tier in ("full", "scaled"):
        column = f"{tier}_goodput_gpu"
        apart, together = (max(rows("goodput", name), key=lambda row: row[column], default=None) for name in _SERVERS)
        if apart and together and together[column]:
            ratio = apart[column] / together[column]
            report.add_row(part=f"goodput ratio, {tier}", best_chunk_size=together["chunk_size"], goodput_ratio=ratio)


_SERVERS = ("apart", "together")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--layers", type=int, default=10, help="default %(default)s")
    add("--experts", type=int, default=64, help="of a layer, default %(default)s")
    add("--chunk-size", type=int, nargs="+", default=[512, 2048, 8192], metavar="N", help="of the group of two ranks")
    add("--shares", type=float, nargs="+", default=[0.6, 0.9, 1.35], metavar="X", help="rates: of one GPU's prompts")
    add("--seconds", type=float, default=2.5, help="how long requests arrive at each rate, default %(default)s")
    add("--input-tokens", type=int, default=2048, metavar="N", help="of goodput's prompts, default %(default)s")
    add("--output-tokens", type=int, default=256, metavar="N", help="of goodput's answers, default %(default)s")
    add("--samples", type=int, default=15, help="of a pull, default %(default)s")
    add("--rounds", type=int, default=8, help="turns of 60 steps each, default %(default)s")
    add("--limit", type=float, default=200.0, metavar="S", help="begin nothing after so long, default %(default)s")
    add("--out", type=Path, default=RESULTS, metavar="DIR", help="where the result is written")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    deadline_s = time.monotonic() + args.limit
    names = ("layers", "experts", "seconds", "input_tokens", "output_tokens")
    gpus = {"device": machine.gpus()[0].split(",")[0], "gpus": len(machine.gpus())}
    report = BenchmarkReport("prefill_decode_2gpu", {**gpus, **{name: getattr(args, name) for name in names}})
    with shape_with(args.experts) as model_dir:
        if {"pull", "steps"} & {*args.parts}:
            from benchmarks.serving.gpu_pulls import measure_pulls, measure_steps, pages_elsewhere

            with pages_elsewhere() as source:
                if "pull" in args.parts:
                    measure_pulls(report, source, args.samples)
                if "steps" in args.parts:
                    measure_steps(report, source, model_dir, args.layers, args.rounds)
            report.write(args.out)
        if {"tails", "goodput"} & {*args.parts}:
            ServersBench(report, args, deadline_s).measure(model_dir)
    add_ratios(report)
    report.finish(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
