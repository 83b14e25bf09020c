"""Timeline of MoE layers: when each stage of the schedule ran, on which lane, and a picture of it.

python -m benchmarks.serving.layer_timeline benchmarks/results/layer_timeline_2gpu.json     draws the PNG beside it
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eprt.layers.schedules import Stage

_COLOURS = {
    "attention": "#4c78a8",
    "gate": "#9ecae9",
    "shared": "#72b7b2",
    "experts": "#54a24b",
    "dispatch": "#f58518",
    "combine": "#e45756",
    "add": "#b279a2",
}
_EXCHANGE = ("dispatch", "combine")


@dataclass(frozen=True)
class Span:
    """One stage of one microbatch in one layer."""

    stage: str
    lane: str
    microbatch: int  # 0, or 1 for the second of two
    layer: int
    begin_us: float
    end_us: float


class Tracer:
    """Takes the place of Lanes.trace: times stages by events of their own stream on GPUs, else by the clock."""

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self._begun: Counter = Counter()  # (stage, microbatch) -> how often
        self._rows: list[tuple[Stage, int, int, Any, Any]] = []
        self._start = self._now()

    @contextmanager
    def __call__(self, stage: Stage, microbatch: int) -> Iterator[None]:
        layer = self._begun[stage.name, microbatch]
        self._begun[stage.name, microbatch] += 1
        begin = self._now()
        yield
        self._rows.append((stage, microbatch, layer, begin, self._now()))

    def spans(self) -> list[Span]:
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            Span(stage.name, stage.lane, microbatch, layer, self._us(begin), self._us(end))
            for stage, microbatch, layer, begin, end in self._rows
        ]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _us(self, moment: Any) -> float:
        return self._start.elapsed_time(moment) * 1e3 if self._on_gpu else (moment - self._start) * 1e6


def period_us(spans: list[Span]) -> float:
    """The time from layer to layer: the median of those between the first and the last."""
    return statistics.median(_period(spans, layer) for layer in range(1, _last_layer(spans)))


def exposed_us(spans: list[Span], layer: int | None = None) -> float:
    """Of the time from layer to layer, the part in which the compute lane computed nothing: it exchanged, or waited for
    another lane, for peers or for the host. layer: default the median of those between the first and the last."""
    if layer is None:
        return statistics.median(exposed_us(spans, i) for i in range(1, _last_layer(spans)))
    begin, end = _begin(spans, layer), _begin(spans, layer + 1)
    own = (s for s in spans if s.lane == "compute" and not s.stage.startswith(_EXCHANGE))
    return end - begin - sum(max(0.0, min(s.end_us, end) - max(s.begin_us, begin)) for s in own)


def stage_us(spans: list[Span], stage: str) -> float | None:
    """Of a layer's time in this stage: the median. None where an operator joins it to others."""
    times_us = [span.end_us - span.begin_us for span in spans if span.stage == stage]
    return statistics.median(times_us) if times_us else None


def save(path: Path, title: str, panels: dict[str, list[Span]]) -> None:
    path.write_text(
        json.dumps({"title": title, "panels": {name: [asdict(s) for s in spans] for name, spans in panels.items()}})
    )


def draw(path: Path, layer: int = 1) -> Path:
    """A panel per overlap: a row per lane, the layer's stages in full colour, its neighbours' pale. Returns the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    content = json.loads(path.read_text())
    panels = {name: [Span(**span) for span in spans] for name, spans in content["panels"].items()}
    lanes = {
        name: [lane for lane in ("compute", "side", "comm") if any(s.lane == lane for s in spans)]
        for name, spans in panels.items()
    }
    heights = [len(lanes[name]) + 0.6 for name in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(13, 0.8 * sum(heights) + 1.6),
        height_ratios=heights,
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    widest = max(_extent(spans, layer)[1] - _extent(spans, layer)[0] for spans in panels.values())
    for axis, (name, spans) in zip(axes[:, 0], panels.items()):
        _draw_panel(axis, name, spans, lanes[name], layer, widest)
    axes[-1, 0].set_xlim(-0.02 * widest, 1.1 * widest)
    axes[-1, 0].set_xlabel("us since the layer's first stage began")
    figure.suptitle(content["title"], fontsize=11)
    shown = {span.stage for spans in panels.values() for span in spans}
    kinds = [kind for kind in _COLOURS if any(stage.startswith(kind) for stage in shown)]
    patches = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind], label=kind) for kind in kinds]
    if any(span.microbatch for spans in panels.values() for span in spans):
        patches.append(plt.Rectangle((0, 0), 1, 1, facecolor="#cccccc", edgecolor="white", hatch="//", label="half b"))
    patches.append(plt.Rectangle((0, 0), 1, 1, color="#cccccc", alpha=0.4, label="pale: other layers"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    png = path.with_suffix(".png")
    figure.savefig(png, dpi=110)
    plt.close(figure)
    return png


def _begin(spans: list[Span], layer: int) -> float:
    """Of the layer's first stage: microbatches of two layers may overlap."""
    return min(span.begin_us for span in spans if span.layer == layer)


def _last_layer(spans: list[Span]) -> int:
    return max(span.layer for span in spans)


def _period(spans: list[Span], layer: int) -> float:
    return _begin(spans, layer + 1) - _begin(spans, layer)


def _extent(spans: list[Span], layer: int) -> tuple[float, float]:
    own = [span for span in spans if span.layer == layer]
    return min(span.begin_us for span in own), max(span.end_us for span in own)


def _draw_panel(axis: Any, name: str, spans: list[Span], lanes: list[str], layer: int, widest: float) -> None:
    """widest: us that the axis shows."""
    first, last = _extent(spans, layer)
    for span in spans:
        if span.end_us < first - 0.02 * (last - first) or span.begin_us > last + 0.1 * (last - first):
            continue
        y, length, pale = lanes.index(span.lane), span.end_us - span.begin_us, span.layer != layer
        colour = next((c for prefix, c in _COLOURS.items() if span.stage.startswith(prefix)), "#cccccc")
        axis.barh(
            y,
            length,
            left=span.begin_us - first,
            height=0.8,
            color=colour,
            alpha=0.3 if pale else 1.0,
            edgecolor="white",
            hatch="//" if span.microbatch else None,
            linewidth=0.5,
        )
        label = span.stage.replace("_", "\n") + (f" {'ab'[span.microbatch]}" if name.startswith("tbo") else "")
        room = length / widest * 110  # in letters of this size
        lines = label.split("\n")
        upright = room > 0.9 * max(map(len, lines))
        if upright or room > 1.6 * len(lines):
            axis.text(
                span.begin_us - first + length / 2,
                y,
                label,
                ha="center",
                va="center",
                fontsize=7,
                clip_on=True,
                rotation=0 if upright else 90,
            )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    times = (
        f"{_period(spans, layer):.0f} us from layer to layer; exchange or idle {exposed_us(spans, layer):.0f} us of it"
    )
    axis.set_title(f"{name}: {times}", loc="left", fontsize=9)
    axis.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws timelines again.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="of eprt bench layer")
    for file in parser.parse_args().files:
        print(draw(file))
