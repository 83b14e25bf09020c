"""Tables as plain text."""

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns in the order of first appearance; the first is aligned left, the others right."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    first, *others = (max(map(len, column)) for column in zip(*cells))
    lines = ("  ".join((line[0].ljust(first), *map(str.rjust, line[1:], others))) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
