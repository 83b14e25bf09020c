"""What NVSHMEM needs of a host before it can move tokens between nodes: driver, network card, settings, libraries.

Reads /proc, /sys, /dev and the list of installed packages; starts nothing. Knows nothing of what is measured.
"""

import importlib.metadata
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eprt.network_cards import NetworkPort, read_network_cards

_WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_PCI_EXPRESS = 0x10  # id of a PCI capability
_RELAXED_ORDERING = 1 << 4  # of its device control


@dataclass(frozen=True)
class Need:
    """One thing that was looked for."""

    name: str
    found: str  # in words; "" where it is missing
    remedy: str  # where it is missing


def nvshmem_needs(root: str | Path = "/", version_of: Callable[[str], str | None] | None = None) -> list[Need]:
    """All, in the order in which they are best mended.

    root: of /proc, /sys and /dev. version_of: an installed package's version.
    """
    base = Path(root)
    ports = [port for port in read_network_cards(base / "sys").ports if port.kind != "Ethernet"]
    up = [port for port in ports if port.is_up]
    return [
        Need("NVIDIA driver", _driver(base), "install one (nvidia-smi)"),
        Need(
            "network card with RDMA",
            ", ".join(port.name for port in up),
            f"{ports[0].name} is {ports[0].state}: see `eprt env`" if ports else "this host has none in /sys",
        ),
        Need(
            "GPU memory for the card",
            _peer_memory(base),
            "load nvidia_peermem (modprobe nvidia_peermem) or gdrdrv, or take a driver with dma-buf",
        ),
        Need(
            "queues that the GPU drives (IBGDA)",
            _peer_mapping(base),
            'options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;", then load the '
            "driver anew",
        ),
        Need("relaxed ordering of the card", _relaxed_ordering(base, up), "set PCI_WR_ORDERING with mlxconfig, reboot"),
        Need("NVSHMEM", _nvshmem(version_of or _installed), "pip install nvidia-nvshmem-cu13, or -cu12"),
    ]


def _driver(base: Path) -> str:
    """Its version line."""
    return _read(base / "proc/driver/nvidia/version").partition("\n")[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _peer_memory(base: Path) -> str:
    modules = [name for name in ("nvidia_peermem", "gdrdrv") if (base / "sys/module" / name).is_dir()]
    if (base / "dev/gdrdrv").exists() and "gdrdrv" not in modules:
        modules.append("gdrdrv")
    return ", ".join(modules)


def _peer_mapping(base: Path) -> str:
    wanted = ("EnableStreamMemOPs: 1", "PeerMappingOverride=1")
    params = _read(base / "proc/driver/nvidia/params")
    return ", ".join(wanted) if all(each in params for each in wanted) else ""


def _relaxed_ordering(base: Path, ports: list[NetworkPort]) -> str:
    """Cards whose device control lets their writes overtake each other."""
    with_it = [port.name for port in ports if port.address and has_relaxed_ordering(base, port.address)]
    return ", ".join(with_it) if ports and len(with_it) == len([port for port in ports if port.address]) else ""


def has_relaxed_ordering(base: Path, address: str) -> bool:
    """False also where the configuration cannot be read, as without being root."""
    try:
        config = (base / "sys/bus/pci/devices" / address / "config").read_bytes()
    except OSError:
        return False
    at, seen = (config[0x34] if len(config) > 0x34 else 0), set()
    while at and at not in seen and at + 10 <= len(config):
        seen.add(at)
        if config[at] == _PCI_EXPRESS:
            return bool(struct.unpack_from("<H", config, at + 8)[0] & _RELAXED_ORDERING)
        at = config[at + 1]
    return False


def _nvshmem(version_of: Callable[[str], str | None]) -> str:
    return ", ".join(f"{name} {version}" for name in _WHEELS if (version := version_of(name)))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
