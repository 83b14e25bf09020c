"""Tilings found by measuring (benchmarks/gpu): one JSON file per GPU model, by shape of the product.

A file is a list of {"experts", "n", "k", "kind", "gated", "tilings": {rows per expert: fields of Tiling}}. A product
uses the tiling of the next larger measured number of rows of its shape, or of the shape with the nearest number of
experts. For products of dense fp8 layers (kind "dense") a tiling may hold the fields of a ClusterTiling, for another
kernel. For dense layers it is null beyond the largest measured number of rows and wherever cuBLAS (fp8) or the default
(kind "dense int8") was faster. Shapes and GPUs that were not measured use the defaults of eprt/ops/cuda/grouped_gemm.py
and linear.py. Knows nothing of kernels.
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
# Tilings of a GPU model, by product and rows per expert.
Table = dict["ProductShape", dict[int, "Tiling | ClusterTiling | None"]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tiling:
    """How grouped_gemm divides a product."""

    block_m: int  # tokens of a tile
    block_n: int  # weight rows of a tile
    block_k: int  # columns per step
    num_warps: int  # of a program
    num_stages: int  # steps whose loads are in flight
    programs_per_sm: int  # programs of the persistent grid, per SM
    splits: int = 1  # parts of K, in dense products


@dataclass(frozen=True)
class ProductShape:
    """What a measured tiling is for."""

    experts: int  # matrices
    n: int  # columns of the result
    k: int
    # "fp8", "same", "int8" or "fp4": grouped products, see grouped_gemm.py; "dense" or "dense int8": all rows times one
    # fp8 or int8 matrix, or each matrix times columns of its own (group_linear).
    kind: str
    gated: bool  # matrices are [2n, k]: gate rows, then up rows


def tuned(device: torch.device, shape: ProductShape, rows_per_expert: int, folder: Path = FOLDER) -> Tiling | None:
    """The measured tiling, or None."""
    if device.type != "cuda":
        return None
    name = _device_name(device.index)
    found = lookup(read(name, folder), shape, rows_per_expert)
    if found is None:
        _log_unmeasured(name, shape)
    return found


@functools.cache
def _log_unmeasured(device_name: str, shape: ProductShape) -> None:
    """Logs once per GPU model and shape."""
    product = f"{shape.experts} experts of {shape.n} x {shape.k} ({shape.kind})"
    _log.info(
        "no tilings were measured for %s on %s: defaults are used "
        "(python -m benchmarks.gpu.tune_grouped_gemm measures them)",
        product,
        device_name,
    )


def tuned_dense(
    device: torch.device, n: int, k: int, rows: int, kind: str = "dense", matrices: int = 1
) -> tuple[bool, Tiling | ClusterTiling | None]:
    """(whether [n, k] was measured, its tiling for so many rows, or None where something else is faster)

    matrices: so many, each with columns of the rows of its own (group_linear).
    """
    table = read(_device_name(device.index), FOLDER) if device.type == "cuda" else {}
    return lookup_dense(table, n, k, rows, kind, matrices)


def lookup_dense(
    table: Table, n: int, k: int, rows: int, kind: str = "dense", matrices: int = 1
) -> tuple[bool, Tiling | ClusterTiling | None]:
    measured = table.get(ProductShape(matrices, n, k, kind, gated=False), {})
    larger = [most for most in measured if most >= rows]
    return bool(measured), measured[min(larger)] if larger else None


def lookup(table: Table, shape: ProductShape, rows_per_expert: int) -> Tiling | None:
    similar = (other for other in table if replace(other, experts=shape.experts) == shape)
    nearest = min(similar, key=lambda other: abs(other.experts - shape.experts), default=None)
    if nearest is None:
        return None
    measured = table[nearest]
    found = measured[min((rows for rows in measured if rows >= rows_per_expert), default=max(measured))]
    assert not isinstance(found, ClusterTiling), "only dense products have one"
    return found


def cluster_tilings() -> Iterator[tuple[ProductShape, int, ClusterTiling]]:
    """(product, rows, tiling) of all dense products, for any GPU, that use the cluster kernel."""
    for path in sorted(FOLDER.glob("*.json")):
        for shape, tilings in read(path.stem).items():
            for rows, tiling in tilings.items():
                if isinstance(tiling, ClusterTiling):
                    yield shape, rows, tiling


@functools.cache
def read(device_name: str, folder: Path = FOLDER) -> Table:
    """The GPU's tilings; {} without a file. ValueError names a file that this module did not write."""
    path = _path(device_name, folder)
    if not path.exists():
        return {}
    try:
        return dict(_entry(entry) for entry in json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of tilings ({error!r}); make it anew with tune_grouped_gemm") from None


def _entry(entry: dict) -> tuple[ProductShape, dict[int, Tiling | ClusterTiling | None]]:
    shape = ProductShape(**{name: value for name, value in entry.items() if name != "tilings"})
    return shape, {int(rows): fields and _tiling(fields) for rows, fields in entry["tilings"].items()}


def _tiling(fields: dict) -> Tiling | ClusterTiling:
    return ClusterTiling(**fields) if "warpgroups" in fields else Tiling(**fields)


def write(device_name: str, table: Table, folder: Path = FOLDER) -> Path:
    """Adds the shapes to the GPU's file; they replace earlier measurements of the same shapes."""
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
