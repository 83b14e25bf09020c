"""The dense product of thread block clusters without a GPU: its kernels compile, and who gets it."""

import ctypes
import importlib
import re
from types import SimpleNamespace

import pytest
import torch

from eprt.ep.nvlink import prebuild as nvlink_prebuild
from eprt.gpu import cluster_product, jit, tensor_map
from eprt.gpu.cluster_product import TOKENS, ClusterProductParams, ClusterTiling, source, tokens_of
from eprt.gpu.driver import CudaError
from eprt.ops import tuning
from eprt.ops.tuning import ProductShape, Tiling
from eprt.ops.weight import Weight
from tests.unit.gpu.test_jit import cache, nvrtc, struct_fields  # noqa: F401 (fixtures)

MOST_SHARED_BYTES = 227 << 10


def test_every_tiling_that_was_chosen_compiles_and_fits_the_machine(nvrtc, cache):  # noqa: F811
    chosen = list(tuning.cluster_tilings())
    assert chosen
    for shape, rows, tiling in chosen:
        tokens = tokens_of(rows)
        assert 1 <= tiling.splits <= 8 and tiling.shared_bytes(tokens) <= MOST_SHARED_BYTES, (shape, rows)
        assert shape.n % 4 == 0 and shape.k % 128 == 0
    ahead = {one for what, one in nvlink_prebuild.sources() if what.startswith("fp8 product")}
    assert ahead == {source(tokens_of(rows), tiling) for _, rows, tiling in chosen}
    assert not [what for what, _ in nvlink_prebuild.sources("sm_80") if what.startswith("fp8 product")]
    widest = {(tokens, ClusterTiling(2, 2, 4, 4)) for tokens in TOKENS}
    for tokens, tiling in widest:
        assert jit.cubin(source(tokens, tiling)).startswith(b"\x7fELF")
    for one in ahead:
        assert jit.cubin(one).startswith(b"\x7fELF")


def test_a_tile_of_half_a_scale_block_cannot_be_two_blocks_of_a_warpgroup(nvrtc, cache):  # noqa: F811
    """Its warpgroups' rows share one scale: 64 * 1 * 3 would not."""
    with pytest.raises(jit.KernelCompileError, match="share a scale"):
        jit.cubin(source(16, ClusterTiling(1, 3, 1, 4)))


def test_python_and_cuda_agree_on_parameters_threads_and_shared_memory():
    text = jit.read_source("cluster_product")
    names = [field[0] for field in ClusterProductParams._fields_]
    assert struct_fields(text, "ClusterProductParams") == names[:-1] and names[-1] == "_"
    assert ctypes.sizeof(ClusterProductParams) % 64 == 0 and ClusterProductParams.x.offset == 128
    tiling = ClusterTiling(2, 1, 3, 5)
    stages, sums, scales = 5 * (128 + 64) * 128, 64 * (128 + 4) * 4, 5 * 64 * 4
    assert tiling.shared_bytes(64) == 1024 + max(stages, sums) + scales + 2 * 5 * 8
    assert [ClusterTiling(*t, 1, 4).threads(128) for t in ((1, 1), (2, 1), (3, 1), (2, 2))] == [160, 288, 512, 384]
    assert ClusterTiling(3, 1, 1, 4).threads(64) == 416
    assert re.search(r"kUnequal = TOKENS == 128 && WARPGROUPS \* BLOCKS > 2;", text)


@pytest.mark.parametrize("rows, tokens", [(0, 16), (1, 16), (16, 16), (17, 32), (65, 128), (128, 128)])
def test_kernels_are_made_for_few_numbers_of_rows(rows, tokens):
    assert tokens_of(rows) == tokens


def test_tilings_of_both_kernels_are_kept_and_found(tmp_path):
    cluster, other, shape = (
        ClusterTiling(2, 1, 3, 5),
        Tiling(16, 128, 128, 4, 4, 2),
        ProductShape(1, 96, 512, "dense", False),
    )
    tuning.write("NVIDIA H200", {shape: {16: cluster, 32: other, 64: None}}, tmp_path)
    table = tuning.read("NVIDIA H200", tmp_path)
    assert [tuning.lookup_dense(table, 96, 512, rows)[1] for rows in (1, 17, 33, 65)] == [cluster, other, None, None]


def test_what_is_tuned_fits_the_machine_and_leaves_no_thread_block_without_a_share():
    pytest.importorskip("triton")
    candidates = importlib.import_module("benchmarks.gpu.tune_grouped_gemm").cluster_candidates
    for n, k in ((2112, 7168), (24576, 1536), (7168, 16384)):
        for rows in (1, 16, 64, 128):
            found = candidates(ProductShape(1, n, k, "dense", False), rows)
            assert len(set(found)) == len(found) > 4
            for tiling in found:
                assert tiling.shared_bytes(tokens_of(rows)) <= MOST_SHARED_BYTES and tiling.splits * 2 <= k // 128
        assert candidates(ProductShape(1, n, k, "dense", False), 129) == []


class FakeEncode:
    def __init__(self, status: int):
        self.status, self.calls = status, []

    def __call__(self, at, *arguments):
        self.calls.append((at, arguments))
        ctypes.memmove(at, bytes(range(128)), 128)
        return self.status


@pytest.fixture
def encode(monkeypatch):
    tensor_map.byte_matrix.cache_clear()
    fake = FakeEncode(0)
    monkeypatch.setattr(tensor_map, "_encode", lambda: fake)
    yield fake
    tensor_map.byte_matrix.cache_clear()


def test_a_tensor_map_is_made_once_for_each_place_and_shape(encode):
    first = tensor_map.byte_matrix(1 << 20, 100, 512, 64)
    assert bytes(first) == bytes(range(128)) and tensor_map.byte_matrix(1 << 20, 100, 512, 64) is first
    (at, arguments), *more = encode.calls
    assert at % 64 == 0 and not more
    kind, rank, address, sizes, strides, box, steps, *_ = arguments
    assert (kind, rank, address, list(sizes), list(strides)) == (0, 2, 1 << 20, [512, 100], [512])
    assert (list(box), list(steps)) == ([128, 64], [1, 1])
    tensor_map.byte_matrix(1 << 20, 101, 512, 64)
    assert len(encode.calls) == 2


def test_a_tensor_map_that_is_refused_is_told(encode, monkeypatch):
    driver = SimpleNamespace(CUresult=int, cuGetErrorString=lambda status: (0, b"invalid argument"))
    monkeypatch.setattr(tensor_map, "api", lambda: driver)
    encode.status = 1
    with pytest.raises(CudaError, match="100 x 500 bytes: invalid argument"):
        tensor_map.byte_matrix(1 << 20, 100, 500, 64)


@pytest.fixture
def h200(monkeypatch):
    """Its tilings and its capability, for tensors on the CPU; kernels: what loading one does."""
    pytest.importorskip("triton")
    module = importlib.import_module("eprt.ops.cuda.linear")
    table = tuning.read("NVIDIA H200")
    monkeypatch.setattr(module, "tuned_dense", lambda device, n, k, rows: tuning.lookup_dense(table, n, k, rows))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cluster_product, "_launch", lambda device, tokens, tiling: "a kernel")
    cluster_product.is_built.cache_clear()
    yield module
    cluster_product.is_built.cache_clear()


def _weight(n: int, k: int) -> Weight:
    return Weight(torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(-(-n // 128), k // 128))


def test_the_kernel_is_chosen_where_it_was_fastest_and_gives_the_type_asked_for(h200):
    weight = _weight(2112, 7168)
    for rows in (0, 1, 64, 128):
        assert isinstance(h200._tiling(weight, rows, torch.bfloat16), ClusterTiling)
    assert h200._tiling(weight, 129, torch.bfloat16) is None
    assert isinstance(h200._tiling(weight, 64, torch.float32), Tiling), "its results are bfloat16"
    int8 = Weight(torch.empty(2112, 7168, dtype=torch.int8), torch.empty(2112))
    assert isinstance(h200._tiling(int8, 1, torch.bfloat16), Tiling), "refused behind"


@pytest.mark.parametrize("lacks", ["NVRTC", "Hopper"])
def test_without_the_kernel_products_are_what_they_were(h200, monkeypatch, lacks):
    def no_kernel(*_):
        raise ImportError("no NVRTC here")

    if lacks == "NVRTC":
        monkeypatch.setattr(cluster_product, "_launch", no_kernel)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert isinstance(h200._tiling(_weight(2112, 7168), 64, torch.bfloat16), Tiling)
    assert h200._tiling(_weight(7168, 16384), 128, torch.bfloat16) is None


def test_tiles_are_a_matrix_of_three_dimensions(encode):
    tensor_map.byte_tiles.cache_clear()
    tensor_map.byte_tiles(1 << 20, 100, 1152, 64, 2)
    ((_, arguments),) = encode.calls
    kind, rank, address, sizes, strides, box, steps, *_ = arguments
    assert (kind, rank, address) == (0, 3, 1 << 20)
    assert (list(sizes), list(strides)) == ([128, 100, 9], [1152, 128])
    assert (list(box), list(steps)) == ([128, 64, 2], [1, 1, 1])
    tensor_map.byte_tiles.cache_clear()
