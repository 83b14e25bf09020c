"""Network cards of this machine: ports, speed, state, where they are beside the GPUs, bonds. Read from /sys alone.

Standard library only. Knows nothing of what is wrong (network_probe.py).
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

# How far a card is from a GPU, in the words of `nvidia-smi topo -m`, nearest first.
NEARNESS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_NVIDIA, _DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class PcieLink:
    """As sysfs writes it: current and largest speed (GT/s per lane) and width (lanes)."""

    gts: float
    width: int
    max_gts: float
    max_width: int

    @property
    def share(self) -> float:
        """Of what the card could have; 1 where nothing is lost."""
        return self.gts * self.width / (self.max_gts * self.max_width)


@dataclass(frozen=True)
class NetworkPort:
    """One port of a card, or one virtual function of it."""

    name: str  # mlx5_0/1 of an RDMA device and its port, else the interface's: eth0
    interfaces: tuple[str, ...]  # network interfaces of the card; () for plain InfiniBand
    kind: str  # "InfiniBand", "RoCE" or "Ethernet"
    is_up: bool
    state: str  # as the kernel writes it
    gbps: float | None  # Gbit/s; None where the driver does not tell
    model: str  # vendor and device id; ports of one model should have one speed
    address: str  # of the PCI function; "" for cards on no PCI bus
    numa_node: int | None
    is_virtual: bool  # an SR-IOV virtual function: its speed is what the host grants
    num_virtual: int  # virtual functions made of it
    pcie: PcieLink | None
    near: dict[str, str]  # GPU's PCI address -> nearness

    def nearest(self) -> str | None:
        """The best nearness to any GPU."""
        return min(self.near.values(), key=NEARNESS.index, default=None)


@dataclass(frozen=True)
class Bond:
    """Interfaces that act as one."""

    name: str
    mode: str
    uplinks: dict[str, tuple[bool, float | None]]  # interface -> whether it is up, Gbit/s


@dataclass(frozen=True)
class NetworkCards:
    """What `eprt env --json` prints of the network."""

    ports: tuple[NetworkPort, ...]
    bonds: tuple[Bond, ...]
    gpus: tuple[str, ...]  # PCI addresses of NVIDIA's, in order

    def to_json(self) -> dict:
        return asdict(self)


def read_network_cards(sys_root: str | Path = "/sys") -> NetworkCards:
    """Cards on a bus; not loopback, bridges and other interfaces that are only software, but bonds."""
    root = Path(sys_root)
    gpus = _gpus(root)
    ports = [port for folder in _folders(root / "class/infiniband") for port in _rdma_ports(folder, gpus)]
    with_rdma = {name for port in ports for name in port.interfaces}
    bonds = []
    for folder in _folders(root / "class/net"):
        if (folder / "bonding").is_dir():
            bonds.append(_bond(folder))
        elif (folder / "device").exists() and folder.name not in with_rdma:
            ports.append(_ethernet_port(folder, gpus))
    return NetworkCards(tuple(ports), tuple(bonds), tuple(gpus))


def nearness(device: Path, gpu: Path) -> str:
    """Of two PCI functions, by how much of their way from the root they share."""
    ours, theirs = _pci_way(device), _pci_way(gpu)
    shared = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    if shared > 1:  # a bridge under the host bridge, at least; then the bridges between it and either
        between = max(len(ours), len(theirs)) - shared - 1
        return "PIX" if between <= 1 else "PXB"
    if shared == 1:
        return "PHB"
    node = _numa_node(device)
    return "NODE" if node is not None and node == _numa_node(gpu) else "SYS"


def _pci_way(device: Path) -> list[str]:
    """Host bridge, bridges, function."""
    parts = device.resolve().parts
    first = next((i for i, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]+:[0-9a-f]+", part)), len(parts))
    return [*parts[first : first + 1], *(part for part in parts[first + 1 :] if _PCI_ADDRESS.fullmatch(part))]


def _gpus(root: Path) -> dict[str, Path]:
    devices = _folders(root / "bus/pci/devices")
    return {
        device.name: device
        for device in devices
        if _text(device / "vendor") == _NVIDIA and (_text(device / "class") or "").startswith(_DISPLAY_CLASSES)
    }


def _rdma_ports(folder: Path, gpus: dict[str, Path]) -> list[NetworkPort]:
    device = folder / "device"
    interfaces = tuple(each.name for each in _folders(device / "net"))
    ports = []
    for port in _folders(folder / "ports"):
        state, physical = _text(port / "state") or "", _text(port / "phys_state") or ""
        rate = re.match(r"[\d.]+", _text(port / "rate") or "")
        ports.append(
            NetworkPort(
                name=f"{folder.name}/{port.name}",
                interfaces=interfaces,
                kind="RoCE" if _text(port / "link_layer") == "Ethernet" else "InfiniBand",
                is_up="ACTIVE" in state,
                state=", ".join(part.partition(": ")[2] or part for part in (state, physical) if part),
                gbps=float(rate[0]) if rate else None,
                **_of_device(device, gpus),
            )
        )
    return ports


def _ethernet_port(folder: Path, gpus: dict[str, Path]) -> NetworkPort:
    is_up, gbps = _link(folder)
    return NetworkPort(
        name=folder.name,
        interfaces=(folder.name,),
        kind="Ethernet",
        is_up=is_up,
        state=_text(folder / "operstate") or "unknown",
        gbps=gbps,
        **_of_device(folder / "device", gpus),
    )


def _bond(folder: Path) -> Bond:
    names = (_text(folder / "bonding/slaves") or "").split()
    mode = (_text(folder / "bonding/mode") or "unknown").split()[0]
    return Bond(folder.name, mode, {name: _link(folder.parent / name) for name in names})


def _link(folder: Path) -> tuple[bool, float | None]:
    """Whether an interface has a link, and its speed. Reading either fails while the interface is down."""
    mbps = _integer(folder / "speed")
    return _text(folder / "carrier") == "1", mbps / 1000 if mbps and mbps > 0 else None


def _of_device(device: Path, gpus: dict[str, Path]) -> dict:
    """The fields of a NetworkPort that its PCI function decides."""
    way = _pci_way(device)
    return {
        "model": f"{_text(device / 'vendor') or '?'} {_text(device / 'device') or '?'}",
        "address": way[-1] if len(way) > 1 else "",
        "numa_node": _numa_node(device),
        "is_virtual": (device / "physfn").exists(),
        "num_virtual": _integer(device / "sriov_numvfs") or 0,
        "pcie": _pcie(device),
        "near": {address: nearness(device, gpu) for address, gpu in gpus.items()} if len(way) > 1 else {},
    }


def _pcie(device: Path) -> PcieLink | None:
    numbers = []
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        found = re.match(r"[\d.]+", _text(device / name) or "")
        if found is None or not float(found[0]):
            return None
        numbers.append(float(found[0]))
    gts, width, max_gts, max_width = numbers
    return PcieLink(gts, int(width), max_gts, int(max_width))


def _numa_node(device: Path) -> int | None:
    """None where the firmware tells none."""
    node = _integer(device / "numa_node")
    return node if node is not None and node >= 0 else None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted((each for each in path.iterdir() if each.is_dir()), key=lambda each: _natural(each.name))
    except OSError:
        return []


def _natural(name: str) -> list:
    """mlx5_10 after mlx5_9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name)]


def _integer(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
