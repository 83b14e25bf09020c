"""From real waits to the right finding: a rank that is held up is the first thing `eprt diagnose` names."""

import json
from pathlib import Path

from eprt.diagnostics import read_log
from eprt.diagnostics.__main__ import main

from tests.ranks.launch import run_ranks

CAUSES = {"before": "comp", "experts": "comp", "messages": "comm"}


def test_a_late_rank_is_named_first(tmp_path: Path, capsys):
    """However crowded the machine, so that other ranks are late too: at some lateness this one stands out."""
    for late_s in (0.005, 0.03, 0.15):
        directory = tmp_path / str(late_s)
        run_ranks(
            4,
            "tests.ranks.cases_diagnose:write_logs",
            directory=str(directory),
            late_rank=2,
            late_s=late_s,
        )
        found = {where: findings_of(directory / where, capsys) for where in ("before", "experts", "messages")}
        named = all(
            (first["kind"], first["rank"]) == ("column", 2) and first["ratio"] >= 1.5 for first in found.values()
        )
        if named and {where: first["cause"] for where, first in found.items()} == CAUSES:
            break
    assert {(first["kind"], first["rank"]) for first in found.values()} == {("column", 2)}, found
    assert {where: first["cause"] for where, first in found.items()} == CAUSES, found
    assert min(first["ratio"] for first in found.values()) >= 1.5, found


def findings_of(directory: Path, capsys) -> dict:
    """The first finding: others may follow, where other ranks are late for a window."""
    assert main([str(directory), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["num_ranks"], report["windows"]) == (4, 3)
    for record in read_log(directory).records:
        phases = record.dispatch_wait_us, record.combine_wait_us
        assert sum(map(max, phases)) <= record.blocked_us + 1e-3 <= sum(map(sum, phases)) + 1, record
    return report["findings"][0]
