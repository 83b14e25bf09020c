"""From real waits to the right finding: a rank that is held up is the first thing `eprt diagnose` names."""

import json
from pathlib import Path

from eprt.diagnostics import read_log
from eprt.diagnostics.__main__ import main

from tests.ranks.launch import run_ranks


def test_a_late_rank_is_named_first(tmp_path: Path, capsys):
    run_ranks(4, "tests.ranks.cases_diagnose:write_logs", directory=str(tmp_path), late_rank=2, late_s=0.005)
    for where, cause in (("before", "comp"), ("experts", "comp"), ("messages", "comm")):
        assert main([str(tmp_path / where), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert (report["num_ranks"], report["windows"]) == (4, 3)
        # Other findings may follow: on a crowded machine other ranks are late too, for a window.
        first = report["findings"][0]
        assert (first["kind"], first["rank"], first["cause"]) == ("column", 2, cause) and first["ratio"] >= 1.5, report
        for record in read_log(tmp_path / where).records:
            phases = record.dispatch_wait_us, record.combine_wait_us
            assert sum(map(max, phases)) <= record.blocked_us + 1e-3 <= sum(map(sum, phases)) + 1, record
