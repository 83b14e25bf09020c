"""The grouped bfloat16 product of large tiles without a GPU: its kernels compile, and what they are launched with."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from eprt.ep.nvlink import prebuild as nvlink_prebuild
from eprt.gpu import grouped_product, jit
from eprt.gpu.grouped_product import GroupedProductParams, can_multiply, source
from tests.unit.gpu.test_jit import cache, nvrtc, struct_fields  # noqa: F401 (fixtures)

MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("gated", [False, True])
def test_both_kernels_compile_and_are_built_ahead(nvrtc, cache, gated):  # noqa: F811
    assert jit.cubin(source(gated)).startswith(b"\x7fELF")
    assert source(gated) in {one for _, one in nvlink_prebuild.sources()}
    assert source(gated) not in {one for _, one in nvlink_prebuild.sources("sm_80")}


def test_python_and_cuda_agree_on_parameters_constants_and_shared_memory():
    text = jit.read_source("grouped_product")
    names = [field[0] for field in GroupedProductParams._fields_]
    assert struct_fields(text, "GroupedProductParams") == names[:-1] and names[-1] == "_"
    assert ctypes.sizeof(GroupedProductParams) % 64 == 0 and GroupedProductParams.x.offset == 128
    told = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    ours = {
        "kHalf": grouped_product._HALF,
        "kBox": grouped_product._BOX,
        "kMostRows": grouped_product._MOST_ROWS,
        "kStep": grouped_product._STEP,
        "kThreads": grouped_product._THREADS,
        "kMostExperts": grouped_product.MOST_EXPERTS,
    }
    assert ours.items() <= told.items()
    assert told["kStepBytes"] == 2 * told["kStep"] and told["kConsumers"] == told["kThreads"] - 128
    boxes = sorted(int(boxes) for boxes in re.findall(r"\bCASE\((\d+)\)", text))
    assert boxes == list(range(1, told["kMostRows"] // told["kBox"] + 1)), "a tile of any number of boxes is computed"
    columns = {int(columns) for columns in re.findall(r"^MULTIPLY_BF16\((\d+),", text, re.MULTILINE)}
    assert columns == {n * told["kBox"] for n in boxes}
    stages, arrays = 4 * (256 + 176) * 128 + 2 * 4 * 8, 2 * 1025 * 4
    assert grouped_product.shared_bytes() == 1024 + stages + arrays <= MOST_SHARED_BYTES


class FakeLaunch:
    def __init__(self):
        self.params, self.calls = GroupedProductParams(), []

    def __call__(self, num_blocks, stream):
        self.calls.append(num_blocks)


@pytest.fixture
def launched(monkeypatch):
    """What grouped_product launches, and the matrices it describes to the GPU."""
    fake, maps = FakeLaunch(), []

    def byte_matrix(*place):
        maps.append(place)
        return grouped_product.TensorMap()

    monkeypatch.setattr(grouped_product, "_launch", lambda device, gated: fake)
    monkeypatch.setattr(grouped_product, "byte_matrix", byte_matrix)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return SimpleNamespace(launch=fake, maps=maps)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("gated, n", [(False, 520), (True, 264)])
def test_what_the_kernel_is_given(launched, gated, n):
    x, w, y = bf16(50, 200), bf16(4, n * (1 + gated), 200), bf16(50, n)
    count, matrix = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    grouped_product.grouped_product(x, w, count, matrix, y, gated, num_sms=132)
    p, num_matrix_rows = launched.launch.params, 4 * n * (1 + gated)
    assert launched.maps == [(w.data_ptr(), num_matrix_rows, 400, 128), (x.data_ptr(), 50, 400, 16)]
    assert (p.count, p.matrix, p.y) == (count.data_ptr(), matrix.data_ptr(), y.data_ptr())
    assert (p.num_experts, p.n, p.steps) == (3, n, 4), "the last step is partly past K"
    grouped_product.grouped_product(x, w, count, None, y, gated, num_sms=132)
    assert launched.launch.params.matrix is None


def test_the_grid_is_whole_clusters_on_the_sms_it_may_use_and_no_more_than_there_is_work(launched):
    x, w, y = bf16(100_000, 64), bf16(64, 1024, 64), bf16(100_000, 1024)
    count = torch.zeros(64, dtype=torch.int32)
    for num_sms in (132, 109, 2, 1):
        grouped_product.grouped_product(x, w, count, None, y, False, num_sms)
    x, w, y = bf16(16, 64), bf16(1, 256, 64), bf16(16, 256)
    grouped_product.grouped_product(x, w, count[:1], None, y, False, 132)
    assert launched.launch.calls == [132, 108, 2, 2, 4]


def test_operands_that_the_kernel_is_not_made_for():
    x, w = bf16(8, 64), bf16(2, 256, 64)
    assert can_multiply(x, w, 2, gated=False) and can_multiply(x, w, 1024, gated=True)
    assert not can_multiply(x, w, 1025, gated=False), "more experts than its shared memory has room for"
    assert not can_multiply(bf16(8, 128)[:, :64], w, 2, gated=False), "rows lie apart"
    assert not can_multiply(bf16(9 * 64)[1 : 8 * 64 + 1].view(8, 64), w, 2, gated=False), "not aligned to 16 bytes"
    assert not can_multiply(bf16(8, 60), bf16(2, 256, 60), 2, gated=False), "rows of 120 bytes"
    assert not can_multiply(x, bf16(2, 258, 64), 2, gated=False), "rows of y are not aligned to 8 bytes"
    assert not can_multiply(x, bf16(2, 260, 64), 2, gated=True)


@pytest.mark.parametrize("lacks", ["NVRTC", "Hopper", None])
def test_where_the_kernel_runs(monkeypatch, lacks):
    def launch(device, gated):
        if lacks == "NVRTC":
            raise ImportError("no NVRTC here")
        return "a kernel"

    monkeypatch.setattr(grouped_product, "_launch", launch)
    capability = (10, 0) if lacks == "Hopper" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    grouped_product.is_built.cache_clear()
    assert grouped_product.is_built(torch.device("cuda", 0), True) == (lacks is None)
    assert not grouped_product.is_built(torch.device("cpu"), True)
    grouped_product.is_built.cache_clear()
