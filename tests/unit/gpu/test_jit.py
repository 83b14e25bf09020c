"""Compiling CUDA kernels on a machine without a GPU, the cache, and the structs that Python and CUDA share."""

import ctypes
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eprt import doctor
from eprt.compat.deep_ep import dispatch_layout
from eprt.compat.deep_ep.low_latency import LowLatencyShape
from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.config import EPConfig
from eprt.ep.nvlink import (
    low_latency_layout as nvlink_layout,
)
from eprt.ep.nvlink import (
    meeting as nvlink_meeting,
)
from eprt.ep.nvlink import (
    normal as nvlink_normal,
)
from eprt.ep.nvlink import (
    normal_layout as nvlink_normal_layout,
)
from eprt.ep.nvlink import (
    prebuild as nvlink_prebuild,
)
from eprt.ep.nvlink import structs
from eprt.ep.nvlink.low_latency import kernel_sources
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.gpu import jit


@pytest.fixture
def nvrtc():
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:
        pytest.skip(f"NVRTC is not installed: {error}")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EPRT_KERNEL_CACHE", str(tmp_path / "cubins"))
    return tmp_path / "cubins"


def shape(hidden: int, top_k: int, num_ranks: int, payload: str = "fp8", exact: bool = False) -> LowLatencyHeap:
    return LowLatencyHeap(num_ranks, 16, hidden, top_k, 4, payload, exact, num_buffers=2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_compile_for_every_architecture(nvrtc, cache, arch):
    for source in kernel_sources(shape(2048, 6, 4), arch=arch).values():
        assert jit.cubin(source).startswith(b"\x7fELF")
    assert len(list(cache.glob(f"*-{arch}-*.cubin"))) == 2
    assert jit.cubin(nvlink_meeting.source(4, arch)).startswith(b"\x7fELF")


def test_other_variants_compile(nvrtc, cache):
    exact, either = shape(1008, 3, 2, "bf16", exact=True), shape(1008, 3, 2, "either")
    for one, profile, names in (
        (exact, False, ["bf16", "exact"]),
        (replace(either, late_weights=True), True, ["fp8", "bf16", "sum", "exact", "late"]),
    ):
        sources = kernel_sources(one, profile=profile, stats=not profile)
        assert list(sources) == names
        for source in sources.values():
            assert jit.cubin(source).startswith(b"\x7fELF")


def test_what_one_user_compiles_others_can_read(cache, monkeypatch):
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(jit, "compile_source", lambda source: b"cubin")
    assert jit.cubin(kernel_sources(shape(256, 1, 1))["sum"]) == b"cubin"
    (path,) = cache.iterdir()
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("harm", [lambda cubin: b"", lambda cubin: bytes(len(cubin)), lambda cubin: cubin[:-1]])
def test_what_a_host_left_in_the_cache_that_went_down_is_compiled_again(nvrtc, cache, monkeypatch, harm):
    source = dispatch_layout.source(2)
    cubin = jit.cubin(source)
    (path,) = cache.iterdir()
    path.write_bytes(harm(cubin))
    with monkeypatch.context() as without, pytest.raises(ImportError, match="or is broken there"):
        without.setattr(jit, "nvrtc_version", no_nvrtc)
        jit.cubin(source)
    assert jit.cubin(source) == path.read_bytes() == cubin


@pytest.mark.parametrize("full", [False, True])
def test_a_cache_that_cannot_be_written_is_named_and_left_as_it_was(tmp_path, monkeypatch, capsys, full):
    """A file where its folder should be; or a disk that is full."""
    cache = tmp_path / "cubins"
    monkeypatch.setenv("EPRT_KERNEL_CACHE", str(cache))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(jit, "compile_source", lambda source: b"cubin")
    if full:
        full_disk = partial(Path("/dev/full").open, "wb", 0)
        monkeypatch.setattr(jit.tempfile, "NamedTemporaryFile", lambda **kwargs: full_disk())
        monkeypatch.setattr(jit.os, "unlink", lambda name: capsys.readouterr() and print(f"unlinked {name}"))
    else:
        cache.write_text("")
    assert doctor.main(["--build-kernels"]) == 1
    printed = capsys.readouterr()
    why = "No space left on device" if full else "File exists"
    assert f"cannot be kept in {cache}: {why}; let EPRT_KERNEL_CACHE name a folder" in printed.err
    assert "unlinked /dev/full" in printed.out if full else cache.is_file()


def test_a_kernel_is_compiled_once_and_again_when_anything_changes(nvrtc, cache, monkeypatch):
    source = kernel_sources(shape(256, 1, 1))["sum"]
    first = jit.cubin(source)
    monkeypatch.setattr(jit, "compile_source", lambda source: pytest.fail("compiled again"))
    assert jit.cubin(source) == first
    names = {jit.cubin_name(s, "13.0") for k in (1, 2) for s in kernel_sources(shape(256, k, 1)).values()}
    names |= {jit.cubin_name(s, "13.0") for s in kernel_sources(shape(256, 1, 1), arch="sm_80").values()}
    names |= {jit.cubin_name(s, "13.1") for s in kernel_sources(shape(256, 1, 1)).values()}
    assert len(names) == 8


def no_nvrtc():
    raise ImportError("no NVRTC here")


@pytest.mark.parametrize("place", ["in the cache", "beside the sources"])
def test_what_was_built_ahead_is_found_without_nvrtc(nvrtc, cache, tmp_path, monkeypatch, place):
    """`eprt env --build-kernels` on a fresh cache; then only what it wrote is there, in the cache or in the package."""
    layouts = [(what, source) for what, source in nvlink_prebuild.sources() if source.name == "dispatch_layout"]
    monkeypatch.setattr(nvlink_prebuild, "sources", lambda arch: iter(layouts))
    assert doctor.main(["--build-kernels"]) == 0
    assert len(list(cache.glob("dispatch_layout-sm_90a-*.cubin"))) == len(layouts) == len(nvlink_prebuild.RANKS)
    if place == "beside the sources":
        shutil.copytree(jit.source_dir(), tmp_path / "sources")
        cache.rename(tmp_path / "sources" / "cubins")
        monkeypatch.setattr(jit, "source_dir", lambda: tmp_path / "sources")
    monkeypatch.setattr(jit, "nvrtc_version", no_nvrtc)
    for _, source in layouts:
        assert jit.cubin(source).startswith(b"\x7fELF")
    other = dispatch_layout.source(3)
    with pytest.raises(ImportError, match=r"dispatch_layout-sm_90a-.*no NVRTC here.*--build-kernels"):
        jit.cubin(other)


def test_what_is_built_ahead_is_what_the_layers_ask_for():
    ahead = {source for _, source in nvlink_prebuild.sources()}
    face = LowLatencyShape(128, 7168, 256, 8).heap(8)
    normal = [source for grouped in (False, True) for source in nvlink_normal.kernel_sources(8, grouped=grouped)]
    assert ahead >= {*kernel_sources(face).values(), *normal, dispatch_layout.source(8), nvlink_meeting.source(8)}
    assert ahead >= set(kernel_sources(LowLatencyHeap(4, 64, 2048, 6, 16, "fp8", False, num_buffers=2)).values())


def test_a_compiler_error_carries_the_log(nvrtc, cache):
    source = jit.KernelSource("low_latency_dispatch", defines=(("HIDDEN", 17),))
    with pytest.raises(jit.KernelCompileError, match=r"low_latency_dispatch.cu for sm_90a .*'HIDDEN': 17(.|\n)*error"):
        jit.cubin(source)
    assert not list(cache.glob("*"))


def struct_fields(text: str, name: str, wired: bool = False) -> list[str]:
    """Field names of a CUDA struct, in order. wired: of kernels between nodes."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
    assert body, name
    inside = re.sub(r"EPRT_WIRED\((.*)\)", r"\1" if wired else "", body.group(1))
    lines = [line.split("//")[0].strip() for line in inside.splitlines()]
    return [re.split(r"[\s*&]+", re.sub(r"\[.*?\]", "", line).rstrip("; "))[-1] for line in lines if line]


@pytest.mark.parametrize("wired", [False, True])
def test_python_and_cuda_agree_on_every_struct(wired):
    context = nvlink_layout.context_struct(4, wired)
    ours = {
        "HeapLayout": nvlink_layout.HeapLayout,
        "Deadline": structs.Deadline,
        "Stats": structs.Stats,
        "Handle": nvlink_layout.Handle,
        "Context": context,
        "DispatchParams": nvlink_layout.dispatch_struct(context),
        "CombineParams": nvlink_layout.combine_struct(context),
        "LayoutParams": dispatch_layout._LayoutParams,
        "MeetParams": nvlink_meeting.meet_struct(4),
    } | ({"WireLayout": nvlink_layout.WireLayout} if wired else {})
    theirs = "".join(
        jit.read_source(name) for name in ("low_latency_dispatch", "low_latency_combine", "dispatch_layout", "meeting")
    )
    for name, struct in ours.items():
        assert struct_fields(theirs, name, wired) == [field[0] for field in struct._fields_], name
        assert issubclass(struct, ctypes.Structure)


def test_the_protocol_explains_every_field_and_barrier():
    text = (jit.source_dir().parents[1] / "docs" / "protocol.md").read_text()
    low_latency, normal = text.split("# Normal mode between GPUs")
    barriers = re.search(r"enum Barrier : int \{(.*?)\};", jit.read_source("low_latency_dispatch"), re.DOTALL)
    assert barriers
    names = {"mask", "ticket", "Failure", *re.findall(r"^\s*(k\w+)", barriers.group(1), re.MULTILINE)}
    for struct in (nvlink_layout.HeapLayout, nvlink_layout.WireLayout, nvlink_layout.Handle):
        names |= {field[0] for field in struct._fields_}
    blocks = re.findall(r"```.*?```", low_latency, re.DOTALL)
    spans = re.findall(r"`[^`]+`", re.sub(r"```.*?```", "", low_latency, flags=re.DOTALL))
    explained = set(re.findall(r"\w+", " ".join(blocks + spans)))
    missing = names - explained - {"kWorkers", "kPlacers", "kGroup"}  # these only join threads of one kind
    assert not missing
    ours = {field[0] for kind in ("HeapLayout", "Layout") for field in getattr(nvlink_normal_layout, kind)._fields_}
    context = {field[0] for field in nvlink_normal_layout.context_struct(4)._fields_}
    ours |= {"host", "totals", "slot_begin"} | (context & {"ticket", "done", "taken"})
    assert not ours - set(re.findall(r"\w+", normal))


def test_the_heap_is_small_and_its_fields_do_not_overlap():
    large = LowLatencyHeap(8, 128, 7168, 8, 36, "fp8", exact=False, num_buffers=2)
    offsets, sizes = large.offsets(), large.field_bytes
    names = list(offsets)
    assert names == [field[0] for field in nvlink_layout.HeapLayout._fields_]
    for before, after in pairwise(names):
        assert offsets[before] + sizes[before] <= offsets[after] and offsets[after] % 128 == 0
    assert large.num_bytes < 2147e6 / 3  # a third of DeepEP's buffer for the same shape
    assert large.payload_bytes == 7168 + 224 and large.message_bytes == 128 * (1 + 64)  # 7 vectors a line
    assert shape(7168, 8, 8, "either").message_bytes == shape(7168, 8, 8, "bf16").message_bytes == 128 * (1 + 128)
    assert shape(7168, 15, 8, "fp8").message_bytes == 128 * (2 + 64)  # 14 entries a line of the header


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_normal_kernels_compile_for_every_architecture(nvrtc, cache, arch):
    for grouped, exact in ((False, False), (True, False), (True, True)):
        for source in nvlink_normal.kernel_sources(4, grouped=grouped, exact=exact, stats=not exact, arch=arch):
            assert jit.cubin(source).startswith(b"\x7fELF")
    assert len(list(cache.glob(f"*-{arch}-*.cubin"))) == 9


def test_python_and_cuda_agree_on_every_struct_of_normal_mode():
    context = nvlink_normal_layout.context_struct(4)
    ours = {
        "HeapLayout": nvlink_normal_layout.HeapLayout,
        "Deadline": structs.Deadline,
        "Stats": structs.Stats,
        "Layout": nvlink_normal_layout.Layout,
        "Context": context,
        "CountParams": nvlink_normal_layout.count_struct(context),
        "DispatchParams": nvlink_normal_layout.dispatch_struct(context),
        "CombineParams": nvlink_normal_layout.combine_struct(context),
        "Division": nvlink_normal_layout.Division,
    }
    theirs = "".join(jit.read_source(name) for name in ("normal_count", "normal_dispatch", "normal_combine"))
    for name, struct in ours.items():
        assert struct_fields(theirs, name) == [field[0] for field in struct._fields_], name
    layout = nvlink_normal_layout.LayoutShape(100, 3, 24, 4, 7)
    fields = layout.fields
    assert [*struct_fields(theirs, "Layout"), "slot_begin"] == list(fields)
    ends = [first for first, _ in [*fields.values()][1:]] + [layout.num_words]
    assert all(first % 4 == 0 and first + prod(shape) <= end for (first, shape), end in zip(fields.values(), ends))


def test_fields_of_normal_mode_do_not_overlap():
    block = nvlink_normal_layout.BlockShape(1000, 3, 1008, 8, grouped=True)
    for large in (nvlink_normal_layout.NormalHeap(8, 256, 4096, 2), block):
        offsets, sizes = large.offsets(), large.field_bytes
        for before, after in pairwise(offsets):
            assert offsets[before] + sizes[before] <= offsets[after] and offsets[after] % 128 == 0
        assert sum(sizes.values()) <= large.num_bytes
    assert list(block.offsets()) == struct_fields(jit.read_source("normal_dispatch"), "Fields")


def test_chunks_cover_all_tokens():
    for tokens in (0, 1, 23, 24, 25, 4096, 8191, 100_000):
        chunks = nvlink_normal_layout.Chunks.of(tokens, 24)
        assert chunks.tokens * (chunks.count - 1) <= tokens <= chunks.tokens * chunks.count
        assert chunks.tokens <= nvlink_normal_layout.MAX_CHUNK_TOKENS
        assert chunks.count <= nvlink_normal_layout.Chunks.most(tokens, 24)


def test_kernels_are_built_ahead_for_the_architectures_asked_for(monkeypatch, capsys):
    compiled: list[jit.KernelSource] = []
    monkeypatch.setattr(nvlink_prebuild, "cubin", lambda source: compiled.append(source) or b"ELF")
    assert doctor.main(["--build-kernels", "sm_100a", "sm_80"]) == 0
    assert compiled == [source for arch in ("sm_100a", "sm_80") for _, source in nvlink_prebuild.sources(arch)]
    assert {source.arch for source in compiled} == {"sm_100a", "sm_80"}
    assert doctor.main(["--build-kernels", "sm_70"]) == 2
    assert "sm_70" in capsys.readouterr().err


def test_normal_mode_names_how_many_ranks_it_can_have(monkeypatch):
    group: Any = SimpleNamespace(rank=3, size=nvlink_normal.MAX_RANKS + 1, allgather=lambda value: [value] * 31)
    with pytest.raises(ValueError, match=r"\[rank 3/31\] 31 ranks: normal mode has at most 30 .*use fewer ranks"):
        RowExchange(group, 1 << 20, timeout_s=1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132))
    config = EPConfig(1024, 2 * group.size, 4, 8, mode="normal", device="cuda")
    with pytest.raises(ValueError, match=r"\[rank 3/31\].*ranks in normal mode.*31.*30.*use fewer ranks"):
        NvlinkNormalBackend(config, group)
