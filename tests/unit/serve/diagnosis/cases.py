"""Six ranks' running totals, and a diagnosis that has seen some windows of them."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest

from eprt.serve.diagnosis.collector import Collector
from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.metrics import DiagnosisCollector
from eprt.serve.ranks.messages import SlotTotals, WaitTotals
from eprt.serve.ranks.rank import Rank

N = 6
INFO: Any = SimpleNamespace(node_of_rank=(0,) * N, moe_layers=(1, 2))


def totals(window: int, slow: int | None = None, since: int = 0) -> dict[int, WaitTotals]:
    """After `window` windows of 100 calls; everybody waits 5 us per call for each, 60 us for the slow rank, which is
    slow from window `since` on and computes five times as long. Slot s of layer l of rank i got 100 + s + l tokens per
    window; from window 3 on slot 0 of rank 1 holds expert 9."""

    late = max(0, window - since) if slow is not None else 0

    def wait_us(i: int, j: int) -> float:
        us_per_call = 60 if j == slow else 0.5 if i == slow else 5
        return 0.0 if i == j else 100.0 * (5 * (window - late) + us_per_call * late) * (1 + 0.02 * ((i + j) % 3))

    def slots(i: int) -> SlotTotals:
        first = 9 if i == 1 and window >= 3 else 2 * i
        rows = [[window * (100 + s + layer) for s in range(2)] for layer in range(2)]
        return SlotTotals(int(window >= 3), [[first, 2 * i + 1]] * 2, rows)

    def compute_us(i: int) -> float:
        return 1000.0 * (window + 4 * (late if i == slow else 0))

    return {
        i: WaitTotals(
            window * 100,
            [wait_us(i, j) for j in range(N)],
            [1.0 * window] * N,
            [50 * window] * N,
            [50 * window] * N,
            compute_us(i),
            slots(i),
        )
        for i in range(N)
    }


def members(totals_of: dict[int, WaitTotals]) -> list[Rank]:
    """Ranks that have reported these totals."""
    return [Rank(rank, 100 + rank, "host", cast(Any, None), waits=waits) for rank, waits in totals_of.items()]


def close(diagnosis: Diagnosis, *windows: dict[int, WaitTotals]) -> dict[str, Any]:
    """The findings after these windows."""

    async def go() -> dict[str, Any]:
        for window in windows:
            await diagnosis.close_window(window, INFO)
            await diagnosis.wait_analysed()
        return diagnosis.findings()

    return asyncio.run(go())


def metrics(diagnosis: Diagnosis) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(DiagnosisCollector(diagnosis, N))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def continued(before: dict[int, WaitTotals], more: dict[int, WaitTotals]) -> dict[int, WaitTotals]:
    """Totals that go on from `before` as `more` goes on from nothing."""

    def plus(a: Any, b: Any) -> Any:
        return [plus(x, y) for x, y in zip(a, b)] if isinstance(a, list) else a + b

    def one(a: WaitTotals, b: WaitTotals) -> WaitTotals:
        fields = {name: plus(getattr(a, name), getattr(b, name)) for name in WaitTotals.__struct_fields__[:6]}
        slots = SlotTotals(1, cast(SlotTotals, a.slots).expert_of_slot, plus(a.slots.rows, b.slots.rows))  # type: ignore[union-attr]
        return WaitTotals(**fields, slots=slots)

    return {rank: one(before[rank], more[rank]) for rank in before}


def records_of(window: int) -> list:
    """Every rank's record of a window."""
    collected = Collector(INFO.node_of_rank, INFO.moe_layers).close_window(totals(1))
    assert collected is not None
    return [replace(record, window=window) for record in collected.records]
