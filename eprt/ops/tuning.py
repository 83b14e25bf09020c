"""Tilings found by measuring (benchmarks/gpu), one JSON file per GPU model, by shape of the product.

A file is a list of {"experts", "n", "k", "kind", "gated", "tilings": {rows per expert: Tiling's fields}}. A product
takes the tiling of the next larger number of rows measured for its shape, with as many experts or the nearest number.
Dense layers' products are of kind "dense"; their tilings may be a ClusterTiling's fields, another kernel; null is where
cuBLAS was faster, as it is with more rows than any measured.
Shapes and GPUs that were not measured take the defaults of eprt/ops/cuda/grouped_gemm.py and linear.py.
"""

import functools
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from eprt.gpu.cluster_product import ClusterTiling

FOLDER = Path(__file__).parent / "tunings"
Table = dict["Shape", dict[int, "Tiling | ClusterTiling | None"]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiling:
    """block_m tokens by block_n weight rows; stages: tiles on their way; programs_per_sm: how many stay on one SM;
    splits: parts of K, in dense products."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    splits: int = 1


@dataclass(frozen=True)
class Shape:
    """Of a grouped product: experts times [n, k] ([2n, k] if gated). kind: "fp8", "same", or "dense": one, of fp8."""

    experts: int
    n: int
    k: int
    kind: str
    gated: bool


def tuned(device: torch.device, shape: Shape, rows_per_expert: int, folder: Path = FOLDER) -> Tiling | None:
    """None where nothing was measured."""
    if device.type != "cuda":
        return None
    name = _device_name(device.index)
    found = lookup(read(name, folder), shape, rows_per_expert)
    if found is None:
        _tell(name, shape)
    return found


@functools.cache
def _tell(device_name: str, shape: Shape) -> None:
    """Once each."""
    _log.info(
        "no tilings were measured for %d experts of %d x %d (%s) on %s: defaults are used "
        "(python -m benchmarks.gpu.tune_grouped_gemm measures them)",
        shape.experts, shape.n, shape.k, shape.kind, device_name,
    )  # fmt: skip


def tuned_dense(device: torch.device, n: int, k: int, rows: int) -> tuple[bool, Tiling | ClusterTiling | None]:
    """(whether [n, k] was measured, the tiling for so many rows; None where cuBLAS is faster)"""
    return lookup_dense(read(_device_name(device.index), FOLDER) if device.type == "cuda" else {}, n, k, rows)


def lookup_dense(table: Table, n: int, k: int, rows: int) -> tuple[bool, Tiling | ClusterTiling | None]:
    measured = table.get(Shape(1, n, k, "dense", gated=False), {})
    larger = [most for most in measured if most >= rows]
    return bool(measured), measured[min(larger)] if larger else None


def lookup(table: Table, shape: Shape, rows_per_expert: int) -> Tiling | None:
    similar = (other for other in table if replace(other, experts=shape.experts) == shape)
    nearest = min(similar, key=lambda other: abs(other.experts - shape.experts), default=None)
    if nearest is None:
        return None
    measured = table[nearest]
    found = measured[min((rows for rows in measured if rows >= rows_per_expert), default=max(measured))]
    assert not isinstance(found, ClusterTiling), "a dense product's"
    return found


def cluster_tilings() -> Iterator[tuple[Shape, int, ClusterTiling]]:
    """(product, rows, tiling) of every GPU's dense products that take one."""
    for path in sorted(FOLDER.glob("*.json")):
        for shape, tilings in read(path.stem).items():
            for rows, tiling in tilings.items():
                if isinstance(tiling, ClusterTiling):
                    yield shape, rows, tiling


@functools.cache
def read(device_name: str, folder: Path = FOLDER) -> Table:
    """{} for a GPU without a file. ValueError naming the file when it is not what this module writes."""
    path = _path(device_name, folder)
    if not path.exists():
        return {}
    try:
        return dict(_entry(entry) for entry in json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of tilings ({error!r}); make it anew with tune_grouped_gemm") from None


def _entry(entry: dict) -> tuple[Shape, dict[int, Tiling | ClusterTiling | None]]:
    shape = Shape(**{name: value for name, value in entry.items() if name != "tilings"})
    return shape, {int(rows): fields and _tiling(fields) for rows, fields in entry["tilings"].items()}


def _tiling(fields: dict) -> Tiling | ClusterTiling:
    return ClusterTiling(**fields) if "warpgroups" in fields else Tiling(**fields)


def write(device_name: str, table: Table, folder: Path = FOLDER) -> Path:
    """Adds the shapes to the GPU's file, in place of earlier measurements of the same shapes."""
    merged = {**read(device_name, folder), **table}
    entries = [
        {**asdict(shape), "tilings": {str(rows): t and asdict(t) for rows, t in sorted(tilings.items())}}
        for shape, tilings in merged.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(device_name, folder)
    path.write_text(json.dumps(entries, indent=1) + "\n")
    read.cache_clear()
    return path


def _path(device_name: str, folder: Path) -> Path:
    return folder / (re.sub(r"[^A-Za-z0-9]+", "_", device_name) + ".json")


@functools.cache
def _device_name(index: int | None) -> str:
    return torch.cuda.get_device_name(index)
