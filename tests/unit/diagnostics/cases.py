"""Records, logs and faults that the tests of the diagnosis share."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from eprt.diagnostics import ExpertRows, Finding, WindowMatrices, WindowRecord, WindowWriter
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate, records_of
from eprt.diagnostics.windows.window_sums import WindowSums


def record(rank: int = 0, window: int = 0, num_ranks: int = 4, **changes) -> WindowRecord:
    """100 calls, in each of which the rank waits 100 us for every rank, itself included."""
    values = {
        "window": window,
        "t_start": 1000.0 + 10 * window,
        "t_end": 1010.0 + 10 * window,
        "rank": rank,
        "num_ranks": num_ranks,
        "node_of_rank": [0] * num_ranks,
        "num_calls": 100,
        "dispatch_wait_us": [6000.0] * num_ranks,
        "combine_wait_us": [4000.0] * num_ranks,
        "recv_tokens": [3200] * num_ranks,
        "compute_us": 20000.0,
        "sent_tokens": [3200] * num_ranks,
    }
    return WindowRecord(**{**values, **changes})


def synthetic_records(
    num_ranks: int = 4,
    num_windows: int = 6,
    *,
    seed: int = 0,
    first: int = 0,
    start_s: float = 0.0,
    faults: Sequence[PlantedFault] = (),
) -> list[WindowRecord]:
    """first: window number of the first. start_s: later than usual."""
    made = records_of(generate(SyntheticJob(num_ranks, num_windows, seed, faults=tuple(faults))))
    return [replace(r, window=r.window + first, t_start=r.t_start + start_s, t_end=r.t_end + start_s) for r in made]


def with_experts(one: WindowRecord, *expert_of_slot: int) -> WindowRecord:
    """In one layer; the n-th window brought each slot n tokens."""
    rows = ExpertRows(0, (1,), (expert_of_slot,), ((one.window,) * len(expert_of_slot),))
    return replace(one, experts=rows)


def write_records(directory: Path, records: Iterable[WindowRecord]) -> Path:
    writer = WindowWriter(directory)
    for one in records:
        writer.write(one)
    return directory


def add_line(directory: Path, rank: int, line: str) -> None:
    with (directory / f"diagnose_rank{rank}.log").open("a") as file:
        file.write(line + "\n")


def matrices_of(records: Sequence[WindowRecord]) -> WindowMatrices:
    return WindowSums.from_records(records).matrices()


def late(rank: int, factor: float = 3.0, windows: tuple[int, int] | None = None) -> PlantedFault:
    return PlantedFault("column", rank=rank, cause="comp", factor=factor, windows=windows)


def link(src: int, dst: int, factor: float = 5.0, windows: tuple[int, int] | None = None) -> PlantedFault:
    return PlantedFault("point", src=src, dst=dst, factor=factor, windows=windows)


def places(findings: Iterable[Finding]) -> set[tuple]:
    return {(f.kind, f.rank) if f.kind != "point" else (f.kind, f.src, f.dst) for f in findings}
