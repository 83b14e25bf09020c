"""Quantities on pages: found in text and in tables, and refused where nobody vouches for them."""

import pytest

from benchmarks.tools.quantities import excepted, flat, part_under, quantities, unvouched

NOTHING = {"stated": {}, "published": {}, "recorded": {}, "rough": {}}


def found(text: str, page: str = "docs/how-to.md") -> list[str]:
    return [quantity.text for quantity in quantities(page, text)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("It takes 13.2 us, not 2 ms.", ["13.2 us", "2 ms"]),
        ("Steps take 0.8 to 1.3 ms longer; -8 % of it.", ["0.8 to 1.3 ms", "-8 %"]),
        ("13 067 us at 8792 tokens/s, 1.4 times as fast", ["13 067 us", "8792 tokens/s", "1.4 times"]),
        ("4.47 TB/s, 2.4x, 1,024 MB", ["4.47 TB/s", "2.4x", "1,024 MB"]),
        ("layers of 128 x 128, 8 GPUs, version 2.11, 61 layers", []),
        ("`--timeout-s 900 s` and [a page of 5 ms](page-2%20ms.md)", ["5 ms"]),
        ("```sh\nsleep 5 s\n```\n", []),
    ],
)
def test_numbers_with_units_are_found(text, expected):
    assert found(text) == expected


def test_bare_numbers_count_in_tables_of_figures_only():
    table = "| tokens | us |\n|---|---|\n| 128 | 13.2, 0.66 |\n| words | 5 ms in words |\n| more | some |\n"
    assert found(table) == ["5 ms"]
    assert found(table, "docs/figures-x.md") == ["13.2, 0.66", "5 ms"]


def test_a_new_number_cannot_slip_in():
    texts = {"docs/a.md": "# A\n\nIt takes 5 ms, at most 30 s.\n"}
    filled = {"docs/a.md": []}
    (first, second) = unvouched(texts, filled, NOTHING)
    assert first == "docs/a.md: '5 ms' has no result file behind it: '# A It takes 5 ms, at most 30 s.'"
    stated = {**NOTHING, "stated": {"docs/a.md": ["30 s"]}}
    assert unvouched(texts, filled, stated) == [first] and second != first
    whole = {"docs/a.md": [(0, len(flat(texts["docs/a.md"])))]}
    assert unvouched(texts, whole, NOTHING) == []


def test_an_exception_that_nothing_needs_is_refused():
    stated = {**NOTHING, "stated": {"docs/a.md": ["30 s"]}}
    (wrong,) = unvouched({"docs/a.md": "Nothing."}, {"docs/a.md": []}, stated)
    assert wrong == "stated.toml: docs/a.md does not need '30 s' as stated any more"


def test_a_record_needs_its_date():
    text = "# A\n\n## Now\n\nIt takes 5 ms.\n\n## Then\n\nOn 2026-11-21 it took 7 ms.\n"
    listed = {**NOTHING, "recorded": {"docs/a.md": ["5 ms", "## Then"]}}
    (wrong,) = unvouched({"docs/a.md": text}, {"docs/a.md": []}, listed)
    assert wrong == "docs/a.md: '5 ms' is a record: its section must say when it was measured"


def test_the_part_below_a_head_ends_at_the_next_one():
    text = "# A ## B text 1 ## C | x | y | |---|---| | 1 | 2 | between | x | z | |---|---| | 3 | 4 |"
    ((begin, end),) = part_under("## B", text)
    assert text[begin:end] == "## B text 1 "
    ((begin, end),) = part_under("| x | y |", text)
    assert "| 1 | 2 |" in text[begin:end] and "| 3 | 4 |" not in text[begin:end]
    assert part_under("", text) == [(0, len(text))] and part_under("## D", text) == []


def test_the_lists_of_this_repository_are_read():
    lists = excepted()
    assert set(lists) == set(NOTHING) and "30 s" in lists["stated"]["docs/operations.md"]
