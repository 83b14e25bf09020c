"""Plots of replays and placements as PNG files, and a page that shows them.

Needs matplotlib (the extra eprt[plots]). Does not know which plots a subcommand wants, except those of a replay.
"""

import base64
import html
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np

from .replay import Replay

# Each policy has its own marker, distinct without colour too. Colours of Okabe and Ito, safe for colour blindness.
_STYLES = (
    ("#555555", "o"),
    ("#D55E00", "s"),
    ("#0072B2", "^"),
    ("#009E73", "D"),
    ("#CC79A7", "v"),
    ("#E69F00", "P"),
    ("#56B4E9", "X"),
    ("#000000", "*"),
)


def pyplot():
    """matplotlib.pyplot without a display; ImportError with the remedy if matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'eprt[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def over_time(path: Path, values: dict[str, np.ndarray], title: str, label: str, *, even: float | None = None) -> Path:
    """One line per policy over the windows. even: the value of a perfect split, drawn for reference."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for (name, values_V), (color, marker) in zip(values.items(), cycle(_STYLES)):
        style = {"color": color, "marker": marker, "markevery": max(1, len(values_V) // 15), "markersize": 5}
        axes.plot(np.arange(1, len(values_V) + 1), values_V, **style, linewidth=1.6, label=name)
    if even is not None:
        axes.axhline(even, color="black", linewidth=0.8, linestyle=":")
    axes.set(title=title, xlabel="window", ylabel=label)
    axes.locator_params(axis="x", integer=True)
    if even is None:
        axes.set_ylim(0, 1.1 * max(max(values_V, default=0.0) for values_V in values.values()) or 1.0)
    axes.grid(alpha=0.3)
    axes.legend(ncols=min(len(values), 4), frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))
    return _save(plt, figure, path)


def gpu_load(path: Path, load_by_name: dict[str, np.ndarray], title: str) -> Path:
    """Load [L, G] of each GPU over the layer's mean, layers down and GPUs across, all on the same scale."""
    plt = pyplot()
    from matplotlib.colors import TwoSlopeNorm

    relative = {name: load / np.maximum(load.mean(1, keepdims=True), 1e-300) for name, load in load_by_name.items()}
    highest = max(1.05, *(float(values.max()) for values in relative.values()))
    lowest = min(0.95, *(float(values.min()) for values in relative.values()))
    scale = TwoSlopeNorm(1.0, vmin=lowest, vmax=highest)
    num_layers = len(next(iter(relative.values())))
    size = (1.6 + 3.0 * len(relative), float(np.clip(0.16 * num_layers, 2.6, 8)))
    figure, axes = plt.subplots(1, len(relative), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for one, (name, values_LG) in zip(axes[0], relative.items()):
        one.imshow(values_LG, aspect="auto", cmap="RdBu_r", norm=scale, interpolation="nearest")
        one.set(title=f"{name}\nmax/mean {values_LG.max(1).mean():.3f}", xlabel="GPU")
        one.locator_params(integer=True)
    axes[0, 0].set_ylabel("layer")
    figure.colorbar(axes[0, 0].images[0], ax=axes[0].tolist(), label="load over the mean", shrink=0.9)
    figure.suptitle(title)
    return _save(plt, figure, path)


def scatter(path: Path, points: dict[str, tuple[float, float | None]], title: str, label: str) -> Path:
    """Balance against traffic, one point per plan: lower left is better. A plan with None keeps its style, undrawn."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for (name, (skew, crossings)), (color, marker) in zip(points.items(), cycle(_STYLES)):
        if crossings is not None:
            axes.plot(skew, crossings, color=color, marker=marker, markersize=8, linestyle="", label=name)
    axes.set(title=title, xlabel="max/mean GPU load (1 is even)", ylabel=label)
    axes.margins(0.12)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return _save(plt, figure, path)


def bars(path: Path, values: dict[str, float], title: str, label: str) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 0.9 + 0.5 * len(values)), layout="constrained")
    colors = [color for _, (color, _) in zip(values, cycle(_STYLES))]
    drawn = axes.barh(list(values), list(values.values()), color=colors, height=0.65)
    axes.bar_label(drawn, fmt="%.3f", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(title=title, xlabel=label)
    return _save(plt, figure, path)


def plot_replays(folder: Path, replays: Sequence[Replay], bytes_per_expert: float, traffic: str) -> list[Path]:
    """All plots of a replay. traffic: the objective that the replays counted."""
    folder.mkdir(parents=True, exist_ok=True)
    gigabytes = {one.name: np.cumsum(one.moves_V) * bytes_per_expert / 1e9 for one in replays}
    skews = {one.name: one.max_over_mean_V for one in replays}
    last = {one.name: one.load_VLG[-1] for one in replays}
    paths = [
        over_time(folder / "balance.png", skews, "Balance in the next window", "max/mean GPU load", even=1.0),
        gpu_load(folder / "gpu_load.png", last, "Load of each GPU in the last window"),
        over_time(folder / "moves.png", gigabytes, "Weights moved, all GPUs together", "GB since the start"),
    ]
    crossings = {one.name: one.traffic_V for one in replays if one.traffic_V is not None}
    if crossings:
        label = f"{traffic.replace('_', ' ')} per token and layer"
        paths.append(over_time(folder / "traffic.png", crossings, "Traffic between nodes, on unseen tokens", label))
    return paths


def write_page(folder: Path, title: str, text: str, pngs: Sequence[Path]) -> Path:
    """report.html: one self-contained file with the table and the plots."""
    images = "\n".join(
        f'<img alt="{html.escape(png.stem)}" src="data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}">'
        for png in pngs
    )
    path = folder / "report.html"
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:15px/1.5 system-ui;margin:2rem auto;max-width:62rem;padding:0 1rem}"
        "pre{overflow-x:auto;background:#f4f4f4;padding:1rem}img{max-width:100%;display:block;margin:1.5rem 0}</style>"
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(text)}</pre>{images}</html>\n"
    )
    return path


def _save(plt, figure, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
