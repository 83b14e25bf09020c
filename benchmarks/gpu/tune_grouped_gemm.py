"""Measures tilings of products on this GPU and keeps the fastest in eprt/ops/tunings, where products find them.
Every candidate must give the default's result before it is timed.

    python -m benchmarks.gpu.tune_grouped_gemm --experts 32 --hidden 7168 --width 2048 --format fp8
    python -m benchmarks.gpu.tune_grouped_gemm --dense 2112x7168 24576x1536 7168x16384 8x1024x4096

Experts get rows as uniform routing gives them: so many on the average, none exactly so many. A tile as tall as the mean
would leave half of them a second tile of a few rows. Dense products (--dense, fp8 or int8): K split, fp8 by either
kernel, against cuBLAS or for int8 against the default; all of them with the quantising before. Those of three sizes are
so many matrices at once, each with columns of its own (group_linear), in fp8; against one cuBLAS product after another.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.graph_timer import gpu_time
from benchmarks.gpu.random_inputs import bf16_weight, drawn_rows, fp4_weight, fp8_weight, int8_weight
from benchmarks.tools.report import table
from eprt import EPGroup
from eprt.gpu import cluster_product
from eprt.gpu.cluster_product import ClusterTiling, tokens_of
from eprt.gpu.device import take_device
from eprt.gpu.jit import cubin
from eprt.ops import tuning
from eprt.ops.cuda import cublas
from eprt.ops.cuda.fp4_tile import PLANES
from eprt.ops.cuda.group_linear import cluster_groups, grouped
from eprt.ops.cuda.grouped_gemm import INT8, KIND_NAMES, grouped_gemm, tiling_of
from eprt.ops.cuda.linear import _splitting, split_gemm
from eprt.ops.cuda.planes import to_planes
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.quantize_int8 import quantize_rows_int8
from eprt.ops.group_linear import group_by_group
from eprt.ops.tuning import ProductShape, Tiling
from eprt.ops.weight import Weight

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "writes eprt/ops/tunings"

ROWS = (8, 16, 24, 32, 48, 64, 128, 512)
DENSE_ROWS = (16, 32, 64, 128)
_CLUSTER_TILES = ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2))  # warpgroups, blocks
_SMS, _SHARED_BYTES = 132, 220 << 10
FORMATS = {"fp8": torch.float8_e4m3fn, "same": torch.bfloat16, "int8": torch.int8, "fp4": torch.uint8}
DENSE = {"fp8": "dense", "int8": "dense int8"}
_WEIGHTS = {"fp8": fp8_weight, "same": bf16_weight, "int8": int8_weight, "fp4": fp4_weight}
_QUANTISERS = {"fp8": quantize_rows, "int8": quantize_rows_int8}


def candidates(shape: ProductShape, rows: int) -> list[Tiling]:
    """block_n stays 128 where the product quantises its result. Tiles much taller than an expert's rows waste work."""
    if shape.kind == "fp4":
        return fp4_candidates(shape.gated, rows)
    quantises = shape.gated and shape.kind == "fp8"
    block_k = 64 if shape.kind == "same" else 128
    tall = [block_m for block_m in (16, 32, 64, 128) if block_m <= max(32, 2 * rows) and 2 * block_m >= min(rows, 128)]
    wide = (128,) if quantises else (64, 128)
    if shape.kind == "int8" and rows >= 128:
        tall, wide = [*tall, 256], (*wide, 256)
    shapes = itertools.product(tall, wide, (4, 8), (3, 4, 5), (1, 2, 3, 4))
    return [
        Tiling(block_m, block_n, block_k, warps, stages, programs)
        for block_m, block_n, warps, stages, programs in shapes
        if (warps == 4 or block_m > 32)
        and block_m * (2 if shape.gated else 1) * block_n <= warps * 4096  # accumulators that registers can hold
    ]


def fp4_candidates(gated: bool, rows: int) -> list[Tiling]:
    """Weights wait in registers for their product: few of them at once leave room for more programs on an SM."""
    tall = [
        block_m for block_m in (16, 32, 64, 128, 256) if block_m <= max(32, 2 * rows) and 2 * block_m >= min(rows, 256)
    ]
    tiles = ((64, 256, 4), (128, 256, 4), (128, 256, 8), (64, 128, 4), (128, 128, 4), (128, 128, 8))
    found = []
    for block_m, (block_n, block_k, warps), stages in itertools.product(tall, tiles, (3, 4, 5)):
        shared = stages * block_k * (block_n // 2 + 2 * block_m)
        fits = [programs for programs in (1, 2, 3, 4) if programs * shared <= _SHARED_BYTES]
        if block_m * (2 if gated else 1) * block_n <= warps * 4096 and fits:
            found += [Tiling(block_m, block_n, block_k, warps, stages, programs) for programs in fits[-2:]]
    return found


def dense_candidates(shape: ProductShape, rows: int) -> list[Tiling]:
    """As many parts of K as keep each SM busy once to four times."""
    tall = [block_m for block_m in (16, 32, 64, 128) if max(16, rows // 2) <= block_m <= max(16, rows)]
    found = []
    for block_m, block_n, stages in itertools.product(tall, (64, 128), (3, 4)):
        tiles = -(-rows // block_m) * -(-shape.n // block_n)
        for splits in (1, 2, 3, 4, 6, 8, 12, 14) if shape.experts == 1 else (1,):
            if splits == 1 or (66 <= tiles * splits <= 540 and shape.k // splits >= 512):
                found.append(Tiling(block_m, block_n, 128, 8 if block_m * block_n > 8192 else 4, stages, 3, splits))
    return found


def cluster_candidates(shape: ProductShape, rows: int) -> list[ClusterTiling]:
    """One or two thread blocks on most SMs, all at once if K is split; loads as far ahead as shared memory allows."""
    if rows > cluster_product.TOKENS[-1] or shape.kind != "dense":
        return []
    tokens, steps, found = tokens_of(rows), shape.k // 128, {}
    for (warpgroups, blocks), splits, per_sm in itertools.product(_CLUSTER_TILES, range(1, 9), (1, 2)):
        crowded = warpgroups * blocks > (1 if tokens == 128 else 2)  # too many registers for two on an SM
        thread_blocks = shape.experts * splits * -(-shape.n // (64 * warpgroups * blocks))
        share = thread_blocks / (_SMS * per_sm)
        if (per_sm == 2 and (crowded or thread_blocks <= _SMS)) or share < 0.5 or share > (3 if splits == 1 else 1):
            continue
        tilings = [ClusterTiling(warpgroups, blocks, splits, n) for n in range(3, max(3, -(-steps // splits)) + 1)]
        fitting = [t for t in tilings if t.shared_bytes(tokens) <= _SHARED_BYTES // per_sm]
        ends_with_tiles = shape.experts == 1 or shape.n % (64 * warpgroups * blocks) == 0
        if 2 * splits <= steps and fitting and ends_with_tiles:
            found[fitting[-1]] = None
    return list(found)


def compile_ahead(shape: ProductShape, rows: int, tiling: Tiling | ClusterTiling) -> None:
    """In a process of its own: leaves the kernel in its cache."""
    from benchmarks.gpu.gpu_kernels import CompiledOnly, tensor, weight

    if isinstance(tiling, ClusterTiling):
        with contextlib.suppress(Exception):
            cubin(cluster_product.source(tokens_of(rows), tiling))
        return
    if shape.kind in DENSE.values():
        fp8 = shape.kind == "dense"
        dtype = FORMATS["fp8" if fp8 else "int8"]
        stack, rows = (shape.experts,) if shape.experts > 1 else (), shape.experts * rows
        w, x = (weight(*size, dtype=dtype) for size in ((*stack, shape.n, shape.k), (rows, shape.k)))
        scale = tensor(rows, shape.k // 128 if fp8 else 1, dtype=torch.float32)
        count = tensor(*stack, dtype=torch.int32) if stack else None
        with contextlib.suppress(Exception), CompiledOnly():
            grouped_gemm(x.data, w, x_scale_RG=scale, recv_count_E=count, tiling=tiling, splits=tiling.splits)
        return
    groups = {"fp8": -(-shape.k // 128), "int8": 1}.get(shape.kind)
    w = weight(shape.experts, shape.n * (2 if shape.gated else 1), shape.k, dtype=FORMATS[shape.kind])
    x, count = tensor(shape.experts * rows, shape.k, dtype=w.data.dtype), tensor(shape.experts, dtype=torch.int32)
    if shape.kind == "fp4":
        x = tensor(PLANES, shape.experts * rows, shape.k // PLANES)
    scale = None if groups is None else tensor(shape.experts * rows, groups, dtype=torch.float32)
    with contextlib.suppress(Exception), CompiledOnly():  # what cannot be compiled is told when it is timed
        kind: dict[str, Any] = {
            "quantise": shape.gated and shape.kind == "fp8",
            "in_planes": shape.gated and shape.kind == "fp4",
        }
        grouped_gemm(x, w, x_scale_RG=scale, recv_count_E=count, gated=shape.gated, tiling=tiling, **kind)


def compile_all(cases: list[tuple[ProductShape, int]], jobs: int, triton: bool = True) -> None:
    """Every kernel once: what only changes the grid, or the sizes of a dense product, changes no kernel."""
    work = {}
    for shape, rows in cases:
        dense = shape.kind in DENSE.values()
        for tiling in (dense_candidates if dense else candidates)(shape, rows) if triton else ():
            same = replace(tiling, programs_per_sm=1, splits=min(tiling.splits, 2))
            key = (replace(shape, n=0, k=0) if dense else shape, same)
            work.setdefault(key, (shape, rows, same))
        for tiling in cluster_candidates(shape, rows) if dense else ():
            work.setdefault((tokens_of(rows), tiling), (shape, rows, tiling))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, *zip(*work.values())))


def tune(shape: ProductShape, rows: int) -> tuple[Tiling, float, float]:
    """(fastest, its seconds, the default's seconds). Rows are drawn anew for each shape, the same for all tilings."""
    weight = _WEIGHTS[shape.kind](shape.experts, shape.n * (2 if shape.gated else 1), shape.k)
    x, scale = torch.randn(shape.experts * rows, shape.k, device="cuda", dtype=torch.bfloat16), None
    if shape.kind in _QUANTISERS:
        x, scale = _QUANTISERS[shape.kind](x)
    elif shape.kind == "fp4":
        x = to_planes(x)
    count = drawn_rows(shape.experts, rows)

    def product(tiling: Tiling | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind: dict[str, Any] = {
            "quantise": shape.gated and shape.kind == "fp8",
            "in_planes": shape.gated and shape.kind == "fp4",
        }
        return grouped_gemm(x, weight, x_scale_RG=scale, recv_count_E=count, gated=shape.gated, tiling=tiling, **kind)

    default = tiling_of(KIND_NAMES.index(shape.kind), rows, shape.gated)
    want, best = plain(*product(default)), (float("inf"), default)
    default_s = gpu_time([lambda: product(default)], samples=7).median_s
    for tiling in candidates(shape, rows):
        try:
            error = (plain(*product(tiling)) - want).norm() / want.norm()
            seconds = gpu_time([lambda t=tiling: product(t)], samples=7).median_s
        except Exception as failure:  # more shared memory or registers than there are
            print(f"{tiling}: {str(failure).splitlines()[0][:100]}")
            continue
        assert error < 0.03, f"{tiling} computes something else: relative error {error:.3g}"
        best = min(best, (seconds, tiling), key=lambda pair: pair[0])
    return best[1], best[0], default_s


def tune_dense(
    shape: ProductShape, rows: int, triton: bool = True
) -> tuple[Tiling | ClusterTiling | None, float, float]:
    """(fastest, None for cuBLAS or int8's default; its seconds; those of None)"""
    make, stack = fp8_weight if shape.kind == "dense" else int8_weight, (shape.experts,) if shape.experts > 1 else ()
    num = max(2, (200 << 20) // (shape.experts * shape.n * shape.k))
    weights = [make(*stack, shape.n, shape.k) for _ in range(num)]
    x = torch.randn(rows, shape.experts * shape.k, device="cuda", dtype=torch.bfloat16)
    want = dense_product(x, weights[0], None).float()
    none_s = gpu_time([lambda w=w: dense_product(x, w, None) for w in weights], samples=7).median_s
    best: tuple[float, Tiling | ClusterTiling | None] = (none_s, None)
    for tiling in (*(dense_candidates(shape, rows) if triton else ()), *cluster_candidates(shape, rows)):
        try:
            error = (dense_product(x, weights[0], tiling).float() - want).norm() / want.norm()
            seconds = gpu_time([lambda w=w, t=tiling: dense_product(x, w, t) for w in weights], samples=7).median_s
        except Exception as failure:
            print(f"{tiling}: {str(failure).splitlines()[0][:100]}")
            continue
        assert error < 0.01, f"{tiling} computes something else: relative error {error:.3g}"
        best = min(best, (seconds, tiling), key=lambda pair: pair[0])
    return best[1], best[0], none_s


def dense_product(x: torch.Tensor, w: Weight, tiling: Tiling | ClusterTiling | None) -> torch.Tensor:
    """None: by cuBLAS; of int8 by default."""
    if len(w.shape) == 3:
        if isinstance(tiling, ClusterTiling):
            return cluster_groups(x, w, tiling)
        return group_by_group(x, w, partial(dense_product, tiling=None)) if tiling is None else grouped(x, w, tiling)
    if w.data.dtype == torch.int8:
        if tiling is None:
            tiling = _splitting(x.device, INT8, len(x), *w.shape)
        assert isinstance(tiling, Tiling)
        return split_gemm(*quantize_rows_int8(x), w, x.dtype, tiling)
    if isinstance(tiling, Tiling):
        return split_gemm(*quantize_rows(x), w, x.dtype, tiling)
    assert w.scale is not None and cublas.PADDED_TO == cluster_product.PADDED_TO
    padded = quantize_rows(x, padded_to=cublas.PADDED_TO)
    if tiling is None:
        return cublas.scaled_mm(*padded, w)[: len(x)]
    return cluster_product.cluster_product(*padded, w.data, w.scale, len(x), tiling)


def plain(y: torch.Tensor, y_scale: torch.Tensor | None) -> torch.Tensor:
    return y.float() if y_scale is None else y.float() * y_scale.repeat_interleave(128, 1)[:, : y.shape[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32, help="on one GPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--width", type=int, default=2048, help="of one expert")
    parser.add_argument("--format", choices=("fp8", "bf16", "int8", "fp4"), default="fp8")
    parser.add_argument("--rows", type=int, nargs="*", help="per expert, or of the dense products")
    parser.add_argument("--dense", nargs="*", default=[], metavar="[G x]NxK", help="these products, not experts'")
    parser.add_argument("--no-triton", action="store_true", help="dense fp8: the cluster kernel and cuBLAS alone")
    parser.add_argument(
        "--folder", type=Path, default=tuning.FOLDER, help="where the GPU's table is, default %(default)s"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    arguments = parser.parse_args()
    kind = "same" if arguments.format == "bf16" else arguments.format
    shapes = [
        ProductShape(arguments.experts, n, k, kind, gated)
        for gated, n, k in ((True, arguments.width, arguments.hidden), (False, arguments.hidden, arguments.width))
    ]
    if kind == "int8":  # many rows: see experts.py
        shapes.append(ProductShape(arguments.experts, 2 * arguments.width, arguments.hidden, kind, gated=False))
    if arguments.dense:
        sizes = ((1, *(int(size) for size in text.split("x")))[-3:] for text in arguments.dense)
        shapes = [ProductShape(num, n, k, DENSE[arguments.format], gated=False) for num, n, k in sizes]
    default_rows = DENSE_ROWS if arguments.dense else ROWS
    cases = [(shape, rows) for shape in shapes for rows in arguments.rows or default_rows]
    triton = not arguments.no_triton
    compile_all(cases, arguments.jobs, triton)
    take_device("cuda", EPGroup.single())
    found, shown = {}, []
    for shape, rows in cases:
        tiling, seconds, default_s = tune_dense(shape, rows, triton) if arguments.dense else tune(shape, rows)
        found.setdefault(shape, {})[rows] = tiling
        times = {"us": seconds * 1e6, "default_us": default_s * 1e6}
        product = {"matrices": shape.experts, "n": shape.n, "k": shape.k, "rows": rows}
        shown.append({**product, **times, **(vars(tiling) if tiling else {})})
        print(shown[-1], flush=True)
        if len(found[shape]) == len(arguments.rows or default_rows):  # what is measured stays, if a run is stopped
            print(tuning.write(torch.cuda.get_device_name(), {shape: found[shape]}, arguments.folder))
    print(table(shown))


if __name__ == "__main__":
    main()
