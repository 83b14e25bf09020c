"""Whether `--device cuda` can be served here, told before anything is started and without loading torch.

A rank asks torch again when it takes its GPU (gpu/device.py); what is found here is only that there is surely none.
Knows nothing of what runs on a GPU.
"""

import ctypes
import importlib.util
import itertools
import re
import uuid
from pathlib import Path

from eprt import env
from eprt.serve.gpu_shares import choose_gpus, why_no_room
from eprt.serve.options import OptionError, ServeOptions

_NO_DEVICE = 100  # of CUresult


def check_device(options: ServeOptions) -> None:
    """Called on the host whose ranks are to use its GPUs. OptionError where there is no GPU that torch can use."""
    if options.engine.device == "cuda" and (why := why_no_gpu()):
        raise OptionError(f"--device cuda: {why}, or use --device cpu")
    if options.engine.device == "cuda" and options.num_instances:
        gpus, per_gpu = visible_gpus(), env.get("EPRT_RANKS_PER_GPU")
        if why := why_no_room(options, len(gpus), per_gpu):
            raise OptionError(why)
        used = set(choose_gpus(options.total_ranks, gpus, (), per_gpu))
        if why := why_no_peers([number for number, gpu in enumerate(gpus) if gpu in used]):
            raise OptionError(f"--device cuda: {why}")


def why_no_gpu() -> str | None:
    """The reason and the remedy; None where there is a GPU, or where nothing is known."""
    if not torch_has_cuda():
        return "torch is a build for CPUs: install a CUDA build of torch 2.11 or newer"
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this host has no NVIDIA driver (libcuda.so.1): install one (nvidia-smi)"
    count = ctypes.c_int(0)
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status == _NO_DEVICE or (status == 0 and count.value == 0):
        return "the driver shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that a process with this environment sees, by number; none where there is no driver."""
    cuda = _driver()
    if cuda is None:
        return []
    count, found = ctypes.c_int(0), []
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        device, raw = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
        if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid_v2(raw, device):
            return []
        found.append(str(uuid.UUID(bytes=bytes(raw))))
    return found


def why_no_peers(numbers: list[int]) -> str:
    """Why instances on these GPUs cannot read each other's KV pages; "" where they can."""
    cuda = _driver()
    if cuda is None:
        return ""
    for one, other in itertools.permutations(numbers, 2):
        can = ctypes.c_int(0)
        if cuda.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) == 0 and not can.value:
            return (
                f"GPU {one} cannot read the memory of GPU {other} (`nvidia-smi topo -p2p r`), but instances read each "
                "other's KV pages; choose others by CUDA_VISIBLE_DEVICES, or leave out --prefill and --decode"
            )
    return ""


def _driver() -> ctypes.CDLL | None:
    """Ready to be asked."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


def torch_has_cuda() -> bool:
    """As torch's version file says; True where there is none to be read."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        try:
            found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*(.*)$", (Path(folder) / "version.py").read_text(), re.M)
        except (OSError, ValueError):
            continue
        if found:
            return found[1].strip() != "None"
    return True
