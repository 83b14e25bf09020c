"""The report of a benchmark: a table on the screen and a JSON file."""

import datetime
import json

import pytest

from benchmarks.tools import provenance
from benchmarks.tools.report import BenchmarkReport, table


def test_a_report_prints_a_table_and_writes_what_readers_expect(tmp_path, capsys):
    one = BenchmarkReport("demo", {"hidden": 8})
    one.add_row(m=1, ours_us=1.23456, ours_p10_us=1.0, ratio=0.5)
    one.add_row(m=64, ours_us=123456.7, ratio=2.0, note="x")
    path = one.finish(tmp_path)
    printed = capsys.readouterr().out
    assert "demo  hidden=8" in printed and "1.235" in printed and "123457" in printed and "p10" not in printed
    content = json.loads(path.read_text())
    assert list(content) == ["name", "config", "commit", "clean", "date", "machine", "rows"]
    assert content["date"] == datetime.date.today().isoformat()
    assert "torch" in content["machine"]["versions"]
    assert content["rows"][0]["ours_p10_us"] == 1.0 and content["machine"]["num_cores"] >= 1


def test_a_table_lines_up_and_leaves_gaps_for_missing_columns():
    lines = table([{"a": 1, "b": 2.5}, {"a": 100, "c": "x"}]).splitlines()
    assert lines == ["  a    b  c", "  1  2.5", "100       x"]


@pytest.mark.parametrize("measured", [("abc", True), ("abc", False), (None, None)])
def test_a_report_says_commit_and_whether_the_tree_was_clean(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "measured_commit", lambda: measured)
    content = json.loads(BenchmarkReport("demo", {}).finish(tmp_path).read_text())
    assert (content["commit"], content["clean"]) == measured
