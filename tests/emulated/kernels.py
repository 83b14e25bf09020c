"""CUDA sources of csrc/cuda as shared libraries for the CPU (cuda.h): compiled by g++, called like a kernel."""

import ctypes
import functools
import hashlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eprt.gpu import jit

_compiling = threading.Lock()
_loaded: list[ctypes.CDLL] = []  # kernels that read the clock
# ThreadSanitizer must have been there from the beginning of the process (python -m tests.emulated --races).
WATCHED = ("-g", "-fsanitize=thread") if hasattr(ctypes.CDLL(None), "__tsan_acquire") else ()
HERE = Path(__file__).parent
_FUNCTION = re.compile(r"^(?:template <[^\n]*>\n)?(?:EPRT_DEVICE|__device__ __noinline__)[^;{}]*\{", re.MULTILINE)
_NOT_INLINED = re.compile(r"^(__device__ __noinline__[^;{}]*\{)", re.MULTILINE)
_SHARED = re.compile(r"extern __shared__ __align__\(\d+\) unsigned char smem\[\];")
_AFTER = "__host__ __device__ constexpr int ceil_div"  # memory.h needs what stands before, and is needed after
# Headers with tensor cores need what stands before these lines, and are needed after.
_TENSOR_CORES = {
    "struct GroupedProductParams {": "tensor.h",
    "struct PromptParams {": "prompt.h",
    "struct MlaDecodeFp8Params {": "latents.h",
    "struct IndexChooseParams {": "choose.h",
    "struct IndexScoresParams {": "scores.h",
}
_MULTIPLY = re.compile(r"^MULTIPLY_(BF16|E4M3)\(.*$", re.MULTILINE)
_PARAMS = {
    "grouped_product": "GroupedProductParams",
    "dispatch": "DispatchParams",
    "combine": "CombineParams",
    "layout": "LayoutParams",
    "meet": "MeetParams",
    "count": "CountParams",
    "mla_schedule": "MlaScheduleParams",
    "mla_combine": "MlaCombineParams",
    "prompt_attention": "PromptParams",
    "mla_quantize": "MlaQuantizeParams",
    "mla_decode_fp8": "MlaDecodeFp8Params",
    "mla_dense_fp8": "MlaDecodeFp8Params",
    "index_choose": "IndexChooseParams",
    "index_scores": "IndexScoresParams",
}
_ENTRY = """
extern "C" void launch(const void* params, unsigned blocks, int threads, int shared_bytes) {
  const auto body = [](void* p) { %(entry)s(*static_cast<const %(params)s*>(p)); };
  std::vector<std::thread> running;
  for (unsigned b = 0; b < blocks; ++b)
    running.emplace_back(emulated::run_block, b, blocks, threads, shared_bytes, +body, const_cast<void*>(params));
  for (std::thread& one : running) one.join();
}
"""


def without_ptx(text: str) -> str:
    """Without the functions that are written in PTX; memory.h has them."""
    kept, at = [], 0
    for match in _FUNCTION.finditer(text):
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if re.search(r"\basm\b|_ASM\b", text[match.end() : end]):
            kept.append(text[at : match.start()])
            at = end
    return "".join([*kept, text[at:]])


@functools.cache
def folder() -> Path:
    return Path(tempfile.gettempdir()) / f"eprt-emulated-{hashlib.sha256(str(HERE).encode()).hexdigest()[:8]}"


def library(source: jit.KernelSource, entry: str) -> ctypes.CDLL:
    """The same for all ranks, which are threads."""
    with _compiling:
        return _library(source, entry)


@functools.cache
def _library(source: jit.KernelSource, entry: str) -> ctypes.CDLL:
    """entry: such as "eprt::low_latency::dispatch". Kept in the temporary directory by content."""
    text = without_ptx(jit.read_source(source.name))
    text = _SHARED.sub("unsigned char* smem = emulated::shared_memory();", text)
    text = _NOT_INLINED.sub(r"\1 emulated::LeaveTogether with_all_lanes;", text)
    assert _AFTER in text
    text = text.replace(_AFTER, f'#include "memory.h"\n{_AFTER}')
    text = _MULTIPLY.sub("", text)
    for line, header in _TENSOR_CORES.items():
        text = text.replace(line, f'#include "{header}"\n{line}')
    namespace, name = entry.rsplit("::", 1)
    names = {"entry": entry, "params": f"{namespace}::{_PARAMS[name]}"}
    if "eprt_wire_put" in text and ("NODE_RANKS" in dict(source.defines)):
        wire()
        text += '\n#include "wire.h"'
    text = f'#include "cuda.h"\n{text}\n{_ENTRY % names}'
    defines = [f"-D{key}={value}" for key, value in source.defines]
    built = ctypes.CDLL(str(_compiled(source.name, text, defines)))
    built.launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_int]
    built.launch.restype = None
    if hasattr(built, "emulated_clock_rate"):  # a kernel that reads no clock has none
        _loaded.append(built)
    return built


@functools.cache
def wire() -> ctypes.CDLL:
    """What carries out the wire's calls of all kernels (wire.cpp)."""
    built = ctypes.CDLL(str(_compiled("wire", (HERE / "wire.cpp").read_text(), [])), mode=ctypes.RTLD_GLOBAL)
    built.wire_open.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64]
    return built


def _compiled(name: str, text: str, defines: list[str]) -> Path:
    """The shared library, which stays in the temporary directory."""
    parts = [text, *defines, *WATCHED, *(path.read_text() for path in sorted(HERE.glob("*.h")))]
    path = folder() / f"{name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    if path.exists():
        return path
    folder().mkdir(exist_ok=True)
    with (
        tempfile.NamedTemporaryFile(dir=folder(), suffix=".cpp") as code,
        tempfile.NamedTemporaryFile(dir=folder(), delete=False) as aside,
    ):
        code.write(text.encode())
        code.flush()
        options = ["-std=c++20", "-O1", *WATCHED, "-ffp-contract=off", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["g++", *options, f"-I{HERE}", *defines, code.name, "-o", aside.name], check=True)
    Path(aside.name).replace(path)
    return path


@contextmanager
def fast_clock(rate: int) -> Iterator[None]:
    """The GPU's clock runs so many times as fast as the host's, in kernels loaded before."""
    rates = [ctypes.c_uint64.in_dll(library, "emulated_clock_rate") for library in _loaded]
    for each in rates:
        each.value = rate
    yield
    for each in rates:
        each.value = 1
