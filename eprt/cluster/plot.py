"""A picture of a ClusterPlan: a curve for each quantity against the size of the group."""

from collections.abc import Sequence
from pathlib import Path

from eprt.cluster.cluster_plan import ClusterRow


def require_format(path: Path) -> None:
    """Before anything is printed: ValueError for a name that says no kind of picture, ImportError where matplotlib is
    missing."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    suffix = path.suffix.removeprefix(".").lower()
    if suffix and suffix not in kinds:
        raise ValueError(f"--plot {path}: no picture is a .{suffix}; it may be one of {', '.join(kinds)}")


def draw(rows: Sequence[ClusterRow], path: Path) -> None:
    """ImportError where matplotlib is missing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fitting = [row for row in rows if row.step is not None]
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    panels = axes.flat
    _curves(
        panels[0],
        rows,
        "low latency, us a layer",
        {
            "dispatch": [row.low_latency[0].dispatch_us for row in rows],
            "combine": [row.low_latency[0].combine_us for row in rows],
            "both, the other way": [row.low_latency[-1].both_us for row in rows],
        },
    )
    normal = {
        "dispatch": [row.normal[0].dispatch_us for row in rows],
        "combine": [row.normal[0].combine_us for row in rows],
    }
    _curves(panels[1], rows, "normal mode, us a layer", normal)
    steps = {"step": [row.step.step_ms for row in fitting if row.step]}
    steps["of it exchange"] = [row.step.exchange_ms for row in fitting if row.step]
    _curves(panels[2], fitting, "decode step, ms", steps)
    _curves(panels[3], fitting, "decode, tokens/s of a GPU", {"": [row.decode_tokens_per_s for row in fitting]})
    _curves(panels[4], fitting, "prefill, tokens/s of a GPU", {"": [row.prefill_tokens_per_s for row in fitting]})
    memory = {"weights": [row.memory.dense_gb for row in rows], "experts": [row.memory.experts_gb for row in rows]}
    _curves(panels[5], rows, "memory of a GPU, GB", memory)
    figure.suptitle("Predicted by arithmetic over published and measured times")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curves(panel, rows: Sequence[ClusterRow], title: str, curves: dict[str, list[float]]) -> None:
    for label, values in curves.items():
        panel.plot([f"EP{row.num_ranks}" for row in rows], values, marker="o", label=label)
    panel.set_ylim(bottom=0)
    panel.set_title(title)
    panel.grid(alpha=0.3)
    if len(curves) > 1:
        panel.legend()
