"""Tables of docs that a program prints: every row of the page is one that it prints now."""

import json
import sys
from types import SimpleNamespace

import pytest

from benchmarks.tools import printed_tables

PAGE = """# P

| other | table |
|---|---|
| x | 9 |

## Found

Words.

| fault | factor | recall |
| --- | --- | --- |
| column | 2 | 0.5 |
| row | 3 | 1 |

| other | table |
|---|---|
| column | 9 |

## Next

| fault | factor | recall |
"""


@pytest.fixture
def table(monkeypatch, tmp_path):
    monkeypatch.setattr(printed_tables, "RESULTS", tmp_path)
    rows = [{"fault": "column", "factor": 2, "recall": 0.5}, {"fault": "row", "factor": 3, "recall": 1}]
    (tmp_path / "faults.json").write_text(json.dumps({"rows": [*rows, {"fault": "point", "factor": 5, "recall": 1}]}))

    def show(rows, *ranks):
        assert ranks == ("8",)
        lines = [["fault", "factor", "recall"], ["---"] * 3, *(row.values() for row in rows)]
        return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)

    monkeypatch.setitem(sys.modules, "printer", SimpleNamespace(show=show))
    entry = {"page": "docs/p.md", "under": "## Found", "file": "faults", "print": "printer:show", "arguments": ["8"]}
    return printed_tables.from_entry(entry)


def test_a_page_may_leave_rows_out(table):
    assert list(table.differences(PAGE)) == []
    assert [row for _, row in table.said(PAGE)] == ["| column | 2 | 0.5 |", "| row | 3 | 1 |"]


def test_another_number_is_told_and_written(table):
    old = PAGE.replace("| column | 2 | 0.5 |", "| column | 2 | 0.75 |")
    (wrong,) = table.differences(old)
    assert wrong == "docs/p.md says '| column | 2 | 0.75 |', printer:show prints '| column | 2 | 0.5 |'"
    assert table.rewritten(old) == PAGE


def test_a_row_that_is_not_printed_any_more_is_told(table):
    (wrong,) = table.differences(PAGE.replace("| row | 3 | 1 |", "| link | 3 | 1 |"))
    assert wrong.endswith("printer:show prints 'no such row'")


def test_a_page_without_the_table_is_told(table):
    (wrong,) = table.differences("# P\n\n## Found\n\nWords.\n")
    assert "no table '| fault | factor | recall |' under '## Found'" in wrong


def test_the_spans_are_those_of_the_rows(table):
    flat_page = printed_tables.flat(PAGE)
    assert [flat_page[begin:end] for begin, end in table.spans(PAGE)] == ["| column | 2 | 0.5 |", "| row | 3 | 1 |"]


@pytest.fixture
def whole(monkeypatch, tmp_path):
    """A table of all rows, made of the file's head, too. Returns it and what it prints."""
    monkeypatch.setattr(printed_tables, "RESULTS", tmp_path)
    (tmp_path / "faults.json").write_text(json.dumps({"date": "2026-11-22", "rows": [{"n": 1}]}))
    rows = ["| column | 2 | 2026-11-22 |"]

    def show(content):
        assert content == {"date": "2026-11-22", "rows": [{"n": 1}]}
        return "\n".join(["| fault | factor | recall |", "| --- | --- | --- |", *rows])

    monkeypatch.setitem(sys.modules, "printer", SimpleNamespace(show=show))
    entry = {"page": "docs/p.md", "under": "## Found", "file": "faults", "print": "printer:show", "whole": True}
    return printed_tables.from_entry(entry), rows


@pytest.mark.parametrize(
    "new", [[], ["| a | 1 | 2026-11-22 |"], ["| a | 1 | x |", "| column | 2 | 0.5 |", "| b | 3 | z |"]]
)
def test_a_whole_table_is_written_anew(whole, new):
    table, rows = whole
    rows[:] = new
    (wrong,) = table.differences(PAGE)
    assert "'| fault | factor | recall |' is not what printer:show prints now" in wrong
    written = table.rewritten(PAGE)
    assert list(table.differences(written)) == [] and table.rewritten(written) == written
    old = "| column | 2 | 0.5 |\n| row | 3 | 1 |\n"
    assert written == PAGE.replace(old, "".join(f"{row}\n" for row in new))


def test_an_empty_table_is_filled(whole):
    table, rows = whole
    empty = PAGE.replace("| column | 2 | 0.5 |\n| row | 3 | 1 |\n", "")
    rows[:] = ["| column | 2 | 1 |"]
    assert list(table.differences(table.rewritten(empty))) == []


def test_a_page_that_leaves_a_row_of_a_whole_table_out_is_told(whole):
    table, rows = whole
    rows[:] = ["| column | 2 | 0.5 |", "| row | 3 | 1 |"]
    assert list(table.differences(PAGE)) == []
    assert list(table.differences(PAGE.replace("| row | 3 | 1 |\n", ""))) != []
    assert list(table.differences("# P\n\n## Found\n\nWords.\n")) != []
