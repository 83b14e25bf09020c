"""Kernels between nodes: those of one node have nothing of them; compiled and linked to NVSHMEM without a GPU."""

import re
import shutil
import subprocess

import pytest

from eprt.ep.nvlink.low_latency import kernel_sources
from eprt.ep.nvlink.low_latency_layout import HeapLayout, LowLatencyHeap, WireLayout
from eprt.gpu import jit, nvshmem
from eprt.gpu.nvshmem import NvshmemFiles
from eprt.gpu.nvshmem_kernel import cuda_headers, linked_cubin


def shape(node_ranks: int | None, exact: bool = False, layered: bool = False) -> LowLatencyHeap:
    return LowLatencyHeap(4, 16, 2048, 6, 4, "fp8", exact, 2, node_ranks=node_ranks, layered=layered)


def preprocessed(source: jit.KernelSource) -> str:
    command = ["g++", "-E", "-P", "-x", "c++", "-", *(f"-D{key}={value}" for key, value in source.defines)]
    text = jit.read_source(source.name)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_kernels_of_one_node_have_nothing_of_the_wire():
    names = re.compile(
        r"eprt_wire|EPRT_WIRED|is_beyond|ship_|outbox|WireLayout|await_(counts|message|words|sum)|hand_on"
    )
    for one, wired in zip(kernel_sources(shape(None)).values(), kernel_sources(shape(2)).values()):
        assert not names.search(preprocessed(one))
        found = preprocessed(wired)
        assert "eprt_wire_put" in found and "EPRT_WIRED" not in found


@pytest.mark.parametrize("layered", [False, True])
def test_fields_of_the_wire_follow_those_of_one_node(layered):
    one, wired = shape(None), shape(2, layered=layered)
    for name, _ in () if layered else HeapLayout._fields_:
        assert getattr(wired.layout(HeapLayout), name) == one.offsets()[name]
    assert (wired.field_bytes["inbox"] > 0) == layered
    ends = [*list(wired.offsets().values())[1:], wired.num_bytes]
    for name, end in zip(wired.offsets(), ends):
        assert wired.offsets()[name] + wired.field_bytes[name] <= end
    assert [name for name, _ in WireLayout._fields_] == list(wired.offsets())[len(HeapLayout._fields_) :]


@pytest.fixture
def files(tmp_path, monkeypatch) -> NvshmemFiles:
    """NVSHMEM's and everything that linking needs; skips where some of it is missing."""
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink", reason="cuda-bindings is not installed")
    try:
        nvjitlink.version()
        jit.nvrtc_version()
        cuda_headers()
        found = nvshmem.nvshmem_files()
    except Exception as error:
        pytest.skip(str(error))
    monkeypatch.setenv("EPRT_KERNEL_CACHE", str(tmp_path / "cubins"))
    return found


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("layered", [False, True])
def test_kernels_between_nodes_are_linked_to_nvshmem(files, exact, layered):
    for source in kernel_sources(shape(2, exact, layered)).values():
        binary = linked_cubin(source, files)
        assert binary.startswith(b"\x7fELF") and b"nvshmemi_device_state_d" in binary
    assert len(list(jit.cache_dir().glob(f"*-nvshmem{files.release}-*"))) == 2


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(nvshmem.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install nvidia-nvshmem-cu13"):
        nvshmem.nvshmem_files()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ImportError, match="nvidia-cuda-cccl"):
        cuda_headers()


def test_the_release_is_that_of_the_headers(tmp_path):
    version = tmp_path / "include" / "non_abi" / "nvshmem_version.h"
    version.parent.mkdir(parents=True)
    names = {"MAJOR": 3, "MINOR": 8, "PATCH": 0}
    version.write_text("".join(f"#define NVSHMEM_VENDOR_{name}_VERSION {n}\n" for name, n in names.items()))
    assert NvshmemFiles(tmp_path).release == "3.8.0"
