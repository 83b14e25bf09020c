"""eprt balance show: prints what a load file or a placement file holds."""

import argparse
import json
from pathlib import Path

import numpy as np

from .. import plots
from ..formats import read_load
from ..loads import LoadFile
from ..placement import EMPTY, Placement
from . import options
from .tables import table

_SHOWN_LAYERS = 12


def add_parser(commands) -> None:
    parser = commands.add_parser("show", help="what a load file or a placement holds")
    parser.add_argument("file", type=Path, metavar="FILE", help="a load file, or a placement (JSON)")
    parser.add_argument("--load", type=Path, metavar="FILE", help="show the GPU loads of a placement under this load")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="for a placement that does not say")
    parser.add_argument("--num-nodes", type=int, metavar="N", help="for a placement that does not say")
    parser.add_argument("--all-layers", action="store_true", help=f"show more than the first {_SHOWN_LAYERS} layers")
    options.add_plots(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if _is_placement(arguments.file):
        placement = options.read_placement(arguments.file, arguments.num_gpus, arguments.num_nodes)
        for name in ("num_gpus", "num_nodes"):
            given, own = getattr(arguments, name), getattr(placement, name)
            if given not in (None, own):
                raise ValueError(f"--{name.replace('_', '-')} {given}: {arguments.file} says {own}; leave the flag out")
        load_LE = None
        if arguments.load is not None:
            load_LE = read_load(arguments.load).total()
            options.check_fits(arguments.file, placement, arguments.load, load_LE)
        text = _placement_text(placement, load_LE, arguments.all_layers)
    else:
        for flag, value in (
            ("load", arguments.load),
            ("num-gpus", arguments.num_gpus),
            ("num-nodes", arguments.num_nodes),
        ):
            if value is not None:
                raise ValueError(f"--{flag} {value} is for a placement; {arguments.file} is none")
        placement, load_LE = None, None
        text = _load_text(read_load(arguments.file), arguments.all_layers)
    print(text)
    if arguments.plots:
        if placement is None or load_LE is None:
            others = "`eprt balance compare` and `replay` plot load files"
            raise ValueError(f"--plots needs a placement and --load; {others}")
        arguments.plots.mkdir(parents=True, exist_ok=True)
        loads = {arguments.file.stem: placement.gpu_load(load_LE)}
        png = plots.gpu_load(arguments.plots / "gpu_load.png", loads, "Load of each GPU")
        options.print_status(f"wrote {plots.write_page(arguments.plots, arguments.file.name, text, [png])} and {png}")
    return 0


def _is_placement(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return False  # read_load says what is wrong with it
    return isinstance(data, dict) and "physical_to_logical_map" in data


def _load_text(file: LoadFile, all_layers: bool) -> str:
    num_windows, num_layers, num_experts = file.load_WLE.shape
    total_LE = file.total()
    shape = f"{num_windows} windows, {num_layers} layers, {num_experts} experts"
    lines = [f"{file.format} load: {shape}, {total_LE.sum():.0f} choices"]
    if file.trace is not None:
        known = "known" if file.trace.source_gpu is not None else "unknown"
        lines.append(f"routing traces: {file.trace.num_tokens} tokens of each layer, ranks {known}")
    lines += list(file.notes)
    mean_L = np.maximum(total_LE.mean(1), 1e-300)
    drift_L = _drift(file.load_WLE)
    rows = [
        {
            "layer": layer,
            "choices": int(total_LE[layer].sum()),
            "max/mean": float(total_LE[layer].max() / mean_L[layer]),
            "busiest": " ".join(map(str, np.argsort(-total_LE[layer], kind="stable")[:4])),
            "unused": int((total_LE[layer] == 0).sum()),
            **({} if drift_L is None else {"drift": float(drift_L[layer])}),
        }
        for layer in range(num_layers)
    ]
    return "\n".join([*lines, "", _cut(rows, all_layers)])


def _drift(load_WLE: np.ndarray) -> np.ndarray | None:
    """[L]: the share of tokens that change their expert from window to window (mean total variation)."""
    if len(load_WLE) < 2:
        return None
    share_WLE = load_WLE / np.maximum(load_WLE.sum(2, keepdims=True), 1e-300)
    return np.abs(np.diff(share_WLE, axis=0)).sum(2).mean(0) / 2


def _placement_text(placement: Placement, load_LE: np.ndarray | None, all_layers: bool) -> str:
    slots_LP = placement.physical_to_logical_map
    nodes = "1 node" if placement.num_nodes == 1 else f"{placement.num_nodes} nodes"
    lines = [
        f"placement, epoch {placement.epoch}: {placement.num_layers} layers, {placement.num_experts} experts, "
        f"{placement.num_slots} slots on {placement.num_gpus} GPUs of {nodes}",
        *(f"{k}: {v:.4g}" if isinstance(v, float) else f"{k}: {v}" for k, v in placement.metrics.items()),
    ]
    load_LG = None if load_LE is None else placement.gpu_load(load_LE)
    rows = []
    for layer, count_E in enumerate(placement.replica_count):
        row: dict[str, int | float] = {
            "layer": layer,
            "copied": int((count_E > 1).sum()),
            "most copies": int(count_E.max()),
            "of expert": int(count_E.argmax()),
            "empty slots": int((slots_LP[layer] == EMPTY).sum()),
        }
        if load_LG is not None:
            row["max/mean"] = float(load_LG[layer].max() / max(load_LG[layer].mean(), 1e-300))
            row["busiest GPU"] = int(load_LG[layer].argmax())
        rows.append(row)
    return "\n".join([*lines, "", _cut(rows, all_layers)])


def _cut(rows: list[dict], all_layers: bool) -> str:
    shown = rows if all_layers else rows[:_SHOWN_LAYERS]
    rest = len(rows) - len(shown)
    return table(shown) + (f"\n... {rest} more layers; --all-layers shows them" if rest else "")
