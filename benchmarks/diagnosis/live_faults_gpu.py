"""Real faults on GPUs, found from waits: another process computes on one GPU, then copies over one link.

    python -m benchmarks.diagnosis.live_faults_gpu --ranks 4

A server with wide random weights has a steady load of long prompts, so that what crosses between GPUs takes time. Then
another process (gpu_disturbance.py) computes on one rank's GPU, and later copies from one GPU to another, by ordinary
kernels and copies; no setting of a GPU is touched. /v1/eprt/diagnose, asked four times a second, must name the rank,
and then the link or an end of it, within 30 s. With two ranks there is one link: waits cannot tell a slow rank from its
slow link, and only a rank can be named (docs/diagnosis.md).

Columns: expected, any of which will do; the waits of the busiest link of the fault, before it and meanwhile.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.diagnosis.gpu_disturbance import Disturbance
from benchmarks.diagnosis.live_faults import place_of
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

NUM_RANKS = 0
NEEDS_GPU = True

WITHIN_S = 30.0
_POLL_S = 0.25
WIDE = {
    "hidden_size": 7168,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
}
CHUNK = 4096
FLAGS = (
    "--device cuda --load-format dummy --skip-tokenizer-init --no-prefix-cache --max-num-seqs 8 --max-model-len 4400 "
    "--kv-cache-gb 0.2 --low-latency-max-tokens 8 --overlap none"
)


def wide_model(directory: Path) -> Path:
    """A config.json alone: the demo's shape, with DeepSeek-V3's hidden size."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **WIDE}))
    return directory


@contextlib.contextmanager
def steady_load(url: str, num_ranks: int) -> Iterator[None]:
    """Two requests at a time, each of so many sequences that every rank has several prompts to compute."""
    done = threading.Event()

    def keep_busy(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with httpx.Client(base_url=url, timeout=120) as client:
            while not done.is_set():
                body = {
                    "prompt": rng.integers(3, 600, CHUNK).tolist(),
                    "max_tokens": 2,
                    "n": 4 * num_ranks,
                    "temperature": 1,
                    "ignore_eos": True,
                }
                with contextlib.suppress(httpx.HTTPError):
                    client.post("/v1/completions", json=body)

    threads = [threading.Thread(target=keep_busy, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def watch(url: str, seconds: float, expected: Sequence[tuple]) -> dict:
    """What was said in so many seconds. Only findings that go on in the newest windows count."""
    start_s, seen = time.monotonic(), {"named_after_s": None, "as": "", "cause": "", "ratio": "", "others": {}}
    with httpx.Client(base_url=url, timeout=30) as client:
        while (now_s := time.monotonic() - start_s) < seconds:
            document = client.get("/v1/eprt/diagnose").json()
            newest = document["newest_window"]
            for finding in document["findings"]:
                if finding["last_window"] < newest - 1 or finding["first_window"] >= newest:
                    continue
                place = place_of(finding)
                if place not in expected:
                    seen["others"][place] = finding["cause"]
                elif seen["named_after_s"] is None:
                    seen.update(named_after_s=round(now_s, 1), cause=finding["cause"], ratio=finding["ratio"])
                    seen["as"] = " ".join(map(str, place))
            time.sleep(_POLL_S)
    return seen


def waits(url: str, since: int) -> tuple[int, np.ndarray, float]:
    """(newest window, us that i waited for j per call, calls per second) over the windows after `since`."""
    records = httpx.get(f"{url}/v1/eprt/diagnose", params={"since": since}, timeout=30).json()["records"]
    size = records[0]["num_ranks"]
    total, calls, seconds = np.zeros((size, size)), np.zeros((size, 1)), 0.0
    for record in records:
        rank = record["rank"]
        total[rank] += np.array(record["dispatch_wait_us"]) + np.array(record["combine_wait_us"])
        calls[rank] += record["num_calls"]
        seconds += (record["t_end"] - record["t_start"]) / size
    return max(r["window"] for r in records), total / np.maximum(calls, 1), float(calls.mean() / max(seconds, 1e-9))


@dataclass(frozen=True)
class GpuFaultPhase:
    """A time with one fault or none."""

    name: str
    fault: str  # "compute", "copy", or "" for none
    seconds: float
    expected: tuple[tuple, ...] = ()  # places, any of which will do


def phases_of(options: argparse.Namespace) -> list[GpuFaultPhase]:
    last = options.ranks - 1
    # Behind a switch GPUs have one way out and one way in each, which all of their links share.
    link = (("point", 0, last), ("column", last), ("row", 0))
    return [
        GpuFaultPhase("clean", "", options.clean),
        GpuFaultPhase("compute on GPU 1", "compute", options.fault, (("column", 1),)),
        GpuFaultPhase("calm", "", options.clean / 2),
        GpuFaultPhase(f"copies from GPU {last} to GPU 0", "copy", options.fault, link),
    ]


def row(phase: GpuFaultPhase, seen: dict, others: dict[tuple, str], wait_us: np.ndarray, rate: float) -> dict:
    """The report's columns. others: unexpected places that were not named before."""
    named_s = seen["named_after_s"]
    return {
        "phase": phase.name,
        "seconds": phase.seconds,
        "expected": " or ".join(" ".join(map(str, place)) for place in phase.expected),
        "named_after_s": named_s,
        "named": seen["as"],
        "cause": seen["cause"],
        "ratio": seen["ratio"],
        "others": "; ".join(f"{' '.join(map(str, place))} {cause}" for place, cause in others.items()),
        "calls_per_s": round(rate, 1),
        "wait_us": np.round(wait_us).astype(int).tolist(),
        "ok": not phase.expected or (named_s is not None and named_s <= WITHIN_S),
    }


def run(phases: Sequence[GpuFaultPhase], num_ranks: int, window_s: float, report: BenchmarkReport) -> None:
    """One server through all phases."""
    told_before: set[tuple] = set()
    flags = [*FLAGS.split(), "--chunk-size", str(CHUNK), "--diagnose-window", str(window_s)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        Disturbance("compute", "1") as computing,
        Disturbance("copy", str(num_ranks - 1), "0") as copying,
        RunningServer(wide_model(Path(scratch)), num_ranks, *flags, timeout_s=150) as server,
        steady_load(server.url, num_ranks),
    ):
        time.sleep(2)
        newest, disturbances = -1, {"compute": computing, "copy": copying}
        for phase in phases:
            if phase.fault:
                disturbances[phase.fault].turn(on=True)
            seen = watch(server.url, phase.seconds, phase.expected)
            newest, wait_us, rate = waits(server.url, newest)
            if phase.fault:
                disturbances[phase.fault].turn(on=False)
            others = {place: cause for place, cause in seen["others"].items() if place not in told_before}
            told_before |= {*seen["others"], *phase.expected[:1]}
            report.add_row(**row(phase, seen, others, wait_us, rate))
            print(report.rows[-1], flush=True)
        print("\n".join(line for line in server.output().splitlines() if "diagnosis" in line))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.live_faults_gpu", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--window", type=float, default=2.0, help="seconds of a window, default 2")
    parser.add_argument("--clean", type=float, default=14.0, help="seconds without a fault, default 14")
    parser.add_argument("--fault", type=float, default=16.0, help="seconds of each fault, default 16")
    options = parser.parse_args(argv)
    config = {"ranks": options.ranks, "window_s": options.window, "chunk": CHUNK, **WIDE}
    report = BenchmarkReport("live_faults_gpu", config)
    run(phases_of(options), options.ranks, options.window, report)
    report.finish()
    return 0 if all(one["ok"] for one in report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
