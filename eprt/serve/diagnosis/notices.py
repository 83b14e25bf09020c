"""Notices: what the server's log says of findings and silent ranks: a line when one begins, a line when it is over.

Knows nothing of how findings are made (eprt.diagnostics).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MISSED = 3  # analyses without a finding until it is over: one of low confidence comes and goes
_KINDS = {
    "column": "the others wait for rank {rank}",
    "row": "rank {rank} waits for all others",
    "point": "rank {src} waits for rank {dst}",
    "node": "the others wait for the ranks of node {nodes[0]}",
    "path": "nodes {nodes[0]} and {nodes[1]} wait for each other",
    "tier": "waits {tier} are long",
    "job": "all ranks wait for each other",
}
_CAUSES = {"comp": "late compute", "comm": "late messages", "mixed": "load", "unknown": "for no reason that is known"}


class Notices:
    """Remembers what was logged, so that each finding is logged once."""

    def __init__(self):
        self.current: list[Mapping[str, Any]] = []  # findings that last, as in eprt.findings/1, in the order they began
        self._missed: dict[tuple, int] = {}
        self._silent: set[int] = set()

    def finding_lines(self, findings: Sequence[Mapping[str, Any]], newest_window: int) -> Iterator[str]:
        """The lines to log after an analysis. newest_window: of those analysed."""
        # A rank that gets a link's data late is late too, and in the first window that may be all that stands out.
        known_longer = [f for f in findings if f["first_window"] < newest_window]
        lasting = {_place(f): f for f in known_longer if f["last_window"] >= newest_window - 1}
        known = {_place(f): f for f in self.current}
        for place, finding in lasting.items():
            if place not in known:
                cause = _CAUSES.get(finding["cause"], finding["cause"])
                yield f"{_what(finding)} ({cause}): {finding['evidence']}. {finding['advice']}"
        self._missed = {
            place: 0 if place in lasting else self._missed.get(place, 0) + 1 for place in {**known, **lasting}
        }
        over = [place for place, missed in self._missed.items() if missed >= _MISSED]
        for place in over:
            yield f"{_what(known[place])}: no longer, last in window {known[place]['last_window']}"
            del self._missed[place]
        self.current = [lasting.get(place, known.get(place)) for place in self._missed]  # type: ignore[misc]

    def silence_lines(self, silent: Sequence[int]) -> Iterator[str]:
        """The lines to log after a window. silent: the ranks that reported no call in it."""
        new, back = sorted(set(silent) - self._silent), sorted(self._silent - set(silent))
        if new:
            yield f"{_ranks(new)} silent: no call in this window while others made some; late, stopped or gone"
        if back:
            yield f"{_ranks(back)} no longer silent"
        self._silent = set(silent)


def _place(finding: Mapping[str, Any]) -> tuple:
    names = ("kind", "rank", "src", "dst", "tier")
    return *(finding.get(name) for name in names), tuple(finding.get("nodes", ()))


def _what(finding: Mapping[str, Any]) -> str:
    return _KINDS[finding["kind"]].format_map(finding)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
