"""The small operators of a DeepSeek-V3 layer (norm, SiLU, quantise, rotary, gate, sums) beside torch.compile's.

Both are replayed as CUDA graphs over the same data, in turns. compiled: the operator in plain torch
(torch_operators.py), compiled anew for each number of rows, as torch.compile does best. floor_us: the bytes that must
be read and written over measured HBM bandwidth; few rows stay in the L2 cache and have no such floor. to_compiled:
eprt_us / compiled_us, below 1 eprt is faster. difference: largest, of the two results, relative to the largest value.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu import torch_operators
from benchmarks.gpu.graph_timer import bandwidth, gpu_times_in_turns, gpu_word
from benchmarks.shapes import HEADS, HIDDEN, ROPE, WIDTH
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops import cuda
from eprt.ops.cuda.norm import rms_norm_quantize
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.silu import silu_mul_quantize
from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule

NUM_RANKS = 0
NEEDS_GPU = True
ROWS = (1, 16, 128, 1024, 4096)
EXPERTS, POSITIONS, EPS = 256, 4096, 1e-6
V3_GATE = GateRule("sigmoid", 8, 8, 4, True, 2.5)
_BATCHES, _ROUNDS = 4, 5  # a graph calls an operator on each of some batches, several times over


class SmallOperator(NamedTuple):
    """One operator and its twin in plain torch."""

    what: str
    eprt: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]  # for so many rows


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _rotary_inputs(rows: int) -> tuple[Tensor, Rotation]:
    table = torch.randn(POSITIONS, ROPE, device="cuda")
    return _random(rows, HEADS, ROPE), Rotation(table, torch.randint(POSITIONS, (rows,), device="cuda"), True)


OPERATORS = (
    SmallOperator(
        "norm", cuda.rms_norm, torch_operators.rms_norm, lambda t: (_random(t, HIDDEN), _random(HIDDEN), EPS)
    ),
    SmallOperator(
        "add and norm",
        cuda.add_rms_norm,
        torch_operators.add_rms_norm,
        lambda t: (_random(t, HIDDEN), _random(t, HIDDEN), _random(HIDDEN), EPS),
    ),
    SmallOperator(
        "norm, quantised",
        rms_norm_quantize,
        torch_operators.rms_norm_quantize,
        lambda t: (_random(t, HIDDEN), _random(HIDDEN), EPS),
    ),
    SmallOperator("SiLU and multiply", cuda.silu_mul, torch_operators.silu_mul, lambda t: (_random(t, 2 * WIDTH),)),
    SmallOperator(
        "SiLU and multiply, quantised",
        silu_mul_quantize,
        torch_operators.silu_mul_quantize,
        lambda t: (_random(t, 2 * WIDTH),),
    ),
    SmallOperator("quantise", quantize_rows, torch_operators.quantize_rows, lambda t: (_random(t, HIDDEN),)),
    SmallOperator("rotary, 128 heads", cuda.rope, torch_operators.rope, _rotary_inputs),
    SmallOperator(
        "sum of three", cuda.add_rows, torch_operators.add_rows, lambda t: tuple(_random(t, HIDDEN) for _ in range(3))
    ),
    SmallOperator(
        "gate, 8 of 256",
        cuda.gate_topk,
        torch_operators.gate_topk,
        lambda t: (torch.randn(t, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda") / 10, V3_GATE),
    ),
)


def tensors(value: Any) -> list[Tensor]:
    """In a tensor, or in a tuple or Rotation of tensors and other things."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Rotation):  # of the table only the rows that are read
        return [value.cos_sin_PR[: len(value.position_T)], value.position_T]
    return [tensor for part in value for tensor in tensors(part)] if isinstance(value, tuple) else []


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest over the results, relative to each one's largest value; fp8 values with their scales."""
    if ours[0].dtype == torch.float8_e4m3fn:
        ours, theirs = (
            [part[0].float().unflatten(-1, (part[1].shape[1], -1)) * part[1][..., None]] for part in (ours, theirs)
        )
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(ours, theirs))


def row(operator: SmallOperator, rows: int, hbm: float) -> dict[str, Any]:
    compiled = torch.compile(operator.plain, dynamic=False)
    batches = [operator.inputs(rows) for _ in range(_BATCHES)]
    ours, theirs = (tensors(call(*batches[0])) for call in (operator.eprt, compiled))
    times = gpu_times_in_turns(
        {
            name: [lambda batch=batch, call=call: call(*batch) for batch in batches * _ROUNDS]
            for name, call in (("eprt", operator.eprt), ("compiled", compiled))
        }
    )
    moved = sum(tensor.nbytes for tensor in [*tensors(batches[0]), *ours])
    return {
        "what": operator.what,
        "rows": rows,
        **times["eprt"].columns("eprt"),
        **times["compiled"].columns("compiled"),
        "to_compiled": times["eprt"].median_s / times["compiled"].median_s,
        "floor_us": moved / hbm * 1e6,
        "difference": difference(ours, theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--only", nargs="*", default=[operator.what for operator in OPERATORS])
    arguments = parser.parse_args()
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    hbm = bandwidth()
    report = BenchmarkReport(
        f"small_operators_{gpu_word()}",
        {"device": torch.cuda.get_device_name(), "gpus": 1, "hbm_GBps": round(hbm / 1e9), "torch": torch.__version__},
    )
    with torch.inference_mode():
        for operator in OPERATORS:
            if operator.what in arguments.only:
                for rows in arguments.rows:
                    report.add_row(**row(operator, rows, hbm))
    report.finish()


if __name__ == "__main__":
    main()
