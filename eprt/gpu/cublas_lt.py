"""cublasLt's product of block-scaled e4m3 matrices, with a kernel that is chosen once per number of rows.

torch.nn.functional.scaled_mm asks cuBLAS for a kernel at every call, which takes the host longer than the GPU needs for
a few hundred rows. Structures and numbers are those of cublasLt.h, the same in CUDA 12.9 and 13. Knows addresses and
sizes, nothing of tensors.
"""

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from eprt.gpu.device import multiprocessors

# cudaDataType_t, cublasComputeType_t
_F32, _BF16, _E4M3, _COMPUTE_F32 = 0, 14, 28, 68
# cublasLtMatmulDescAttributes_t
_TRANSPOSE_A, _SM_TARGET, _A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 3, 15, 17, 18, 31, 32
# cublasLtMatmulMatrixScale_t
_PER_128, _PER_128_BY_128 = 4, 5
# cublasLtMatmulPreferenceAttributes_t
_MAX_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
_WORKSPACE_BYTES = 32 << 20
# cublasStatus_t
_NOT_SUPPORTED = 15
_pointer, _int, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", _size),
        ("status", _int),
        ("waves", ctypes.c_float),
        ("reserved", _int * 4),
    )


@dataclass(frozen=True)
class CublasPlan:
    """The kernel for one number of rows, one alignment and one number of SMs."""

    x_layout: int  # cublasLtMatrixLayout_t of the rows
    out_layout: int  # cublasLtMatrixLayout_t of the result
    heuristic: _Heuristic  # the algorithm that cuBLAS chose


class BlockScaledProduct:
    """out [P, n] bfloat16 = x [P, k] W^T for e4m3 weights [n, k], on the current GPU. P is a multiple of 4.

    n: a multiple of 16.
    k: a multiple of 512.
    """

    def __init__(self, n: int, k: int):
        self.n, self.k = n, k
        self._plans: dict[tuple[int, int, int], CublasPlan] = {}  # by rows, alignment and target
        self._target, self._most_sms = 0, multiprocessors()  # SMs that the description asks for, 0 for all; the GPU's
        self._description = _made("cublasLtMatmulDescCreate", _COMPUTE_F32, _F32)
        for attribute, value in ((_TRANSPOSE_A, 1), (_A_SCALE_MODE, _PER_128_BY_128), (_B_SCALE_MODE, _PER_128)):
            self._set(attribute, ctypes.c_int32(value))
        self._w_layout = _made("cublasLtMatrixLayoutCreate", _E4M3, k, n, k)
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._x_scale, self._w_scale = ctypes.c_uint64(), ctypes.c_uint64()
        self._multiply = library().cublasLtMatmul
        self._handle = _handle(torch.cuda.current_device())

    def __call__(
        self, rows: int, x: int, x_scale: int, w: int, w_scale: int, out: int, stream: int, num_sms: int | None = None
    ) -> None:
        """Launches the product. Tensors are given by address. RuntimeError when cuBLAS has no kernel.

        x_scale: fp32 [k / 128, rows].
        w_scale: fp32 [n / 128, k / 128].
        num_sms: SMs to compute on; None, or more than there are: all.
        """
        target = num_sms if num_sms is not None and num_sms < self._most_sms else 0
        if target != self._target:
            self._set(_SM_TARGET, ctypes.c_int32(target))
            self._target = target
        self._x_scale.value, self._w_scale.value = x_scale, w_scale
        self._set(_A_SCALE, self._w_scale)
        self._set(_B_SCALE, self._x_scale)
        address_bits = x | w | out | 256
        alignment = address_bits & -address_bits  # the lowest set bit, at most 256
        plan = self._plans.get((rows, alignment, target)) or self._plan(rows, alignment)
        status = self._multiply(
            self._handle,
            self._description,
            ctypes.addressof(self._one),
            w,
            self._w_layout,
            x,
            plan.x_layout,
            ctypes.addressof(self._zero),
            out,
            plan.out_layout,
            out,
            plan.out_layout,
            ctypes.addressof(plan.heuristic),
            _workspace(stream).data_ptr(),
            _WORKSPACE_BYTES,
            stream,
        )
        _check(status, f"cublasLtMatmul of {rows} rows, {self.n} x {self.k}")

    def _plan(self, rows: int, alignment: int) -> CublasPlan:
        plan = CublasPlan(
            x_layout=_made("cublasLtMatrixLayoutCreate", _E4M3, self.k, rows, self.k),
            out_layout=_made("cublasLtMatrixLayoutCreate", _BF16, self.n, rows, self.n),
            heuristic=_Heuristic(),
        )
        preference, found = _made("cublasLtMatmulPreferenceCreate"), _int(0)
        limits = ((_MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES)),)
        for attribute, value in (*limits, *((name, ctypes.c_uint32(alignment)) for name in _ALIGNMENTS)):
            _call(
                "cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), ctypes.sizeof(value)
            )
        status = library().cublasLtMatmulAlgoGetHeuristic(
            self._handle,
            self._description,
            self._w_layout,
            plan.x_layout,
            plan.out_layout,
            plan.out_layout,
            preference,
            1,
            ctypes.byref(plan.heuristic),
            ctypes.byref(found),
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        if status not in (0, _NOT_SUPPORTED):
            _check(status, "cublasLtMatmulAlgoGetHeuristic")
        if not found.value:
            raise RuntimeError(f"cuBLAS has no kernel for {rows} block-scaled e4m3 rows times {self.n} x {self.k}")
        self._plans[rows, alignment, self._target] = plan
        return plan

    def _set(self, attribute: int, value: Any) -> None:
        _call("cublasLtMatmulDescSetAttribute", self._description, attribute, ctypes.byref(value), ctypes.sizeof(value))


def is_installed() -> bool:
    """Whether there is a cublasLt of the CUDA version that torch was built with."""
    try:
        return library() is not None
    except OSError:
        return False


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').split('.')[0]}")
    created = ctypes.POINTER(_pointer)
    loaded.cublasLtCreate.argtypes = [created]
    loaded.cublasLtMatmulDescCreate.argtypes = [created, _int, _int]
    loaded.cublasLtMatrixLayoutCreate.argtypes = [created, _int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    loaded.cublasLtMatmulPreferenceCreate.argtypes = [created]
    loaded.cublasLtMatmulPreferenceDestroy.argtypes = [_pointer]
    for name in ("cublasLtMatmulDescSetAttribute", "cublasLtMatmulPreferenceSetAttribute"):
        getattr(loaded, name).argtypes = [_pointer, _int, _pointer, _size]
    loaded.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[_pointer] * 7, _int, _pointer, _pointer]
    loaded.cublasLtMatmul.argtypes = [*[_pointer] * 14, _size, _pointer]
    loaded.cublasLtGetStatusName.argtypes, loaded.cublasLtGetStatusName.restype = [_int], ctypes.c_char_p
    return loaded


@functools.cache
def _handle(device: int) -> int:
    return _made("cublasLtCreate")


@functools.cache
def _workspace(stream: int) -> torch.Tensor:
    """Scratch memory shared by the products on one stream."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _made(function: str, *arguments: int) -> int:
    made = _pointer()
    _call(function, ctypes.byref(made), *arguments)
    assert made.value is not None
    return made.value


def _call(function: str, *arguments: Any) -> None:
    _check(getattr(library(), function)(*arguments), function)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: {library().cublasLtGetStatusName(status).decode()}")
