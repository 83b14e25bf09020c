"""Quantities in README and docs: every number with a unit, and every number in a table of figures.

Each must be filled by a figure (figures.py), or stand in benchmarks/figures/stated.toml as one that is not measured:

    [stated]                   defaults, limits and sizes, by page
    "docs/operations.md" = ["30 s", "64 MB"]
    [published]                measured by others
    [recorded]                 measured once, without a result file; its section must carry the date
    [rough]                    what to expect, by one digit, on pages that hold instructions

A heading or the head of a table, in place of a quantity, excepts all that stands below it. So no measured number can
enter a page without its file. This module knows units, and no figure.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STATED = Path(__file__).resolve().parents[1] / "figures" / "stated.toml"
KINDS = ("stated", "published", "recorded", "rough")
# The log of what was tried: every entry belongs to its day.
HISTORY = ("docs/dev-log.md",)
_UNITS = (
    r"us|ms|s|min|minutes|seconds|hours|%|times|bytes|[KMGT]B(?:/s)?|TFLOP/s|(?:million )?tokens/s|requests/s|W|MHz"
)
_NUMBER = r"\d+(?:[.,]\d+)*(?: \d{3})*"
_SEVERAL = rf"-?{_NUMBER}(?:(?: to | or | and | / |-|/){_NUMBER})*"
QUANTITY = re.compile(rf"(?<![\w.#/=])(?<!\w-)({_SEVERAL}(?: ?(?:{_UNITS})| ?x(?! ?\d)))(?![\w/])")
_RULER = re.compile(r"\|(?:\s*:?-{3,}:?\s*\|)+")
DATE = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")


def flat(text: str) -> str:
    """One line: white space collapsed, so that line breaks do not matter."""
    return re.sub(r"\s+", " ", text).strip()


def part_under(head: str, text: str) -> list[tuple[int, int]]:
    """Spans of a page below a heading (until the next one) or below the head of a table (until the next table).

    head: empty means the whole page; white space counts as in flat text
    """
    if not head:
        return [(0, len(text))]
    spans = []
    for match in re.finditer(re.sub(r"(\\\s|\s)+", r"\\s+", re.escape(head)), text):
        ends = [found.start() for found in re.finditer(r"(?<!\S)#{1,6} |\Z", text[match.end() :])][:1]
        if head.startswith("|"):  # its own ruler comes first
            ends += [found.start() for found in _RULER.finditer(text[match.end() :])][1:2]
        spans.append((match.start(), match.end() + min(ends)))
    return spans


@dataclass(frozen=True)
class Quantity:
    """One quantity on a page."""

    text: str
    begin: int  # in the flat text of the page
    end: int
    section: str  # flat text of the section it stands in


def quantities(page: str, text: str) -> Iterator[Quantity]:
    plain = flat(_without_code(text))
    assert len(plain) == len(flat(text))
    section_of = _sections(text)
    found = {match.span(1): match[1] for match in QUANTITY.finditer(plain)}
    if _holds_figures(page):
        for begin, end in _cells(text):
            if not any(begin <= b < end for b, _ in found) and re.match(r"[-+*]*\d", plain[begin:end]):
                found[begin, end] = plain[begin:end]
    for (begin, end), what in sorted(found.items()):
        section = next(body for start, stop, body in section_of if start <= begin < stop)
        yield Quantity(what, begin, end, section)


def _holds_figures(page: str) -> bool:
    """In tables of these pages a bare number is a figure too."""
    return page == "README.md" or page.startswith("docs/figures-")


def _without_code(text: str) -> str:
    """Code, links' targets and pictures blanked: what stands there is a command, a name or an address."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\s`|]", "@", match[0])

    for pattern in (r"^```.*?^```", r"`[^`\n]+(?:\n[^`\n]+)?`", r"\]\([^)]*\)"):
        text = re.sub(pattern, blank, text, flags=re.MULTILINE | re.DOTALL)
    return text


def _cells(text: str) -> Iterator[tuple[int, int]]:
    """Spans, in the flat text, of the cells behind the first of each row below a table's head."""
    lines = text.splitlines()
    at = 0
    flat_text = flat(text)
    for number, line in enumerate(lines):
        line = flat(line)
        if not line:
            continue
        begin = flat_text.index(line, at)
        at = begin + len(line)
        below = not re.match(r"\|[\s:|-]+\|$", line) and number + 1 < len(lines)
        is_head = below and re.match(r"\|[\s:|-]+\|$", lines[number + 1].strip() or "x")
        if not line.startswith("|") or is_head or re.match(r"\|[\s:|-]+\|$", line):
            continue
        position = begin + 1
        for i, cell in enumerate(line.strip("|").split("|")):
            if i and cell.strip():
                start = position + len(cell) - len(cell.lstrip())
                yield start, start + len(cell.strip())
            position += len(cell) + 1


def _sections(text: str) -> list[tuple[int, int, str]]:
    """(begin, end, flat text) of the sections under each heading, in the flat text."""
    text = re.sub(r"^```.*?^```", lambda code: code[0].replace("#", "_"), text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    sections, at, whole = [], 0, flat(text)
    for part in filter(None, map(flat, parts)):
        sections.append((at, at + len(part) + 1, whole[at : at + len(part)]))
        at += len(part) + 1
    return sections


def excepted(path: Path = STATED) -> dict[str, dict[str, list[str]]]:
    """kind -> page -> quantities."""
    content = tomllib.loads(path.read_text())
    return {kind: content.get(kind, {}) for kind in KINDS}


def unvouched(
    texts: Mapping[str, str],
    filled: Mapping[str, Sequence[tuple[int, int]]],
    exceptions: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> list[str]:
    """What no result file stands behind and no list excepts; exceptions that nothing needs any more."""
    exceptions = excepted() if exceptions is None else exceptions
    wrong, used = [], set()
    for page, text in texts.items():
        if page in HISTORY:
            continue
        listed = [(kind, one) for kind in KINDS for one in exceptions[kind].get(page, ())]
        below = {one: part_under(one, flat(text)) for _, one in listed if one.startswith(("#", "|"))}
        for quantity in quantities(page, text):
            if _is_within(quantity, filled[page]):
                continue
            named = [
                (kind, one) for kind, one in listed if one == quantity.text or _is_within(quantity, below.get(one, ()))
            ]
            used |= {(kind, page, one) for kind, one in named}
            if not named:
                wrong.append(f"{page}: {quantity.text!r} has no result file behind it: {_around(text, quantity)!r}")
            elif {kind for kind, _ in named} == {"recorded"} and not DATE.search(quantity.section):
                wrong.append(f"{page}: {quantity.text!r} is a record: its section must say when it was measured")
    for kind in KINDS:
        for page, ones in exceptions[kind].items():
            idle = [one for one in ones if (kind, page, one) not in used]
            wrong += [f"stated.toml: {page} does not need {one!r} as {kind} any more" for one in idle]
    return wrong


def _is_within(quantity: Quantity, spans: Sequence[tuple[int, int]]) -> bool:
    return any(begin <= quantity.begin and quantity.end <= end for begin, end in spans)


def _around(text: str, quantity: Quantity) -> str:
    return flat(text)[max(0, quantity.begin - 60) : quantity.end + 30]
