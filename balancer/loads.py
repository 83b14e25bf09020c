"""Expert load: what a load file holds, and the checks every load passes before planning.

Reads eprt's own .npz and plain JSON. Knows nothing of placements.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SERVER_SCHEMA = "eprt.load/1"


@dataclass(frozen=True, eq=False)
class LoadFile:
    """load_WLE: float64 [W, L, E], one count per window, layer and logical expert.

    has_topk_idx: the file also holds routing traces (topk_idx), which plan() cannot use yet.
    """

    load_WLE: np.ndarray
    has_topk_idx: bool = False

    def total(self, last: int | None = None) -> np.ndarray:
        """float64 [L, E]: sum over all windows, or over the last ones."""
        num_windows = len(self.load_WLE)
        if last is not None and not 1 <= last <= num_windows:
            raise ValueError(f"last={last}: the file holds {num_windows} windows")
        return self.load_WLE[-(last or num_windows) :].sum(0)


def read_load(path: str | Path) -> LoadFile:
    """Reads .npz (load [W, L, E] or [L, E], optional topk_idx) or .json ({"load": [[...]]} of these shapes, or what a
    server answers to GET /v1/eprt/load).

    OSError when the file cannot be opened, ValueError naming file, field and value when it holds no valid load.
    """
    path = Path(path)
    if path.suffix not in (".npz", ".json"):
        raise ValueError(f"{path}: cannot read {path.suffix or 'a file without suffix'} yet; give .npz or .json")
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_json(path)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {error}") from None


def _read_npz(path: Path) -> LoadFile:
    with np.load(path, allow_pickle=False) as data:
        if "load" not in data:
            raise ValueError(f"no array 'load'; it has {', '.join(data.files) or 'none'}")
        has_topk_idx = any(name.startswith("topk_idx") for name in data.files)
        return LoadFile(_check_windows(data["load"]), has_topk_idx)


def _read_json(path: Path) -> LoadFile:
    data = json.loads(path.read_text())
    if isinstance(data, dict) and data.get("schema") == SERVER_SCHEMA:
        if not data.get("layers"):
            raise ValueError("the server had not counted any load yet")
        data = {"load": [layer["per_expert"] for layer in data["layers"]]}
    if not isinstance(data, dict) or "load" not in data:
        raise ValueError('no field "load" at the top level; expected {"load": [[...]]}')
    try:
        load = np.array(data["load"], dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            '"load" must be equally long lists of numbers: [layers][experts] or [windows][layers][experts]'
        ) from None
    return LoadFile(_check_windows(load), "topk_idx" in data)


def _check_windows(load: np.ndarray) -> np.ndarray:
    load_WLE = load[None] if load.ndim == 2 else load
    if load_WLE.ndim != 3 or len(load_WLE) == 0:
        raise ValueError(f"load has shape {load.shape}; it must be [windows, layers, experts] or [layers, experts]")
    checked = []
    for window, load_LE in enumerate(load_WLE):
        try:
            checked.append(check_load(load_LE, name="load"))
        except ValueError as error:
            raise ValueError(f"window {window}: {error}") from None
    return np.stack(checked)


def check_load(load_LE: np.ndarray, name: str = "load_LE") -> np.ndarray:
    """float64 [L, E] of finite, non-negative numbers, or ValueError naming field, layer, expert and value."""
    load_LE = np.asarray(load_LE)
    if load_LE.ndim != 2 or 0 in load_LE.shape:
        raise ValueError(f"{name} has shape {load_LE.shape}; it must be [layers, experts], none empty")
    if load_LE.dtype.kind not in "fiu":
        raise ValueError(f"{name} has dtype {load_LE.dtype}; it must hold numbers")
    load_LE = load_LE.astype(np.float64)
    bad = np.argwhere(~np.isfinite(load_LE) | (load_LE < 0))
    if len(bad):
        layer, expert = bad[0]
        raise ValueError(
            f"{name}[layer {layer}, expert {expert}] = {load_LE[layer, expert]}: must be finite and at least 0"
            + (f" ({len(bad)} such values)" if len(bad) > 1 else "")
        )
    return load_LE
