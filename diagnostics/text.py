"""The terminal's view: findings as sentences, the matrix in colours where the terminal has them. Knows no sources."""

import os
import shutil
import textwrap
from datetime import UTC, datetime
from typing import Any, TextIO

import numpy as np

from .windows.matrices import WindowMatrices
from .windows.medians import median_of_known

_MOST_NUMBERED = 20  # ranks whose cells carry figures
_CELL = 7
# xterm's 256 colours, dark to bright on both sides of the usual wait: blue is shorter, orange longer. Lightness and
# blue against orange tell them apart, also for readers who do not see red or green.
_SHORTER, _USUAL, _LONGER = (25, 31, 67), 238, (94, 130, 172, 208, 214, 220, 228)
_STEP = 0.35  # of the natural logarithm of the ratio, per colour: 1.4x
_SHADES = " .:-=+*#%@"
_CAUSES = {
    "comm": "communication",
    "comp": "computation",
    "mixed": "communication under load",
    "stopped": "its process stands still",
    "unknown": "no proof of either",
}


def wants_colour(stream: TextIO, choice: str = "auto") -> bool:
    """choice: always, never, or auto: on a terminal, unless NO_COLOR (no-color.org) or TERM=dumb says otherwise."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def to_text(findings: dict[str, Any], matrices: WindowMatrices | None, *, colour: bool) -> str:
    """findings: eprt.findings/1. matrices: the windows; None: there are none."""
    num_ranks, num_windows = findings["num_ranks"], findings["windows"]
    lines = [f"{_count(num_ranks, 'rank')}, {_count(num_windows, 'window')}"]
    if num_ranks == 1:
        lines.append("one rank waits for nobody: there is nothing to compare")
    elif num_ranks < 4:
        lines.append("fewer than four ranks: only a rank that all others wait for can be told from its links")
    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    for finding in findings["findings"]:
        lines += ["", *_finding_lines(finding, width, colour)]
    for early in findings.get("early", ()):
        lines += ["", *textwrap.wrap(early["evidence"], width)]
    if not num_windows:
        lines.append("no window yet: one closes every few seconds while requests run")
    elif not findings["findings"]:
        lines.append("no rank and no link stands out")
    if matrices is not None and num_ranks > 1:
        lines += ["", *_matrix_lines(matrices, colour)]
    return "\n".join(lines)


def _finding_lines(finding: dict[str, Any], width: int, colour: bool) -> list[str]:
    kind, cause = finding["kind"], finding["cause"]
    head = f"{kind} {_place_of(finding)}".strip()
    if colour:
        head = f"\x1b[1;38;5;{_LONGER[3]}m{head}\x1b[0m"
    first, last = finding["first_window"], finding["last_window"]
    ratio = f"{finding['ratio']:.2g}x, " if finding["ratio"] else ""
    facts = (
        f"{head}  {ratio}{cause} ({_CAUSES.get(cause, cause)}), "
        f"{f'window {first}' if first == last else f'windows {first}..{last}'}, score {finding['score']:.1f}, "
        f"confidence {finding['confidence']:.2f}"
    )
    lines = [*_times_and_place(finding), *_cost_lines(finding.get("cost"))]
    lines += textwrap.wrap(str(finding["evidence"]), width - 2) + textwrap.wrap(f"-> {finding['advice']}", width - 2)
    return [facts, *(f"  {line}" for line in lines)]


def _times_and_place(finding: dict[str, Any]) -> list[str]:
    """Nothing where the findings are those of an older server."""
    if finding.get("t_start") is None:
        return []
    begin, end = _clock(finding["t_start"]), finding.get("t_end")
    until = "to now" if finding["active"] else f"to {_clock(end)}, over" if end else "over"
    parts = [f"{'burst at' if finding.get('burst') else 'from'} {begin} {until}"]
    if finding.get("host") is not None:
        gpu = f", {finding['gpu']}" if finding.get("gpu") else ""
        parts.append(f"host {finding['host']}, pid {finding['pid']}{gpu}")
    if finding.get("muted_until"):
        parts.append(f"muted until {_clock(finding['muted_until'])}")
    return ["; ".join(parts)]


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _cost_lines(cost: dict[str, Any] | None) -> list[str]:
    if cost is None or cost["lost"] == 0:
        return []
    if cost["us_per_call"] is None:
        return ["costs everything: no step ends meanwhile"]
    text = f"costs {100 * cost['lost']:.0f} % of the time"
    if cost["step_ms"] is not None:
        text += f": a step takes {cost['step_ms']:.3g} ms, {cost['step_ms_without']:.3g} without it"
    if cost["tokens_per_s"]:
        text += f"; {cost['tokens_per_s']:.0f} tokens/s, {cost['tokens_per_s_without']:.0f} without it"
    return [text]


def _place_of(finding: dict[str, Any]) -> str:
    if finding.get("src") is not None:
        return f"rank {finding['src']} <- rank {finding['dst']}"
    if finding.get("rank") is not None:
        return f"rank {finding['rank']}"
    return " and ".join(map(str, finding.get("nodes") or ())) or finding.get("tier") or ""


def _matrix_lines(matrices: WindowMatrices, colour: bool) -> list[str]:
    wait_us_NN, node_of_rank_N = matrices.mean_wait_us_NN, matrices.node_of_rank_N
    np.fill_diagonal(wait_us_NN, np.nan)
    ratio_NN = _ratio_to_usual(wait_us_NN, node_of_rank_N)
    if len(wait_us_NN) <= _MOST_NUMBERED:
        return _number_lines(wait_us_NN, ratio_NN, node_of_rank_N, colour)
    return _shade_lines(ratio_NN, colour)


def _ratio_to_usual(wait_us_NN: np.ndarray, node_of_rank_N: np.ndarray) -> np.ndarray:
    """Over the median of the links inside nodes, or of those between nodes; NaN where that is 0."""
    same_NN = node_of_rank_N[:, None] == node_of_rank_N[None, :]
    out = np.full_like(wait_us_NN, np.nan)
    for tier_NN in (same_NN, ~same_NN):
        if (usual := median_of_known(wait_us_NN[tier_NN])) > 0:
            out[tier_NN] = wait_us_NN[tier_NN] / usual
    return out


def _number_lines(wait_us_NN: np.ndarray, ratio_NN: np.ndarray, node_of_rank_N: np.ndarray, colour: bool) -> list[str]:
    ranks = range(len(wait_us_NN))

    def gap(k: int) -> str:
        return " |" if k and node_of_rank_N[k] != node_of_rank_N[k - 1] else ""

    title = "us per call that a rank (row) waited for a rank (column), over all windows:"
    lines = [title, " " * 6 + "".join(f"{gap(j)}{j:>{_CELL}}" for j in ranks)]
    for i in ranks:
        if gap(i):
            lines.append(" " * 6 + "-" * (len(ranks) * _CELL + 2 * len(set(node_of_rank_N.tolist())) - 2))
        cells = (gap(j) + _paint(_cell_text(wait_us_NN[i, j], i == j), ratio_NN[i, j], colour) for j in ranks)
        lines.append(f"{i:>6}" + "".join(cells))
    return [*lines, *_legend(colour)]


def _cell_text(value: float, own: bool) -> str:
    text = "." if own else "-" if np.isnan(value) else f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"{text:>{_CELL - 1}} "


def _shade_lines(ratio_NN: np.ndarray, colour: bool) -> list[str]:
    """Too many ranks for figures: one character per rank, or per block of ranks, with the longest wait in it."""
    columns = max(20, shutil.get_terminal_size((100, 24)).columns - 8)
    per_cell = -(-len(ratio_NN) // columns)
    blocks = range(0, len(ratio_NN), per_cell)
    what = "a rank" if per_cell == 1 else f"{per_cell} ranks, the longest wait of them,"
    lines = [f"who (row) waited for whom (column), over all windows; each character is {what} over the usual:"]
    ruler = [" "] * len(blocks)
    for k in range(0, len(blocks), 16):
        label = str(k * per_cell)
        if k + len(label) <= len(ruler):
            ruler[k : k + len(label)] = label
    lines.append(" " * 6 + "".join(ruler))
    for i in blocks:
        rows = ratio_NN[i : i + per_cell]
        values = [np.fmax.reduce(rows[:, j : j + per_cell].ravel()) for j in blocks]
        cells = "".join(_paint(" ", v, True) if colour else _shade(v) for v in values)
        lines.append(f"{i:>5} {cells}")
    return [*lines, *_legend(colour, shades=True)]


def _shade(ratio: float) -> str:
    if np.isnan(ratio):
        return " "
    return _SHADES[int(np.clip(np.log(max(ratio, 1e-9)) / _STEP + 1, 1, len(_SHADES) - 1))]


def _paint(text: str, ratio: float, colour: bool) -> str:
    if not colour or np.isnan(ratio):
        return text
    step = round(float(np.log(max(ratio, 1e-9)) / _STEP))
    side = _LONGER if step > 0 else _SHORTER
    number = side[min(abs(step), len(side)) - 1] if step else _USUAL
    ink = 16 if number in _LONGER[2:] else 255
    return f"\x1b[38;5;{ink};48;5;{number}m{text}\x1b[0m"


def _legend(colour: bool, shades: bool = False) -> list[str]:
    if not colour:
        return ["", f"usual '{_SHADES[1]}', 2x '{_shade(2)}', 4x '{_shade(4)}', 8x '{_shade(8)}'"] if shades else []
    marks = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 10)
    return ["", "of the usual wait: " + "".join(_paint(f" {m:g}x ", m, True) for m in marks)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
