"""Timeline of MoE layers: when each stage of the schedule ran, on which lane, and a picture of it.

python -m benchmarks.layer_timeline benchmarks/results/layer_timeline_2gpu.json     draws the PNG beside it
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eprt.layers.overlap import Stage

_COLOURS = {
    "attention": "#4c78a8", "gate": "#9ecae9", "shared": "#72b7b2", "experts": "#54a24b", "dispatch": "#f58518",
    "combine": "#e45756", "receive": "#ffbf79", "signals": "#bab0ac", "add": "#b279a2", "rounds": "#bab0ac",
}  # fmt: skip


@dataclass(frozen=True)
class Span:
    """One stage of one microbatch (0, or 1 for the second of two) in one layer. Times in us."""

    stage: str
    lane: str
    microbatch: int
    layer: int
    begin_us: float
    end_us: float


class Tracer:
    """To be put in place of Lanes.trace. On GPUs between two events of the stage's own stream, else by the clock."""

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self._begun: Counter = Counter()  # (stage, microbatch) -> how often
        self._rows: list[tuple[Stage, int, int, Any, Any]] = []
        self._start = self._now()

    @contextmanager
    def __call__(self, stage: Stage, microbatch: int) -> Iterator[None]:
        if stage.name == "rounds":  # its own stages follow
            yield
            return
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
    lanes = {name: [lane for lane in ("compute", "side", "comm") if any(s.lane == lane for s in spans)]
             for name, spans in panels.items()}  # fmt: skip
    heights = [len(lanes[name]) + 0.6 for name in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(13, 0.8 * sum(heights) + 1.6), height_ratios=heights, squeeze=False, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for axis, (name, spans) in zip(axes[:, 0], panels.items()):
        _draw_panel(axis, name, spans, lanes[name], layer)
    widest = max(_extent(spans, layer)[1] - _extent(spans, layer)[0] for spans in panels.values())
    axes[-1, 0].set_xlim(-0.02 * widest, 1.1 * widest)
    axes[-1, 0].set_xlabel("us since the layer's first stage began")
    figure.suptitle(content["title"], fontsize=11)
    png = path.with_suffix(".png")
    figure.savefig(png, dpi=110)
    plt.close(figure)
    return png


def _period(spans: list[Span], layer: int) -> float:
    """From the layer's first stage to that of the next: microbatches of two layers may overlap."""
    first, following = (min(s.begin_us for s in spans if s.layer == layer + i) for i in range(2))
    return following - first


def _extent(spans: list[Span], layer: int) -> tuple[float, float]:
    own = [span for span in spans if span.layer == layer]
    return min(span.begin_us for span in own), max(span.end_us for span in own)


def _draw_panel(axis: Any, name: str, spans: list[Span], lanes: list[str], layer: int) -> None:
    first, last = _extent(spans, layer)
    wide = (last - first) / 45
    for span in spans:
        if span.end_us < first - 0.02 * (last - first) or span.begin_us > last + 0.1 * (last - first):
            continue
        y, length, pale = lanes.index(span.lane), span.end_us - span.begin_us, span.layer != layer
        colour = next((c for prefix, c in _COLOURS.items() if span.stage.startswith(prefix)), "#cccccc")
        axis.barh(
            y, length, left=span.begin_us - first, height=0.8, color=colour, alpha=0.3 if pale else 1.0,
            edgecolor="white", hatch="//" if span.microbatch else None, linewidth=0.5,
        )  # fmt: skip
        if length > wide:
            label = span.stage.replace("_", "\n") + (f" {'ab'[span.microbatch]}" if name.startswith("tbo") else "")
            axis.text(span.begin_us - first + length / 2, y, label, ha="center", va="center", fontsize=7)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_title(f"{name}: {_period(spans, layer):.0f} us from layer to layer", loc="left", fontsize=9)
    axis.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_timeline", description="Draws timelines again.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="of eprt bench layer")
    for file in parser.parse_args().files:
        print(draw(file))
