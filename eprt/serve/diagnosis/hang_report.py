"""Hangs of a running server as findings, beside those of its windows. Knows no messages and no clocks of ranks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from eprt.diagnostics import Finding
from eprt.diagnostics.detect.cost import STANDSTILL
from eprt.diagnostics.detect.facts import in_order
from eprt.diagnostics.detect.hang_findings import KIND, hang_finding
from eprt.diagnostics.log.standing import LoggedProcess
from eprt.serve.diagnosis.hang_watch import HangWatch


def live_hangs(watch: HangWatch, processes: Mapping[int, LoggedProcess], window: int) -> list[Finding]:
    """Those that last. window: the one under way."""
    findings = []
    for hang in watch.hangs:
        windows = hang.first_window, max(window, hang.first_window)
        finding = hang_finding(hang.culprit, watch.standings, processes, windows)
        process = None if finding.subject is None else processes.get(finding.subject)
        if process is not None:
            finding = replace(finding, host=process.host, pid=process.pid, gpu=process.gpu)
        findings.append(replace(finding, t_start=hang.since_s, cost=STANDSTILL))
    return findings


def with_hangs(findings: Sequence[Finding], hangs: Sequence[Finding]) -> list[Finding]:
    """The findings of the windows analysed last, and the hangs of this moment, which know better."""
    live = {_place(hang) for hang in hangs}
    first = min((hang.first_window for hang in hangs), default=None)
    kept = []
    for finding in findings:
        if finding.kind == KIND and finding.active:
            if _place(finding) in live:
                continue
            finding = replace(finding, active=False, t_end=time.time())  # since its windows were analysed
        elif first is not None and finding.first_window >= first:
            continue  # what waits say while nothing moves is an echo of the hang
        kept.append(finding)
    return in_order([*hangs, *kept])


def hang_line(hang: Finding) -> str:
    """For the server's log."""
    return f"{hang_subject(hang)} hangs: {hang.evidence}. {hang.advice}"


def hang_subject(hang: Finding) -> str:
    """Who, with its process."""
    who = f"rank {hang.rank}" if hang.rank is not None else f"between rank {hang.src} and rank {hang.dst} something"
    return who if hang.pid is None or hang.rank is None else f"{who} (pid {hang.pid}, host {hang.host})"


def _place(finding: Finding) -> tuple:
    return finding.rank, finding.src, finding.dst
