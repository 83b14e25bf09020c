"""Pictures of `eprt bench serve`: times and goodput against the rate, several result files in one picture.

Lines differ in marker, dashes and lightness, so that they can be told apart in print without colour. Knows nothing of
how load is made (open_loop.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of the first file, the second, ...: colour, marker, dashes. Their greys are far apart.
_STYLES = (
    ("#1b4f8f", "o", "-"),
    ("#e08a1e", "s", (0, (6, 2))),
    ("#3a3a3a", "^", (0, (2, 1.5))),
    ("#7fbf9f", "D", (0, (8, 2, 2, 2))),
    ("#a0407a", "v", (0, (1, 1))),
)
MAX_FILES = len(_STYLES)


@dataclass(frozen=True)
class LoadResult:
    """One result file."""

    label: str
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def points(self, column: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
        """Rates, and what was measured there."""
        rows = [row for row in self.rows if row.get(column) is not None]
        return [row["rate"] for row in rows], [row[column] * scale for row in rows]

    def share_of(self, column: str) -> float:
        """Of the requests, how many asked for the tier of this goodput."""
        mix = self.config.get("mix") or {}
        return mix.get(column.removesuffix("_goodput"), 0.0) / sum(mix.values()) if mix else 1.0

    @property
    def goodputs(self) -> dict[str, str]:
        """By column, what it is the goodput of."""
        named = {f"{name}_goodput": f"{name}: {limits}" for name, limits in (self.config.get("tiers") or {}).items()}
        if named:
            return named
        columns = [column for column in self.rows[0] if column.startswith("goodput_")]
        return {column: column.removeprefix("goodput_").replace("_", ", ") for column in columns}


def read_results(paths: Sequence[Path]) -> list[LoadResult]:
    """ValueError with one line for a file that is none of `eprt bench serve`."""
    if len(paths) > MAX_FILES:
        raise ValueError(f"{len(paths)} result files: a picture has at most {MAX_FILES}; leave some out")
    results = []
    for path in paths:
        try:
            content = json.loads(path.read_text())
            rows, config = content["rows"], content["config"]
            ok = bool(rows) and all({"rate", "ttft_p50_ms", "itl_p50_ms"} <= set(row) for row in rows)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{path}: cannot be read ({error}); give files that `eprt bench serve` wrote") from None
        if not ok:
            raise ValueError(f"{path}: has no rates; give files that `eprt bench serve` wrote")
        results.append(LoadResult(config.get("label") or path.stem, config, rows))
    labels = [result.label for result in results]
    return [
        LoadResult(str(path), result.config, result.rows) if labels.count(result.label) > 1 else result
        for path, result in zip(paths, results)
    ]


def draw(results: Sequence[LoadResult], picture: Path) -> Path:
    """Returns where it was written. ValueError for a name that says no known format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    goodputs = {column: what for result in results for column, what in result.goodputs.items()}
    columns = max(3, len(goodputs))
    figure, axes = pyplot.subplots(2, columns, figsize=(4.1 * columns, 7.2), layout="constrained", squeeze=False)
    top, bottom = axes
    _draw_times(top[0], results, "ttft", "time to first token, s", 1e-3)
    _draw_times(top[1], results, "itl", "time per token, ms", 1.0)
    _draw_lines(top[2], results, "tokens_s", "output tokens/s")
    for axis, (column, what) in zip(bottom, goodputs.items()):
        _draw_lines(axis, results, column, "requests/s within limits")
        most = max(row["rate"] for result in results for row in result.rows)
        share = max(result.share_of(column) for result in results)
        axis.plot([0, most], [0, most * share], color="#b0b0b0", linewidth=1, zorder=1, label="all that were sent")
        axis.set_title(f"goodput, {what}", fontsize=10)
    for axis in (*top[3:], *bottom[len(goodputs) :]):
        axis.remove()
    handles, labels = top[0].get_legend_handles_labels()
    if goodputs:
        handles, labels = [*handles, bottom[0].lines[-1]], [*labels, "all that were sent"]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=9, frameon=False)
    figure.suptitle(_title(results), fontsize=10)
    try:
        figure.savefig(picture, dpi=120)
    except (ValueError, OSError) as error:
        raise ValueError(f"--plot {picture}: cannot be written ({error}); as load.png or load.svg") from None
    finally:
        pyplot.close(figure)
    return picture


def _title(results: Sequence[LoadResult]) -> str:
    """What the files have in common."""
    first = results[0].config
    same = [name for name in first if all(result.config.get(name) == first[name] for result in results)]
    parts = [str(first["model"])] if "model" in same else []
    for name, words in (("input_tokens", "tokens in"), ("output_tokens", "tokens out"), ("seconds", "s at each rate")):
        parts += [f"{first[name]:g} {words}"] if name in same else []
    return ", ".join(parts)


def _draw_times(axis, results: Sequence[LoadResult], name: str, label: str, scale: float) -> None:
    """The median, and the 99th percentile with hollow markers."""
    for result, (colour, marker, dashes) in zip(results, _STYLES):
        for percent, filled in ((50, True), (99, False)):
            axis.plot(
                *result.points(f"{name}_p{percent}_ms", scale),
                color=colour,
                marker=marker,
                linestyle=dashes,
                linewidth=1.8 if filled else 1.0,
                markerfacecolor=colour if filled else "white",
                label=f"{result.label}, {'median' if filled else 'p99'}",
                zorder=3,
            )
    _finish(axis, label)


def _draw_lines(axis, results: Sequence[LoadResult], column: str, label: str) -> None:
    for result, (colour, marker, dashes) in zip(results, _STYLES):
        points = result.points(column)
        axis.plot(*points, color=colour, marker=marker, linestyle=dashes, linewidth=1.8, label=result.label, zorder=3)
    _finish(axis, label)


def _finish(axis, label: str) -> None:
    axis.margins(y=0.1)
    axis.set(xlabel="requests/s", ylabel=label, xlim=(0, None), ylim=(0, None))
    axis.grid(color="#e4e4e4", linewidth=0.8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
