"""Migration changes no token: the same questions to a server while experts stay and while they move all the time.

    python -m benchmarks.balancing.migration_proof --ranks 4 --num-prompts 440
    python -m benchmarks.balancing.migration_proof --ranks 2 --num-prompts 110 --device cuda

The demo model in bf16 and in fp8 (128x128 blocks), each without and with draft tokens of the MTP layer. A server
answers the demo's held-out questions (examples/demo_model/evaluate.py), all greedy, once undisturbed and once while
random placements are posted one after the other, which move every expert of every MoE layer. Exit status 0 when the
token ids of every answer are equal, 1 when not.

Batches differ from run to run, and answers must not depend on them either. On GPUs in bfloat16 they do (docs/gpu.md),
so there the demo model computes in float32. Tests compare step by step with identical batches, on GPUs in bfloat16 and
fp8 too: tests/ranks/test_migration.py, tests/gpu/test_migration.py.
"""

import argparse
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer
from examples.demo_model.evaluate import CHECKPOINT, MAX_NEW_TOKENS, reply_text
from examples.demo_model.score import held_out_questions, score
from tests import tiny

NUM_RANKS = 0
ON_REQUEST = "takes 20 minutes"

CONCURRENCY = 16


class RandomPlacements(threading.Thread):
    """Posts one random placement after the other until stopped, and counts what they moved."""

    def __init__(self, url: str):
        super().__init__()
        self._url, self._stopped = url, threading.Event()
        self.migrations = self.commits = self.experts = 0
        self.problems: list[str] = []

    def run(self) -> None:
        rng = np.random.default_rng(0)
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stopped.is_set():
                placement = http.get("/v1/eprt/placement").json()
                rows = [rng.permutation(row).tolist() for row in placement["physical_to_logical_map"]]
                wanted = {**placement, "physical_to_logical_map": rows, "slot_weight": None}
                answer = http.post("/v1/eprt/rebalance", json={"placement": wanted})
                if answer.status_code != 202:
                    self.problems.append(answer.text)
                    return
                self._follow(http, wanted)

    def _follow(self, http: httpx.Client, wanted: dict) -> None:
        while (state := http.get("/v1/eprt/rebalance").json())["state"] != "idle":
            time.sleep(0.05)
        migration = state["migration"]
        reached = http.get("/v1/eprt/placement").json()["physical_to_logical_map"]
        if migration["state"] != "done" or reached != wanted["physical_to_logical_map"]:
            self.problems.append(f"{migration}")
        self.migrations += 1
        self.commits += migration["rounds_done"]
        self.experts += sum(migration["moves"].values())

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def ask_all(url: str, samples: list) -> tuple[list[str], list[list[int]], float]:
    """Replies, their token ids, and the seconds it took."""

    def ask(sample) -> tuple[str, list[int]]:
        body = {"messages": sample.messages, "temperature": 0, "max_tokens": MAX_NEW_TOKENS, "return_token_ids": True}
        if sample.tools:
            body["tools"] = sample.tools
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        return reply_text(choice["message"]), choice["token_ids"]

    start = time.monotonic()
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        replies, token_ids = zip(*threads.map(ask, samples))
    return list(replies), list(token_ids), time.monotonic() - start


def prove(directory: Path, name: str, num_drafts: int, num_ranks: int, samples: list, *more: str) -> dict:
    """One server, with more flags; the report's row."""
    options = ("--num-redundant-experts", "4", "--num-speculative-tokens", str(num_drafts), "--bind", "none", *more)
    with RunningServer(directory, num_ranks, *options) as server:
        replies, want, calm_s = ask_all(server.url, samples)
        mover = RandomPlacements(server.url)
        mover.start()
        try:
            moved_replies, got, moving_s = ask_all(server.url, samples)
        finally:
            mover.stop()
    for problem in mover.problems:
        print(problem, file=sys.stderr)
    return {
        "weights": name,
        "drafts": num_drafts,
        "ranks": num_ranks,
        "questions": len(samples),
        "tokens": sum(map(len, want)),
        "differ": sum(a != b for a, b in zip(want, got)) + len(mover.problems),
        "accuracy": score(samples, replies)["accuracy"],
        "moving_accuracy": score(samples, moved_replies)["accuracy"],
        "migrations": mover.migrations,
        "commits": mover.commits,
        "experts_moved": mover.experts,
        "calm_s": calm_s,
        "moving_s": moving_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=440)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    samples = held_out_questions(arguments.num_prompts)
    if arguments.device == "cuda":
        report = BenchmarkReport("migration_proof_gpu", {"model": "demo", "concurrency": CONCURRENCY})
        flags = ("--device", "cuda", "--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-gb", "0.1")
        report.add_row(**prove(CHECKPOINT, "fp32", 0, arguments.ranks, samples, *flags))
        return finish(report)
    report = BenchmarkReport("migration_proof", {"model": "demo", "concurrency": CONCURRENCY})
    with tempfile.TemporaryDirectory() as scratch:
        fp8 = Path(shutil.copytree(CHECKPOINT, Path(scratch) / "fp8"))
        tiny.quantize_checkpoint(fp8)
        for directory, name in ((CHECKPOINT, "bf16"), (fp8, "fp8")):
            for num_drafts in (0, 2):
                report.add_row(**prove(directory, name, num_drafts, arguments.ranks, samples))
                print(report.rows[-1], flush=True)
    return finish(report)


def finish(report: BenchmarkReport) -> int:
    report.finish()
    wrong = [row for row in report.rows if row["differ"] or row["accuracy"] != row["moving_accuracy"]]
    return 1 if wrong or not all(row["commits"] for row in report.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
