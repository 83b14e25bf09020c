"""What the diagnosis costs: counting waits in every call, reporting them, and closing and analysing windows.

    mpirun -n 4 python -m benchmarks.diagnosis.bench_diagnose

Collection is switched off and on in turns, in one run: `off` counts nothing and reports no waits. The bare EP layer is
dispatch + combine with nothing in between, the worst case for what is counted per call; the demo model's steps are
those of a server with 4 running requests a rank, with a report every half second. `overhead` compares the time that
passes: the median over neighbouring pairs of turns; its error is half the distance of the quartiles over the square
root of their number. Where other work on the machine makes the error larger than the thing, `cpu_overhead` tells
more: each rank's processor time in its tenth of calmest turns, all ranks together. `direct` is what is done for the
diagnosis in a step, timed by itself, over the processor time of a step (`cpu`). A step of a real model takes many
times longer and has the same few counts per layer.

What the frontend does once per window of 10 s, in another process, is told apart: milliseconds, and the share of one
core. It is no part of any step.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from mpi4py import MPI

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.step_waits import StepWaits
from eprt.ep.config import EPConfig
from eprt.ep.registry import make_backend
from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.ranks.heartbeat import HeartbeatThread
from eprt.serve.ranks.messages import SlotTotals, StepReport, WaitTotals, pack
from eprt.serve.ranks.usage_meter import UsageMeter
from eprt.serve.ranks.wait_totals import wait_totals

NUM_RANKS = 4
_HIDDEN, _TOP_K, _SLOTS_PER_RANK = 2048, 8, 16
_REPORT_EVERY_S, _WINDOW_S = 0.5, 10.0


def paired(comm: MPI.Comm, set_counting: Callable[[bool], None], run: Callable[[bool], None], pairs: int) -> dict:
    """Columns of a row: seconds of run(on) with counting off and on, turn by turn, the order changing each time."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    cpu_seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(pairs + 1):
        for on in (turn % 2 == 0, turn % 2 == 1):
            comm.Barrier()
            set_counting(on)
            comm.Barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            run(on)
            cpu_s = time.process_time() - cpu_start
            comm.Barrier()
            if turn:  # the first is a warm-up
                seconds[on].append(time.perf_counter() - start)
                cpu_seconds[on].append(cpu_s)
    cpu_off_s, cpu_on_s = (comm.allreduce(float(np.quantile(cpu_seconds[on], 0.1))) for on in (False, True))
    ratios = np.array(seconds[True]) / np.array(seconds[False])
    low, high = np.quantile(ratios, (0.25, 0.75))
    return {
        "off_s": statistics.median(seconds[False]),
        "on_s": statistics.median(seconds[True]),
        "overhead_percent": 100 * (float(np.median(ratios)) - 1),
        "error_percent": 100 * float(high - low) / 2 / len(ratios) ** 0.5,
        "cpu_overhead_percent": 100 * (cpu_on_s / cpu_off_s - 1),
        "cpu_s": cpu_off_s / comm.size,
        "pairs": pairs,
    }


def ep_layer(comm: MPI.Comm, group: EPGroup, num_tokens: int, calls: int, pairs: int) -> dict[str, Any]:
    config = EPConfig(_HIDDEN, _SLOTS_PER_RANK * group.size, _TOP_K, num_tokens, mode="low_latency")
    backend = make_backend("cpu", config, group)
    x_TH = torch.ones(num_tokens, _HIDDEN, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(group.rank)
    slot_TK = torch.rand(num_tokens, config.num_slots, generator=generator).argsort(1)[:, :_TOP_K]
    weight_TK = torch.full((num_tokens, _TOP_K), 1 / _TOP_K)

    def run(on: bool) -> None:
        for _ in range(calls):
            handle = backend.dispatch_send(x_TH, slot_TK, weight_TK)
            received = backend.dispatch_recv(handle)
            backend.combine_send(backend.combine_buffer(handle, received), handle)
            backend.combine_recv(handle)

    columns = paired(comm, backend.set_counting, run, pairs)
    backend.close()
    return per_unit(f"EP layer, {num_tokens} tokens", columns, calls)


def per_unit(what: str, columns: dict[str, Any], count: int) -> dict[str, Any]:
    off_s, on_s = columns.pop("off_s"), columns.pop("on_s")
    cpu_us = columns.pop("cpu_s") / count * 1e6
    return {"what": what, "off_us": off_s / count * 1e6, "on_us": on_s / count * 1e6, "cpu_us": cpu_us, **columns}


def direct_us(engine: Engine, group: EPGroup) -> tuple[float, float]:
    """What is done for the diagnosis, by itself, calmest of many: per call (generously, once for each rank), and per
    step."""
    config = EPConfig(64, group.size, 1, 1, mode="low_latency")
    backend = make_backend("cpu", config, EPGroup.single())
    x_TH, slot_TK, weight_TK = torch.ones(1, 64).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)

    def calls() -> None:
        for _ in range(50):
            handle = backend.dispatch_send(x_TH, slot_TK, weight_TK)
            received = backend.dispatch_recv(handle)
            backend.combine_send(backend.combine_buffer(handle, received), handle)
            backend.combine_recv(handle)

    least_s = {}
    for on in (False, True):
        backend.set_counting(on)
        least_s[on] = min(_seconds(calls) for _ in range(100)) / 50
    backend.close()
    waits = StepWaits(group.node_of_rank, group.rank)
    waits.end_exchange([0] * group.size, [0] * group.size, all_idle=False)

    def steps() -> None:
        for _ in range(50):
            shown = waits.begin_exchange()
            waits.end_exchange([shown[0]] * group.size, [shown[1]] * group.size, all_idle=False)

    step_s = min(_seconds(steps) for _ in range(100)) / 50
    return max(0.0, least_s[True] - least_s[False]) * group.size * 1e6, step_s * 1e6


def demo_model(comm: MPI.Comm, group: EPGroup, steps: int, pairs: int) -> dict[str, Any]:
    engine = Engine(EngineConfig(str(DEMO_MODEL), kv_cache_gb=0.05), group)
    usage = UsageMeter(engine)
    waits = (lambda: group.current_wait, engine.model.exchange.current_wait)
    heartbeat = HeartbeatThread(cast(Any, None), lambda: False, waits)
    heartbeat.close()  # its beats are taken and packed below, by this thread
    max_tokens = min(engine.limits.max_model_len - 8, 2 * steps * (pairs + 1) + 8)
    next_id = 0

    def top_up() -> None:
        nonlocal next_id
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 4:
            params = SamplingParams(max_tokens=max_tokens, temperature=1.0, ignore_eos=True, seed=next_id)
            engine.add_request(str(next_id), [1 + next_id % 50, 2, 3], params)
            next_id += 1

    def run(on: bool) -> None:
        since_s = time.perf_counter()
        for _ in range(steps):
            engine.step()
            now_s = time.perf_counter()
            if now_s - since_s >= _REPORT_EVERY_S:
                since_s = now_s
                report(on)

    def report(on: bool) -> None:
        pack(StepReport([], engine.stats(), wait_totals(engine, usage) if on else None))
        if on:
            pack(heartbeat.beat())

    def set_counting(on: bool) -> None:
        top_up()
        engine.step_waits.counting = on
        for backend in engine.model.exchange.values():
            backend.set_counting(on)

    columns = paired(comm, set_counting, run, pairs)
    report_us = [_seconds(lambda: report(True)) * 1e6 for _ in range(50)]
    plain_us = [_seconds(lambda: report(False)) * 1e6 for _ in range(50)]
    row = per_unit("demo model, step", columns, steps)
    row["report_us"] = statistics.median(report_us) - statistics.median(plain_us)
    per_call_us, per_step_us = direct_us(engine, group)
    in_step_us = per_call_us * len(engine.model.moe_layers()) + per_step_us
    row["direct_us"] = in_step_us + row["report_us"] * row["cpu_us"] * 1e-6 / _REPORT_EVERY_S
    row["direct_percent"] = 100 * row["direct_us"] / row["cpu_us"]
    engine.close()
    return row


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def window(num_ranks: int, num_layers: int, slots: int, windows: int) -> dict[str, Any]:
    """Closing and analysing, as the frontend does it, when it remembers as many windows."""
    rng = np.random.default_rng(num_ranks)
    info: Any = SimpleNamespace(node_of_rank=tuple(r // 8 for r in range(num_ranks)), moe_layers=range(num_layers))
    diagnosis = Diagnosis(num_ranks)
    waits_us_WNN = (1e5 * rng.lognormal(0, 0.2, (windows, num_ranks, num_ranks))).cumsum(axis=0)
    tokens, closing_s, analysing_s = rng.integers(3000, 4000, num_ranks).tolist(), [], []

    def totals(w: int, rank: int) -> WaitTotals:
        waits, sent = waits_us_WNN[w, rank].tolist(), [(w + 1) * t for t in tokens]
        rows = [[(w + 1) * 50] * slots] * num_layers
        return WaitTotals((w + 1) * 1000, waits, waits, sent, sent, 1e6 * (w + 1), SlotTotals(0, rows, rows))

    async def go() -> None:
        for w in range(windows):
            ranks = {rank: totals(w, rank) for rank in range(num_ranks)}
            start = time.perf_counter()
            await diagnosis.close_window(ranks, info)
            closed = time.perf_counter()
            await diagnosis.wait_analysed()
            closing_s.append(closed - start)
            analysing_s.append(time.perf_counter() - closed)

    asyncio.run(go())
    last = slice(-max(1, windows // 3), None)
    close_ms, analyse_ms = (1e3 * statistics.median(s[last]) for s in (closing_s, analysing_s))
    return {
        "what": f"frontend, window of {num_ranks} ranks, {num_layers} MoE layers",
        "close_ms": close_ms,
        "analyse_ms": analyse_ms,
        "core_percent": (close_ms + analyse_ms) / _WINDOW_S / 10,
    }


def main() -> None:
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    group = EPGroup.from_mpi(comm)
    rows = [ep_layer(comm, group, 8, 40, 100), ep_layer(comm, group, 128, 5, 100), demo_model(comm, group, 3, 80)]
    comm.Barrier()
    if group.rank == 0:
        report = BenchmarkReport(
            "diagnose",
            {
                "ranks": group.size,
                "hidden": _HIDDEN,
                "top_k": _TOP_K,
                "report_every_s": _REPORT_EVERY_S,
                "window_s": _WINDOW_S,
            },
        )
        for row in rows:
            report.add_row(**row)
        for num_ranks, num_layers, slots in ((4, 3, 8), (8, 58, 36), (64, 58, 5)):
            report.add_row(**window(num_ranks, num_layers, slots, 24))
        report.finish()
    comm.Barrier()
    group.close()


if __name__ == "__main__":
    main()
