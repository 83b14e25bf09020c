"""What migration costs a decoding step: steps with a migration under way all the time, and steps without.

    mpirun -n 4 python -m benchmarks.balancing.bench_migration
    mpirun -n 2 python -m benchmarks.balancing.bench_migration --device cuda

Every rank decodes REQUESTS requests. Windows of STEPS steps alternate: "off", "on" (a migration is under way in every
step; its message is decoded between two steps, as in the server) and "again" (off once more, which shows the noise of
the machine). Models: the demo model, and one with experts of 3.1 MB, so that bytes count; on GPUs, layers of
DeepSeek-V3 with random weights, whose experts have 44 MB (fp8). The time between two tokens of a request is the time
from the end of one step to the end of the next. Targets: p99_ratio at most 1.2, no step longer than twice the median.
Columns:

    p99_ratio, noise     p99 of on / off, and of again / off: each over neighbouring windows, then their median
    longer_on, _off      of 1000 steps, those longer than twice the median step without migrations
    cpu_us, cpu_max_us   processor time of migration in a step, on any rank: mean and most; free of others' noise
    cpu_max_part         cpu_max_us over a fast step (the tenth percentile of those without): the most it can add
    experts, commits     experts moved, placements that took effect; chunk_kb: of the last chunks, as large as a step
                         allows
"""

import argparse
import gc
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from eprt.balancer.migration import count_moves, schedule_rounds

from benchmarks.shapes import DEEPSEEK_V3, DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Stopwatch, quantile
from eprt import EPGroup, SamplingParams
from eprt.bind import bind
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.ep.migration.job import MigrationJob
from tests import tiny

NUM_RANKS = (2, 4)

WIDE = {"hidden_size": 1024, "moe_intermediate_size": 512, "n_routed_experts": 16, "num_hidden_layers": 3}
REQUESTS, REDUNDANT = 4, 4
GPU_OPTIONS = {"device": "cuda", "max_num_seqs": 16, "max_model_len": 512, "graph_sizes": (16,), "chunk_size": 256}
V3_OPTIONS = {"load_format": "dummy", "num_hidden_layers": 5}  # three dense ones first
STEPS, WARM_STEPS, MIN_TURNS, MAX_TURNS, SECONDS = 50, 5, 12, 48, 12.0
TURNS_TOGETHER = 4  # whose steps make one p99
KINDS = ("off", "on", "again")


@dataclass
class MigrationWindow:
    """One window of one kind, on this rank."""

    step_s: list[float] = field(default_factory=list)  # of each step
    cpu_s: list[float] = field(default_factory=list)  # processor time of migration in each step


class MigrationStream:
    """One migration after the other, each to a random placement of the next layer.

    num_slots: how many slots of the layer change; None: all
    """

    def __init__(self, engine: Engine, num_slots: int | None = None):
        self._engine, self._rng, self._num_slots = engine, np.random.default_rng(0), num_slots
        self._rows = np.array(engine.migrator.rows)
        self._num_jobs = self._epoch = 0
        self.watch = Stopwatch(time.thread_time)
        for name in ("work", "advance", "offer"):
            setattr(engine.migrator, name, self.watch.wrap(getattr(engine.migrator, name)))
        self._decode = self.watch.wrap(msgspec.msgpack.Decoder(MigrationJob).decode)
        self.moves = {"local": 0, "network": 0, "fan_out": 0}
        self._messages: list[bytes] = []

    def plan(self, count: int) -> None:
        """Makes the messages of the next migrations, so that planning is not measured: it is another process's work."""
        while len(self._messages) < count:
            target = self._rows.copy()
            layer = self._num_jobs % len(target)
            moved = self._rng.permutation(target.shape[1])[: self._num_slots]
            target[layer, np.sort(moved)] = target[layer, moved]
            self._num_jobs += 1
            rounds = schedule_rounds(self._rows, target, self._engine.group.node_of_rank)
            for way, num in count_moves(rounds, self._engine.group.node_of_rank).items():
                self.moves[way] += num
            job = MigrationJob(self._num_jobs, self._epoch, tuple(rounds))
            self._messages.append(msgspec.msgpack.encode(job))
            self._rows, self._epoch = target, self._epoch + len(rounds)

    def next(self) -> None:
        """Offers one more when none is under way."""
        if not self._engine.migrator.active:
            self._engine.migrator.offer(self._decode(self._messages.pop(0)))


def make_wide(directory: Path) -> Path:
    """Random weights: its answers are not read."""
    model = tiny.make_model("v3", dtype=torch.bfloat16, max_position_embeddings=1024, **WIDE)
    return tiny.save(model, directory)


def start_requests(engine: Engine) -> None:
    """The same ones before every window, until all decode."""
    rng = np.random.default_rng(engine.group.rank)
    for i in range(REQUESTS):
        engine.abort(f"{i}")
        prompt = rng.integers(3, 120, 16).tolist()
        engine.add_request(f"{i}", prompt, SamplingParams(max_tokens=STEPS + WARM_STEPS + 200, ignore_eos=True))
    for _ in range(WARM_STEPS):
        engine.step()


def run_window(engine: Engine, moves: MigrationStream, *, on: bool) -> MigrationWindow:
    window = MigrationWindow()
    start_requests(engine)
    moves.watch.reset()
    end_s = time.perf_counter()
    for _ in range(STEPS):
        if on:
            moves.next()
        engine.step()
        start_s, end_s = end_s, time.perf_counter()
        window.step_s.append(end_s - start_s)
        window.cpu_s.append(moves.watch.reset())
    while engine.migrator.active:  # not measured
        engine.step()
    return window


def measure(engine: Engine, moves: MigrationStream) -> dict[str, list[MigrationWindow]]:
    windows: dict[str, list[MigrationWindow]] = {kind: [] for kind in KINDS}
    group, start = engine.group, time.monotonic()
    for turn in range(MAX_TURNS):
        going_on = turn < MIN_TURNS or turn % TURNS_TOGETHER or time.monotonic() - start < SECONDS
        if not all(group.allgather(going_on)):
            break
        moves.plan(STEPS)
        for i in range(len(KINDS)):
            kind = KINDS[(turn + i) % len(KINDS)]
            windows[kind].append(run_window(engine, moves, on=kind == "on"))
    return windows


def row(group: EPGroup, windows: dict[str, list[MigrationWindow]], step_s: float) -> dict:
    """The report's columns, of rank 0's steps; all ranks step together."""

    def pooled(kind: str, turns: slice = slice(None)) -> list[float]:
        return sorted(s for window in windows[kind][turns] for s in window.step_s)

    def ratio(kind: str) -> float:
        groups = [slice(i, i + TURNS_TOGETHER) for i in range(0, len(windows["off"]), TURNS_TOGETHER)]
        ratios = sorted(quantile(pooled(kind, g), 0.99) / quantile(pooled("off", g), 0.99) for g in groups)
        return quantile(ratios, 0.5)

    def longer(kind: str) -> float:
        steps = pooled(kind)
        return 1000 * sum(s > 2 * step_s for s in steps) / len(steps)

    cpu_s = group.allgather([s for window in windows["on"] for s in window.cpu_s])
    return {
        "turns": len(windows["on"]),
        "step_ms": step_s * 1e3,
        "p99_off_ms": quantile(pooled("off"), 0.99) * 1e3,
        "p99_on_ms": quantile(pooled("on"), 0.99) * 1e3,
        "median_ratio": quantile(pooled("on"), 0.5) / step_s,
        "p99_ratio": ratio("on"),
        "noise": ratio("again"),
        "longer_on": longer("on"),
        "longer_off": (longer("off") + longer("again")) / 2,
        "cpu_us": 1e6 * float(np.mean(cpu_s)),
        "cpu_max_us": 1e6 * float(np.max(cpu_s)),
        "cpu_max_part": float(np.max(cpu_s)) / quantile(pooled("off"), 0.1),
    }


def bench(
    group: EPGroup, name: str, directory: Path, report: BenchmarkReport | None, num_slots: int | None = None, **options
) -> None:
    options = {"num_redundant_experts": REDUNDANT, "kv_cache_gb": 0.05, **options}
    engine = Engine(EngineConfig(str(directory), **options), group)
    moves = MigrationStream(engine, num_slots)
    gc.collect()
    gc.freeze()  # as the server does once it has loaded
    for kind in ("off", "on", "off"):  # warm
        moves.plan(STEPS)
        run_window(engine, moves, on=kind == "on")
    before = engine.migrator.status()
    windows = measure(engine, moves)
    after = engine.migrator.status()
    step_s = quantile(sorted(s for kind in ("off", "again") for w in windows[kind] for s in w.step_s), 0.5)
    columns = row(group, windows, step_s)
    sent = sum(group.allgather(after.sent_bytes - before.sent_bytes))
    expert_bytes = engine.model.moe_layers()[0].pool.expert_bytes
    if report is not None:
        sizes = {"expert_kb": expert_bytes / 1024, "experts": sent // expert_bytes}
        commits = {"commits": after.epoch - before.epoch, "chunk_kb": after.chunk_bytes / 1024}
        report.add_row(model=name, ranks=group.size, **sizes, **commits, **columns)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    group = EPGroup.from_mpi()
    bind("core", group.allgather)
    config = {"requests_per_rank": REQUESTS, "steps_per_window": STEPS, "redundant": REDUNDANT}
    where = "" if device == "cpu" else "gpu_"
    report = BenchmarkReport(f"migration_{where}{group.size}ranks", config) if group.rank == 0 else None
    if device == "cuda":
        bench(group, "demo", DEMO_MODEL, report, **GPU_OPTIONS)
        bench(group, "DeepSeek-V3, 2 MoE layers", DEEPSEEK_V3, report, num_slots=8, **GPU_OPTIONS, **V3_OPTIONS)
    else:
        bench_cpu(group, report)
    group.barrier()
    if report is not None:
        report.finish()
    group.close()


def bench_cpu(group: EPGroup, report: BenchmarkReport | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wide = Path(group.allgather(scratch)[0]) / "wide"
        if group.rank == 0:
            make_wide(wide)
        group.barrier()
        for name, directory in (("demo", DEMO_MODEL), ("wide", wide)):
            bench(group, name, directory, report)
        group.barrier()


if __name__ == "__main__":
    main()
