"""Tables of docs that a program prints from a result file: every row of the page is one that it prints now.

Entries of benchmarks/figures/*.toml:

    [[table]]
    page = "docs/figures-diagnosis.md"
    under = "### False alarms"
    file = "faults_clean"
    print = "benchmarks.diagnosis.fault_tables:clean_table"      called with the file's rows and `arguments`

A page may leave rows out. With `whole = true` it may not, --write makes every row anew, and the function is called with
all that the file holds. This module knows neither what was measured nor how.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.tools.quantities import flat, part_under
from benchmarks.tools.report import RESULTS


@dataclass(frozen=True)
class PrintedTable:
    """One entry of a toml file."""

    page: str
    under: str  # heading
    file: str  # name of the result file
    function: str  # module:function, which returns Markdown
    arguments: Sequence[str]
    whole: bool = False  # the page has every row; the function gets the file's head, too

    def printed(self) -> list[str]:
        """Rows, the head first, as flat text."""
        module, _, name = self.function.partition(":")
        content = json.loads((RESULTS / f"{self.file}.json").read_text())
        show = getattr(importlib.import_module(module), name)
        return [flat(line) for line in show(content if self.whole else content["rows"], *self.arguments).splitlines()]

    def said(self, text: str) -> Iterator[tuple[int, str]]:
        """(line number, row) of the page's rows below the head of the printed table."""
        (begin, end), *_ = part_under(self.under, text) or [(0, 0)]
        first, last = text.count("\n", 0, begin), text.count("\n", 0, end)
        head, inside = self.printed()[0], False
        for number, line in enumerate(text.splitlines()[first : last + 1], first):
            inside = line.startswith("|") and (inside or flat(line) == head)
            if inside and flat(line) != head and "---" not in line:
                yield number, flat(line)

    def differences(self, text: str) -> Iterator[str]:
        printed, said = self.printed(), list(self.said(text))
        if self.whole and [row for _, row in said] != printed[2:]:
            yield f"{self.page}: the table {printed[0]!r} is not what {self.function} prints now; --write writes it"
            return
        if not said and not self.whole:
            yield f"{self.page}: no table {printed[0]!r} under {self.under!r}"
        for _, row in said:
            if row not in printed:
                now = next((one for one in printed if _key(one) == _key(row)), "no such row")
                yield f"{self.page} says {row!r}, {self.function} prints {now!r}"

    def rewritten(self, text: str) -> str:
        if self.whole:
            return self._rewritten_whole(text)
        lines, now = text.splitlines(keepends=True), {_key(row): row for row in self.printed()}
        for number, row in self.said(text):
            lines[number] = now.get(_key(row), row) + "\n"
        return "".join(lines)

    def _rewritten_whole(self, text: str) -> str:
        """Without the old rows, and with the new ones below the table's head."""
        old, printed = {number for number, _ in self.said(text)}, self.printed()
        lines = []
        for number, line in enumerate(text.splitlines(keepends=True)):
            if number in old:
                continue
            lines.append(line)
            if len(lines) > 1 and flat(lines[-2]) == printed[0] and "---" in line:
                lines += [f"{row}\n" for row in printed[2:]]
        return "".join(lines)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where the rows stand in the flat text."""
        whole = flat(text)
        return [(at := whole.index(row), at + len(row)) for _, row in self.said(text)] if self.under in text else []


def _key(row: str) -> tuple[str, ...]:
    """The cells that say what a row is of: all before the first figure of more than one."""
    return tuple(cell.strip() for cell in row.strip("|").split("|")[:2])


def from_entry(entry: dict) -> PrintedTable:
    return PrintedTable(
        entry["page"],
        entry["under"],
        entry["file"],
        entry["print"],
        entry.get("arguments", ()),
        entry.get("whole", False),
    )
