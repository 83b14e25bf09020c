"""Facts of findings: whose process, since when, whether it lasts, what it costs; and their order. Finds nothing."""

from collections.abc import Sequence
from dataclasses import replace

from ..windows.matrices import WindowMatrices
from .analysis import Finding
from .cost import STANDSTILL, cost_of
from .hang_findings import logged_hangs

_STILL = 2  # a finding lasts where it was seen in one of so many newest entries: one noisy window ends nothing
_MOST_BURST_CONFIDENCE = 0.9
_BURST = (
    "one window only, so nothing to repair unless it comes back: see what ran there then (a checkpoint, another job, a "
    "pause); if it does: "
)


def with_facts(findings: Sequence[Finding], matrices: WindowMatrices) -> list[Finding]:
    """The findings of a run and its hangs: what lasts comes first, then what costs most."""
    hangs = logged_hangs(matrices)
    kept = [
        _with_times(finding, matrices)
        for finding in findings
        if not any(_is_of_hang(finding, hang.finding) for hang in hangs)
    ]
    for hang in hangs:
        active = hang.until_s is None
        kept.append(replace(hang.finding, t_start=hang.since_s, t_end=hang.until_s, active=active, cost=STANDSTILL))
    return in_order([_with_process(finding, matrices) for finding in kept])


def _is_of_hang(finding: Finding, hang: Finding) -> bool:
    """While nothing moves, waits say who waits at the end of a chain, not who is to blame. The rank that hung is late
    until the calls that it held up are over, which may be in the next window."""
    if finding.first_window < hang.first_window:
        return False
    is_its_end = finding.kind == "column" and finding.rank == hang.rank
    return finding.last_window <= hang.last_window + (1 if is_its_end and hang.rank is not None else 0)


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    """Lasting before past, hangs first, then by cost, then by score."""

    def key(finding: Finding) -> tuple:
        lost = 0.0 if finding.cost is None else finding.cost.lost
        return not finding.active, finding.burst, -round(lost, 2), -finding.score

    return sorted(findings, key=key)


def _with_process(finding: Finding, matrices: WindowMatrices) -> Finding:
    process = None if finding.subject is None else matrices.processes.get(finding.subject)
    if process is None:
        return finding
    return replace(finding, host=process.host, pid=process.pid, gpu=process.gpu)


def _with_times(finding: Finding, matrices: WindowMatrices) -> Finding:
    first = int(matrices.last_window_W.searchsorted(finding.first_window))
    last = int(matrices.last_window_W.searchsorted(finding.last_window))
    num = len(matrices.window_W)
    active, burst = last >= num - _STILL, first == last and num > 1 and matrices.num_windows_W[first] == 1
    late = finding.src if finding.kind == "point" else finding.rank
    return replace(
        finding,
        t_start=float(matrices.start_s_W[first]),
        t_end=None if active else float(matrices.end_s_W[last]),
        active=active,
        burst=bool(burst),
        cost=None if late is None else cost_of(matrices, slice(first, last + 1), late),
        confidence=min(finding.confidence, _MOST_BURST_CONFIDENCE) if burst else finding.confidence,
        advice=_BURST + finding.advice if burst else finding.advice,
    )
