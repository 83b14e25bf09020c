"""Which device a rank computes on, and its arithmetic settings."""

import socket

import torch

from eprt.gpu.driver import api, check
from eprt.gpu.group import RankGroup


def take_device(kind: str, group: RankGroup) -> torch.device:
    """The device of this rank. Collective. A GPU becomes the current one.

    kind: "cpu"; "cuda": one of this host's GPUs, in turn by rank, or that of group.gpus; "auto": "cuda" if every rank
        has a GPU, else "cpu".
    ValueError, on all ranks, when kind is "cuda" and some rank has no GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    everyone = group.allgather((socket.gethostname(), torch.cuda.device_count() if torch.cuda.is_available() else 0))
    without = [rank for rank, (_, gpus) in enumerate(everyone) if not gpus]
    if without and kind == "auto":
        return torch.device("cpu")
    if without:
        raise ValueError(
            f"--device {kind}: rank {without[0]} on {everyone[without[0]][0]} has no NVIDIA GPU that torch "
            f"{torch.__version__} can use; install a CUDA build of torch and a driver (nvidia-smi), or use --device cpu"
        )
    host, gpus = everyone[group.rank]
    before = sum(name == host for name, _ in everyone[: group.rank])
    number = _number_of(group.gpus[group.rank]) if group.gpus else before % gpus
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    _forbid_lower_precision()
    return device


def _number_of(uuid: str) -> int:
    """Of a GPU that this process sees."""
    seen = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(f"--device cuda: this process does not see the GPU {uuid}; it sees {', '.join(seen)}")
    return seen.index(uuid)


def multiprocessors() -> int:
    """SMs of the current GPU. With more blocks a grid could deadlock: running ones wait for ones that cannot start."""
    return torch.cuda.get_device_properties().multi_processor_count


def connected_by_nvlink(device: int, peer: int) -> bool:
    """Whether two GPUs of this host reach each other by NVLink: only there are atomics native."""
    cu = api()
    attribute, what = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, "asking for NVLink"
    pair = (check(cu.cuDeviceGet(number), what) for number in (device, peer))
    return bool(check(cu.cuDeviceGetP2PAttribute(attribute, *pair), what))


def this_arch() -> str:
    """The architecture of the current GPU, with its own instructions where it has some: sm_80, sm_90a, sm_100a."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _forbid_lower_precision() -> None:
    """fp32 products stay in fp32, and partial sums are not rounded to bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
