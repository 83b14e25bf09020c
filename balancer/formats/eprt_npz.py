"""eprt's own .npz files: `load` [W, L, E] or [L, E], and optionally `topk_idx` with `source_gpu` and `topk_window`.

topk_idx is one array [L, T, K], or topk_idx_0, topk_idx_1, ... [T, K] if layers sampled different tokens. source_gpu
and topk_window are [L, T], or source_gpu_0, ... [T] likewise.
"""

from pathlib import Path

import numpy as np

from ..loads import LoadFile
from ..trace import RoutingTrace

_TRACE = ("topk_idx", "source_gpu", "topk_window")  # the fields of a RoutingTrace


def read(path: Path) -> LoadFile:
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as data:  # closes the file even if it is not a zip
        if "load" not in data:
            raise ValueError(f"no array 'load'; it has {', '.join(data.files) or 'none'}")
        topk, *others = (_layers(data, name) for name in _TRACE)
        return LoadFile(data["load"], None if topk is None else RoutingTrace(topk, *others))


def write(path: Path, load_WLE: np.ndarray, trace: RoutingTrace | None = None) -> None:
    arrays = {"load": load_WLE}
    parts = () if trace is None else (trace.topk_idx, trace.source_gpu, trace.window)
    for name, layers in zip(_TRACE, parts):
        if layers and len({len(layer) for layer in layers}) == 1:
            arrays[name] = np.stack(layers)
        elif layers:
            arrays |= {f"{name}_{layer}": array for layer, array in enumerate(layers)}
    with open(path, "wb") as file:  # given a name, numpy would add a suffix
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _layers(data, name: str) -> tuple[np.ndarray, ...] | None:
    if name in data:
        array = data[name]
        if array.ndim not in (2, 3):
            raise ValueError(f"{name} has shape {array.shape}; it must start with [layers, tokens]")
        return tuple(array)
    ends = (key.removeprefix(f"{name}_") for key in data.files if key.startswith(f"{name}_"))
    numbers = sorted(int(end) for end in ends if end.isdigit())
    if not numbers:
        return None
    if numbers != list(range(len(numbers))):
        raise ValueError(f"{name}_{set(range(len(numbers))).difference(numbers).pop()} is missing: one array per layer")
    return tuple(data[f"{name}_{number}"] for number in numbers)
