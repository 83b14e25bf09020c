"""The terminal's view: the findings and the matrix in words and figures, with and without colours."""

import re

import pytest
from eprt.diagnostics import analyse
from eprt.diagnostics.text import to_text, wants_colour

from tests.web.logs import CALLS, LATE_RANK, make_window, write_log

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def text_of(directory, *, colour: bool = False) -> str:
    report = analyse(directory)
    return to_text(report.to_json(), report.matrices, colour=colour)


def test_text_says_the_findings_and_the_matrix(log_8):
    text = text_of(log_8)
    assert "\x1b" not in text
    assert "8 ranks, 6 windows" in text and f"column rank {LATE_RANK}" in text and "point rank 2 <- rank 6" in text
    assert text.count("\n  -> ") == 2, "each with its advice"
    records = [r for window in range(6) for r in make_window(window, 8, 4) if r.rank == 3]
    waits = [sum(r.dispatch_wait_us[j] + r.combine_wait_us[j] for r in records) / (6 * CALLS) for j in range(8)]
    (row,) = re.findall(r"^ +3  .*$", text, re.MULTILINE)
    expected = ["3", *(("." if j == 3 else f"{wait:.0f}") for j, wait in enumerate(waits))]
    assert row.replace("|", " ").split() == expected


def test_colours_change_nothing_but_the_colour(log_8):
    plain, coloured = text_of(log_8), text_of(log_8, colour=True)
    assert coloured.count("\x1b[38;5;") > 56
    assert COLOUR.sub("", coloured).startswith(plain), "only the legend of the colours is more"


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    class Stream:
        def __init__(self, tty):
            self.isatty = lambda: tty

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert wants_colour(Stream(True)) and not wants_colour(Stream(False))
    assert wants_colour(Stream(False), "always") and not wants_colour(Stream(True), "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Stream(True)) and wants_colour(Stream(True), "always")
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_colour(Stream(True)), "an empty NO_COLOR says nothing"
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Stream(True))


def test_many_ranks_fit_the_terminal(log_256, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    lines = text_of(log_256).splitlines()
    matrix = [line for line in lines if re.match(r" *\d+ [ .:=+*#%@-]+$", line)]
    assert len(matrix) == 128 and max(map(len, lines)) <= 140
    assert matrix[0][6 + LATE_RANK // 2] not in ". ", "the late rank's column is seen"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_few_ranks(tmp_path, num_ranks):
    text = text_of(write_log(tmp_path, num_ranks, 3, num_ranks))
    assert ("nothing to compare" if num_ranks == 1 else "fewer than four ranks") in text


@pytest.mark.parametrize(("last", "words"), [(4, ", window 4, "), (6, ", windows 4..6, ")])
def test_the_windows_of_a_finding_are_counted(last, words):
    finding = {"kind": "column", "rank": 3, "src": None, "dst": None, "cause": "comp", "score": 9.0, "ratio": 4.0}
    more = {"first_window": 4, "last_window": last, "confidence": 1.0, "evidence": "e", "advice": "a"}
    text = to_text({"num_ranks": 8, "windows": 9, "findings": [{**finding, **more}]}, None, colour=False)
    assert words in text


def test_without_a_window_nothing_is_called_healthy():
    text = to_text({"num_ranks": 4, "windows": 0, "findings": []}, None, colour=False)
    assert "stands out" not in text and "one closes every few seconds while requests run" in text
