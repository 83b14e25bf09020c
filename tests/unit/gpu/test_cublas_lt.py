"""cublasLt's block-scaled product without a GPU: what is asked of the library, how often, and what its errors say."""

import ctypes
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from eprt.gpu import cublas_lt
from eprt.gpu.cublas_lt import BlockScaledProduct

NOT_SUPPORTED, EXECUTION_FAILED = 15, 13
X, X_SCALE, W, W_SCALE, OUT = (i << 20 for i in range(1, 6))


class Library:
    """statuses: of functions, by name, where not 0. launched: each product's arguments, and attributes by number."""

    def __init__(self):
        self.calls, self.statuses, self.set, self.launched = Counter(), {}, {}, []
        self._made = 0

    def __getattr__(self, name):
        def function(*arguments):
            self.calls[name] += 1
            if name.endswith("Create"):
                self._made += 1
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = self._made
            elif name == "cublasLtMatmulDescSetAttribute":
                self.set[arguments[1]] = int.from_bytes(ctypes.string_at(arguments[2], arguments[3]), "little")
            elif name == "cublasLtMatmulAlgoGetHeuristic" and name not in self.statuses:
                ctypes.cast(arguments[-1], ctypes.POINTER(ctypes.c_int))[0] = 1
            elif name == "cublasLtMatmul":
                self.launched.append((arguments, dict(self.set)))
            return self.statuses.get(name, 0)

        def status_name(status):
            return {15: b"CUBLAS_STATUS_NOT_SUPPORTED", 13: b"CUBLAS_STATUS_EXECUTION_FAILED"}[status]

        return status_name if name == "cublasLtGetStatusName" else function


@pytest.fixture
def library(monkeypatch):
    library = Library()
    monkeypatch.setattr(cublas_lt, "library", lambda: library)
    monkeypatch.setattr(cublas_lt, "_handle", lambda device: 77)
    monkeypatch.setattr(cublas_lt, "_workspace", lambda stream: SimpleNamespace(data_ptr=lambda: 1000 + stream))
    monkeypatch.setattr(cublas_lt, "multiprocessors", lambda: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return library


def test_a_kernel_is_chosen_once_for_each_number_of_rows_and_alignment(library):
    product = BlockScaledProduct(n=256, k=512)
    for rows, x, stream in ((32, X, 5), (32, X + 512, 6), (48, X, 5), (32, X + 16, 5), (32, X + 16, 5)):
        product(rows, x, X_SCALE, W, W_SCALE, OUT, stream)
        arguments, attributes = library.launched[-1]
        assert (arguments[3], arguments[5], arguments[10], arguments[-1]) == (W, x, OUT, stream)
        assert arguments[13] == 1000 + stream, "each stream has a workspace of its own"
        # transposed weights; their scales per 128 x 128, the rows' per 128
        assert attributes == {3: 1, 17: W_SCALE, 18: X_SCALE, 31: 5, 32: 4}
    asked = library.calls["cublasLtMatmulAlgoGetHeuristic"]
    assert asked == library.calls["cublasLtMatmulPreferenceDestroy"] == 3
    kernels = [arguments[12] for arguments, _ in library.launched]
    assert kernels[0] == kernels[1] and kernels[3] == kernels[4] and len(set(kernels)) == 3


def test_fewer_sms_have_a_kernel_of_their_own_and_leave_no_trace(library):
    product = BlockScaledProduct(n=256, k=512)
    targets = []
    for num_sms in (None, 108, 108, 132, 124, 1 << 20):
        product(32, X, X_SCALE, W, W_SCALE, OUT, 5, num_sms)
        targets.append(library.launched[-1][1].get(15, 0))
    assert targets == [0, 108, 108, 0, 124, 0], "CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET"
    kernels = [arguments[12] for arguments, _ in library.launched]
    assert kernels[0] == kernels[3] == kernels[5] and kernels[1] == kernels[2] and len(set(kernels)) == 3
    assert library.calls["cublasLtMatmulAlgoGetHeuristic"] == 3


def test_errors_name_the_product_and_what_cublas_says(library):
    product = BlockScaledProduct(n=256, k=512)
    library.statuses["cublasLtMatmulAlgoGetHeuristic"] = NOT_SUPPORTED
    with pytest.raises(RuntimeError, match="cuBLAS has no kernel for 32 block-scaled e4m3 rows times 256 x 512"):
        product(32, X, X_SCALE, W, W_SCALE, OUT, 0)
    made, destroyed = (library.calls[f"cublasLtMatmulPreference{verb}"] for verb in ("Create", "Destroy"))
    assert made == destroyed == 1
    library.statuses = {"cublasLtMatmul": EXECUTION_FAILED}
    with pytest.raises(RuntimeError, match="cublasLtMatmul of 32 rows, 256 x 512: CUBLAS_STATUS_EXECUTION_FAILED"):
        product(32, X, X_SCALE, W, W_SCALE, OUT, 0)


def test_the_algorithm_lies_where_the_library_looks_for_it():
    """sizeof and offsets of cublasLtMatmulHeuristicResult_t in cublasLt.h."""
    result = cublas_lt._Heuristic
    assert ctypes.sizeof(result) == 96
    assert [getattr(result, field[0]).offset for field in result._fields_] == [0, 64, 72, 76, 80]
