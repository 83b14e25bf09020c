"""Network cards read from made-up /sys trees, and what is judged wrong with them."""

import dataclasses
from pathlib import Path

import pytest

from eprt import network_probe, probe
from eprt.network_cards import Bond, read_network_cards


class SysTree:
    """A /sys of cards on PCI: devices below bridges, with the links that the kernel makes."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, folder: Path, **values: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")
        return folder

    def link(self, at: Path, to: Path) -> None:
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(to)

    def pci(self, way: str, **values: object) -> Path:
        """way: pci0000:00/0000:00:01.0/0000:01:00.0"""
        folder = self.write(self.root / "devices" / way, **values)
        self.link(self.root / "bus/pci/devices" / folder.name, folder)
        return folder

    def gpu(self, way: str, numa: int = 0) -> None:
        self.pci(way, vendor="0x10de", **{"class": "0x030200"}, numa_node=numa)

    def rdma(self, name: str, way: str, *, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", numa=0, net="", **values):
        pcie = dict(current_link_speed="32.0 GT/s PCIe", max_link_speed="32.0 GT/s PCIe")
        pcie |= dict(current_link_width=16, max_link_width=16)
        device = self.pci(way, vendor="0x15b3", device="0x1021", numa_node=numa, **{**pcie, **values})
        folder = self.root / "class/infiniband" / name
        layer = "Ethernet" if net else "InfiniBand"
        phys = "5: LinkUp" if "ACTIVE" in state else "3: Disabled"
        self.write(folder / "ports/1", state=state, phys_state=phys, rate=rate, link_layer=layer)
        self.link(folder / "device", device)
        if net:
            self.net(net, device)

    def net(self, name: str, device: Path | None = None, *, mbps: object = 100_000, up: bool = True) -> Path:
        folder = self.write(self.root / "class/net" / name, carrier=int(up), operstate="up" if up else "down")
        self.write(folder, speed=mbps)
        if device is not None:
            self.link(folder / "device", device)
            (device / "net" / name).mkdir(parents=True)
        return folder


@pytest.fixture
def tree(tmp_path):
    return SysTree(tmp_path)


def problems(tree: SysTree) -> list[str]:
    return [what for what, _ in network_probe.find_problems(read_network_cards(tree.root))]


def test_a_machine_without_cards(tree):
    cards = read_network_cards(tree.root)
    assert (cards.ports, cards.bonds, cards.gpus) == ((), (), ())
    assert network_probe.summary(cards) == "no card on a bus" and problems(tree) == []
    tree.net("lo", mbps=-1)  # software only
    assert read_network_cards(tree.root).ports == ()


def test_cards_and_how_far_they_are_from_gpus(tree):
    tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0")
    tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    tree.rdma("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0")
    tree.rdma("mlx5_1", "pci0000:10/0000:10:02.0/0000:15:00.0", net="ens1np0")
    tree.rdma("mlx5_2", "pci0000:20/0000:20:01.0/0000:21:00.0")
    tree.rdma("mlx5_10", "pci0000:80/0000:80:01.0/0000:81:00.1", numa=1)
    tree.rdma("mlx5_11", "pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:02.0/0000:16:00.0/0000:17:00.0/0000:18:00.0")
    cards = read_network_cards(tree.root)
    assert [port.name for port in cards.ports] == ["mlx5_0/1", "mlx5_1/1", "mlx5_2/1", "mlx5_10/1", "mlx5_11/1"]
    first, second = "0000:13:00.0", "0000:81:00.0"
    assert cards.gpus == (first, second)
    assert [port.near[first] for port in cards.ports] == ["PIX", "PHB", "NODE", "SYS", "PXB"]
    assert [port.near[second] for port in cards.ports] == ["SYS", "SYS", "SYS", "PIX", "SYS"]
    assert [port.kind for port in cards.ports[:3]] == ["InfiniBand", "RoCE", "InfiniBand"]
    assert {port.gbps for port in cards.ports} == {400.0} and all(port.is_up for port in cards.ports)
    assert cards.ports[1].interfaces == ("ens1np0",) and cards.ports[0].address == "0000:14:00.0"
    assert network_probe.summary(cards).split("; ")[1] == ("mlx5_1/1 RoCE 400 Gbit/s up, ens1np0, NUMA 0, GPU 0 PHB")
    assert network_probe.summary(cards).split("; ")[3] == "mlx5_10/1 InfiniBand 400 Gbit/s up, NUMA 1, GPU 1 PIX"
    assert problems(tree) == []
    shown = probe.network(cards)
    assert shown.name == "network" and shown.facts["ports"][0]["near"][first] == "PIX" and shown.problems == ()


def test_ports_that_are_down_or_slow(tree):
    tree.rdma("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0")
    tree.rdma("mlx5_1", "pci0000:10/0000:10:02.0/0000:12:00.0", state="1: DOWN", rate="10 Gb/sec (4X SDR)")
    tree.rdma("mlx5_2", "pci0000:10/0000:10:03.0/0000:13:00.0", rate="200 Gb/sec (4X HDR)")
    assert problems(tree) == [
        "port mlx5_1/1 is down (DOWN, Disabled), while mlx5_0/1, mlx5_2/1 of the same model are up",
        "port mlx5_2/1 runs at 200 Gbit/s, 50% of the fastest port of its model here",
    ]
    assert network_probe.slower_ports(read_network_cards(tree.root)) == {"mlx5_2/1": 0.5}
    (first, _) = probe.network(read_network_cards(tree.root)).problems
    assert "ibstat" in first.remedy and not first.fatal


def test_an_unused_port_of_another_model_is_no_problem(tree):
    tree.rdma("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0")
    onboard = tree.pci("pci0000:00/0000:00:1f.6", vendor="0x8086", device="0x1563", numa_node=-1)
    tree.net("eno1", onboard, up=False, mbps=-1)
    port = read_network_cards(tree.root).ports[1]
    assert (port.name, port.is_up, port.gbps, port.numa_node, port.state) == ("eno1", False, None, None, "down")
    assert problems(tree) == []


def test_a_pcie_link_that_is_narrower_than_it_could_be(tree):
    tree.rdma("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0", current_link_width=8)
    link = read_network_cards(tree.root).ports[0].pcie
    assert link is not None and link.share == 0.5
    assert problems(tree) == ["port mlx5_0/1 has PCIe 32 GT/s x8 and could have 32 GT/s x16"]
    slow = tree.pci(
        "pci0000:00/0000:00:1c.0/0000:02:00.0",
        vendor="0x8086",
        device="0x1533",
        current_link_speed="2.5 GT/s PCIe",
        max_link_speed="5.0 GT/s PCIe",
        current_link_width=1,
        max_link_width=1,
    )
    tree.net("eno1", slow, mbps=1000)
    assert len(problems(tree)) == 1  # a management port


def test_both_uplinks_of_a_bond(tree):
    for i, name in enumerate(("ens1f0", "ens1f1")):
        device = tree.pci(f"pci0000:10/0000:10:01.0/0000:11:00.{i}", vendor="0x15b3", device="0x101d", numa_node=0)
        tree.net(name, device)
    bond = tree.net("bond0")
    tree.write(bond / "bonding", slaves="ens1f0 ens1f1", mode="802.3ad 4")
    cards = read_network_cards(tree.root)
    assert cards.bonds == (Bond("bond0", "802.3ad", {"ens1f0": (True, 100.0), "ens1f1": (True, 100.0)}),)
    assert "bond0: 2 of 2 uplinks up (802.3ad)" in network_probe.summary(cards) and problems(tree) == []
    tree.write(tree.root / "class/net/ens1f1", speed=25_000)
    assert problems(tree)[-1] == "the uplinks of bond0 have different speeds: ens1f0 100, ens1f1 25 Gbit/s"
    tree.write(tree.root / "class/net/ens1f1", carrier=0, operstate="down", speed=-1)
    assert problems(tree) == [
        "port ens1f1 is down (down), while ens1f0 of the same model are up",
        "uplink ens1f1 of bond0 is down",
    ]
    tree.write(bond / "bonding", slaves="")
    assert problems(tree)[-1] == "bond bond0 has no uplink"


def test_virtual_functions(tree):
    tree.rdma("mlx5_0", "pci0000:10/0000:10:01.0/0000:11:00.0", sriov_numvfs=2)
    tree.rdma("mlx5_4", "pci0000:10/0000:10:01.0/0000:11:00.1", rate="100 Gb/sec (2X HDR)", current_link_width=8)
    device = tree.root / "devices/pci0000:10/0000:10:01.0/0000:11:00.1"
    tree.link(device / "physfn", device.parent / "0000:11:00.0")
    physical, virtual = read_network_cards(tree.root).ports
    assert (physical.num_virtual, physical.is_virtual, virtual.is_virtual) == (2, False, True)
    said = network_probe.summary(read_network_cards(tree.root))
    assert "mlx5_0/1 InfiniBand 400 Gbit/s up, NUMA 0, 2 virtual functions; mlx5_4/1" in said
    assert said.endswith("NUMA 0, virtual function")


def test_gpus_without_a_near_card(tree):
    tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    tree.rdma("mlx5_0", "pci0000:10/0000:10:02.0/0000:12:00.0")
    assert problems(tree) == ["every fast card is on another NUMA node than GPU 1"]
    assert dataclasses.asdict(read_network_cards(tree.root))["gpus"] == ("0000:11:00.0", "0000:81:00.0")
