"""Figures: texts with holes, filled from result files, compared with pages and written into them."""

import json
from pathlib import Path

import pytest

from benchmarks.tools import figures
from benchmarks.tools.figures import Figure, FigureError, show

ROWS = [
    {"call": "send", "tokens": 8, "us": 13.24, "peer_us": 20.0},
    {"call": "send", "tokens": 64, "us": 15.0, "peer_us": 30.0},
    {"call": "recv", "tokens": 8, "us": 1134.2, "peer_us": None},
]
PAGE = """# Figures

## How fast

| tokens | us |
|---|---|
| 8 | 13.2, 0.66 |
| 64 | 15.0, 0.50 |

Sending takes 13 to
15 us; receiving 1134.
"""


@pytest.fixture
def results(tmp_path) -> Path:
    content = {"name": "ep", "config": {"ranks": 4}, "commit": "abc", "date": "2026-11-22", "rows": ROWS}
    (tmp_path / "ep.json").write_text(json.dumps(content))
    return tmp_path


def entry(results: Path, text: str, each=None, under: str = "", **selectors: str) -> Figure:
    return Figure(text, selectors, each or [{}], "test.toml", under, results)


def table_entry(results: Path) -> Figure:
    each = [{"tokens": 8}, {"tokens": 64}]
    text = "| {tokens} | {s.us:3}, {s.us / s.peer_us:.2f} |"
    return entry(results, text, each, s="ep: call=send; tokens={tokens}")


def sentence_entry(results: Path) -> Figure:
    text = "Sending takes {min(s.us):.0f} to {max(s.us):.0f} us; receiving {r.us:.0f}."
    return entry(results, text, s="ep: call=send", r="ep: call=recv")


@pytest.mark.parametrize(
    "value, spec, shown",
    [
        (13.24, "3", "13.2"),
        (14.0, "3", "14.0"),
        (1134.2, "3", "1134"),
        (0.0123, "2", "0.012"),
        (9.996, "3", "10.0"),
        (0, "3", "0.00"),
        (598.5, ".0f", "599"),
        (0.125, ".2f", "0.13"),
        (1.0, "g", "1"),
        (0.9, "2", "0.90"),
    ],
)
def test_numbers_are_shown_as_pages_write_them(value, spec, shown):
    assert show(value, spec) == shown


def test_pages_that_say_what_results_say_are_right(results):
    rendered, errors = figures.render([table_entry(results), sentence_entry(results)])
    assert not errors and [one.text for _, one in rendered[:2]] == ["| 8 | 13.2, 0.66 |", "| 64 | 15.0, 0.50 |"]
    assert list(figures.differences(rendered, {"page": PAGE})) == []


def test_another_number_is_told_with_the_page(results):
    rendered, _ = figures.render([table_entry(results), sentence_entry(results)])
    wrong = list(figures.differences(rendered, {"page": PAGE.replace("0.50", "0.40").replace("1134", "1000")}))
    assert wrong == [
        "page says '| 64 | 15.0, 0.40 |', results say '| 64 | 15.0, 0.50 |'",
        "page says 'Sending takes 13 to 15 us; receiving 1000.', "
        "results say 'Sending takes 13 to 15 us; receiving 1134.'",
    ]


def test_a_text_that_no_page_has_is_told(results):
    rendered, _ = figures.render([sentence_entry(results)])
    (wrong,) = figures.differences(rendered, {"page": PAGE.replace("Sending", "It")})
    assert wrong == "test.toml: no page says 'Sending takes 13 to 15 us; receiving 1134.'"


def test_results_are_written_into_the_page_whose_lines_stay(results):
    rendered, _ = figures.render([table_entry(results), sentence_entry(results)])
    old = PAGE.replace("13.2", "99.9").replace("0.50", "1.5").replace("13 to\n15", "7 to\n8")
    assert figures.rewritten(rendered, old) == PAGE


def test_a_row_stands_under_its_own_head(results):
    other = PAGE + "\n## Before\n\n| tokens | us |\n|---|---|\n| 8 | 20.0, 1.00 |\n"
    one = entry(results, "| 8 | {s.us:3}, {s.us / s.peer_us:.2f} |", under="## How fast", s="ep: call=send; tokens=8")
    rendered, _ = figures.render([one])
    assert list(figures.differences(rendered, {"page": other})) == []
    assert figures.rewritten(rendered, other) == other


@pytest.mark.parametrize(
    "text, selector, told",
    [
        ("{s.us:.0f}", "ep: call=nothing", "no row is chosen by 'ep: call=nothing'"),
        ("{s.ns:.0f}", "ep: call=recv", "no value of 'ns'; there are call, tokens, us, peer_us"),
        ("{s.peer_us:.0f}", "ep: call=recv", "no value of 'peer_us'"),
        ("{s.us:.0f}", "gone", "gone.json is not in"),
        ("{s.us / 0:.0f}", "ep: call=recv", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_filled_is_told(results, text, selector, told):
    one = entry(results, text, s=selector)
    with pytest.raises(FigureError, match=told):
        list(one.render())
    _, (error,) = figures.render([one])
    assert error.startswith("test.toml: ") and told in error


def test_a_selection_knows_its_file(results):
    (one,) = entry(results, "{s.config.ranks} ranks, {s.date}, {s.commit}", s="ep: tokens=64").render()
    assert one.text == "4 ranks, 2026-11-22, abc"


def test_each_is_a_list_or_all_combinations(tmp_path):
    (tmp_path / "a.toml").write_text('[[figure]]\ntext = "x"\ns = "ep"\neach.a = [1, 2]\neach.b = ["y"]\n')
    (tmp_path / "b.toml").write_text('[[figure]]\ntext = "x"\ns = "ep: a=1"\neach = [{ a = 1 }]\n')
    first, second = figures.load(tmp_path)
    assert first.each == [{"a": 1, "b": "y"}, {"a": 2, "b": "y"}] and second.each == [{"a": 1}]
    assert first.files == second.files == {"ep"}
