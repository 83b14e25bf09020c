"""Which device a rank computes on, and how exactly."""

import socket
from typing import Any, Protocol

import torch


class Group(Protocol):
    """What is asked of an EPGroup."""

    rank: int
    size: int

    def allgather(self, value: Any) -> list[Any]: ...


def take_device(kind: str, group: Group) -> torch.device:
    """The CPU for "cpu". For "cuda" one of this host's GPUs, in turn by rank, made current. Collective.

    "auto": a GPU where every rank has one. ValueError, on all ranks, where GPUs are asked for and some rank has none.
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
    device = torch.device("cuda", before % gpus)
    torch.cuda.set_device(device)
    _be_exact()
    return device


def multiprocessors() -> int:
    """Of the current GPU. A grid of more thread blocks could wait for itself: for those that have no room to begin."""
    return torch.cuda.get_device_properties().multi_processor_count


def this_arch() -> str:
    """The architecture of the current GPU, with its own instructions where it has some: sm_80, sm_90a, sm_100a."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _be_exact() -> None:
    """fp32 products in fp32, and no bf16 in the middle of a sum: both are torch's to round otherwise."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
