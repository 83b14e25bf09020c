"""Figures of README and docs: texts with holes that result files fill, so that no number can drift from its file.

    python -m benchmarks.tools.figures              what differs, and the quantities that nobody vouches for
    python -m benchmarks.tools.figures --write      writes the results' numbers into the pages

benchmarks/figures/*.toml hold entries like

    [[figure]]
    text = "| {tokens} | {d.face_us:3}, {d.deep_ep_us:3}, {d.face_us / d.deep_ep_us:.2f} |"
    d = "ep_low_latency_4gpu: tokens={tokens}; call=dispatch fp8"
    each.tokens = [1, 32, 128, 256]           # or a list of tables: each = [{tokens = 1}, {tokens = 32}]

text      as the page has it (line breaks apart), once for each combination of `each`. A hole is an expression over the
          rows that the entry's other keys select: a column of one row, or an array where several rows are selected.
          min, max, sum, len, mean and median are known. Of a selection, .config, .date and .commit are the file's
under     where the text stands, if it could stand elsewhere too: a heading, or the head of a table
{x:3}     at least three significant digits, never an exponent; other formats are Python's
d = ...   FILE: column=value; ...    FILE is benchmarks/results/FILE.json; a value may be `a|b`; no columns: all rows

This module knows neither what was measured nor how.
"""

import argparse
import json
import math
import re
import string
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.tools import printed_tables
from benchmarks.tools.printed_tables import PrintedTable
from benchmarks.tools.quantities import flat, part_under, unvouched
from benchmarks.tools.report import RESULTS, ROOT

FIGURES = ROOT / "benchmarks" / "figures"
_OWN_KEYS = {"text", "each", "under"}
_FUNCTIONS = {"min": np.min, "max": np.max, "sum": np.sum, "len": len, "mean": np.mean, "median": np.median}
_Labels = list[dict[str, Any]]
# What a page may have in place of a hole: a date, a number, or - for none.
_HOLE = r"(\d{4}-\d{2}-\d{2}|-?\d+(?:[.,]\d+)*(?: \d{3})*(?:e[+-]\d+)?|-)"


Rendering = list[tuple["Figure", "Rendered"]]


class FigureError(Exception):
    """An entry that cannot be rendered: an unknown file, column or format, or a selection of no row."""


class Selection:
    """The rows of one result file that a selector chose; columns are attributes."""

    def __init__(self, selector: str, directory: Path):
        name, _, conditions = selector.partition(":")
        self._selector = selector
        content = _content(directory / f"{name.strip()}.json")
        self.file, self.config = name.strip(), SimpleNamespace(**(content.get("config") or {}))
        self.date, self.commit = content.get("date"), content.get("commit")
        wanted = [condition.strip().split("=", 1) for condition in conditions.split(";") if condition.strip()]
        self._rows = [
            row
            for row in content["rows"]
            if all(str(row.get(column)) in values.split("|") for column, values in wanted)
        ]
        if not self._rows:
            raise FigureError(f"no row is chosen by {selector!r}")

    def __getattr__(self, column: str) -> Any:
        if column.startswith("_"):
            raise AttributeError(column)
        missing = [row for row in self._rows if row.get(column) in (None, "")]
        if missing:
            raise FigureError(f"{self._selector!r}: no value of {column!r}; there are {', '.join(missing[0])}")
        values = [row[column] for row in self._rows]
        return values[0] if len(values) == 1 else np.array(values)


@cache
def _content(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FigureError(f"{path.name} is not in {path.parent.name}/")
    return json.loads(path.read_text())


@dataclass(frozen=True)
class Rendered:
    """One entry with one choice of `each`, filled in."""

    text: str
    pattern: re.Pattern[str]  # the text with any numbers in its holes, and any line breaks
    holes: tuple[str, ...]  # what the groups of the pattern should be


@dataclass(frozen=True)
class Figure:
    """One entry of a toml file."""

    text: str
    selectors: Mapping[str, str]  # name -> selector
    each: _Labels  # one choice of labels for each time that pages have the text
    source: str  # the toml file, for messages
    under: str = ""  # heading or head of a table; empty: any page
    directory: Path = RESULTS

    @property
    def files(self) -> set[str]:
        """Names of the result files."""
        return {selector.partition(":")[0].strip() for selector in self.selectors.values()}

    def render(self) -> Iterator[Rendered]:
        for chosen in self.each:
            rows = {name: Selection(text.format(**chosen), self.directory) for name, text in self.selectors.items()}
            yield _rendered(self.text, {**chosen, **rows}, set(chosen))


def _rendered(template: str, names: Mapping[str, Any], labels: set[str]) -> Rendered:
    """labels: names whose holes are part of the text, since a page must have them as they are."""
    text, pattern, holes = "", "", []
    for literal, field, spec, _ in string.Formatter().parse(template):
        text, pattern = text + literal, pattern + _loosely(literal)
        if field is None:
            continue
        filled = show(_evaluate(field, names), spec or "")
        text += filled
        if field.strip() in labels:
            pattern += _loosely(filled)
        else:
            pattern += _HOLE
            holes.append(filled)
    return Rendered(flat(text), re.compile(pattern), tuple(holes))


def _loosely(text: str) -> str:
    """A pattern for the text with other white space."""
    return re.sub(r"(\\\s|\s)+", r"\\s+", re.escape(text))


def _evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    try:
        return eval(expression, {"__builtins__": {}}, {**_FUNCTIONS, **names})
    except FigureError:
        raise
    except Exception as error:
        raise FigureError(f"{{{expression}}}: {type(error).__name__}: {error}") from None


def show(value: Any, spec: str) -> str:
    """A value as pages write it: halves are rounded up, away from Python's habit."""
    fixed = re.fullmatch(r"\.(\d+)f", spec)
    if not fixed and not spec.isdigit():
        return format(value, spec)
    exact = Decimal(repr(float(value)))
    if fixed:
        decimals = int(fixed[1])
    else:
        rounded = float(f"{exact:.{int(spec) - 1}e}")
        decimals = max(0, int(spec) - 1 - (math.floor(math.log10(abs(rounded))) if rounded else 0))
    return str(exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP))


def load(directory: Path = FIGURES) -> list[Figure]:
    figures = []
    for path, content in _entries(directory):
        for entry in content.get("figure", []):
            selectors = {name: value for name, value in entry.items() if name not in _OWN_KEYS}
            figures.append(
                Figure(entry["text"], selectors, _choices(entry.get("each", {})), path.name, entry.get("under", ""))
            )
    return figures


def load_tables(directory: Path = FIGURES) -> list[PrintedTable]:
    return [
        printed_tables.from_entry(entry) for _, content in _entries(directory) for entry in content.get("table", [])
    ]


def _entries(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(path, tomllib.loads(path.read_text())) for path in sorted(directory.glob("*.toml"))]


def _choices(each: dict[str, list] | _Labels) -> _Labels:
    """A list as it stands; of a table every combination."""
    return each if isinstance(each, list) else [dict(zip(each, values)) for values in product(*each.values())]


def pages() -> dict[str, str]:
    """The text of README and of every page of docs, by path."""
    paths = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def render(figures: Sequence[Figure]) -> tuple[list[tuple[Figure, Rendered]], list[str]]:
    """All texts, and what cannot be rendered."""
    texts, errors = [], []
    for figure in figures:
        try:
            texts += [(figure, rendered) for rendered in figure.render()]
        except FigureError as error:
            errors.append(f"{figure.source}: {flat(figure.text)[:80]!r}: {error}")
    return texts, errors


def differences(rendered: Rendering, texts: Mapping[str, str]) -> Iterator[str]:
    """What no page says, or what a page says with other numbers."""
    flat_pages = {name: flat(text) for name, text in texts.items()}
    for figure, one in rendered:
        said = [(name, match) for name, text in flat_pages.items() for match in _matches(figure, one, text)]
        if not said:
            yield f"{figure.source}: no page says {one.text!r}"
        for name, match in said:
            if match.groups() != one.holes:
                yield f"{name} says {match[0]!r}, results say {one.text!r}"


def _matches(figure: Figure, rendered: Rendered, text: str) -> list[re.Match[str]]:
    """Where a page has the text, with whatever numbers."""
    return [
        match for begin, end in part_under(figure.under, text) for match in rendered.pattern.finditer(text, begin, end)
    ]


def vouched(rendered: Rendering, flat_text: str) -> list[tuple[int, int]]:
    """The spans of a page that figures fill."""
    return [match.span() for figure, one in rendered for match in _matches(figure, one, flat_text)]


def rewritten(rendered: Rendering, text: str) -> str:
    """The page with the results' numbers, its line breaks as they were."""
    for figure, one in rendered:
        for match in reversed(_matches(figure, one, text)):
            for number, hole in reversed(list(enumerate(one.holes, 1))):
                text = text[: match.start(number)] + hole + text[match.end(number) :]
    return text


def check(texts: Mapping[str, str]) -> list[str]:
    """Everything that is wrong with the figures of these pages."""
    rendered, wrong = render(load())
    tables = load_tables()
    wrong += differences(rendered, texts)
    wrong += [line for table in tables for line in table.differences(texts[table.page])]
    filled = {name: vouched(rendered, flat(text)) for name, text in texts.items()}
    for table in tables:
        filled[table.page] += table.spans(texts[table.page])
    return wrong + unvouched(texts, filled)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the results' numbers into README and docs")
    if parser.parse_args().write:
        rendered, _ = render(load())
        for name, text in pages().items():
            for table in load_tables():
                text = table.rewritten(text) if table.page == name else text
            (ROOT / name).write_text(rewritten(rendered, text))
    wrong = check(pages())
    print("\n".join(wrong) or "every figure is as its result file has it")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
