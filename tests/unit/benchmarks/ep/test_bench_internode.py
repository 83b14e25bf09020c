"""bench_internode: what it refuses, the model beside counted bytes, the needs of NVSHMEM, and who is blamed."""

import json
import struct
from pathlib import Path

import pytest

from benchmarks.ep import bench_internode
from benchmarks.ep.bench_internode import PACED, main
from benchmarks.ep.internode_model import InternodeCase, card_leg
from benchmarks.ep.internode_needs import has_relaxed_ordering, nvshmem_needs
from benchmarks.ep.wire_ranks import describe_loss
from eprt.cluster.crossings import ExpertChoice
from eprt.ep.wire.options import WireOptions


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--wire", "verbs"], "wire 'verbs': must be one of tcp, paced"),
        (["--wire", "paced", "--nnodes", "2"], "--wire paced is memory of one host; leave out --nnodes, or write"),
        (["--wire", "tcp", "--nnodes", "2"], "--nnodes: give --dist-init-addr HOST:PORT"),
        (["--wire", "tcp", "--nnodes", "2", "--node-rank", "2"], "--node-rank 2: must be in 0..1"),
        (["--nodes", "1"], "--nodes 1: at least 2"),
        (["--nodes", "3"], "--nodes 3: at least 2, and --experts 256 a multiple of 3 ranks"),
        (["--top-k", "300"], "--top-k 300"),
        (["--calls", "0"], "--calls 0: must be at least 1"),
    ],
)
def test_wrong_use_is_one_line(flags, message, capfd):
    assert main(flags) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("bench_internode: ") and message in line


def test_off_loopback_a_key_is_demanded(capfd, monkeypatch):
    monkeypatch.delenv("EPRT_GROUP_KEY", raising=False)
    assert main(["--wire", "tcp", "--nnodes", "2", "--dist-init-addr", "192.0.2.1:7000"]) == 2
    assert "set EPRT_GROUP_KEY to the same secret" in capfd.readouterr().err


def test_the_bytes_that_cross_are_the_planners(tmp_path, capfd):
    """On two virtual nodes, for tokens without scales; headers take the rest."""
    small = ["--wire", "paced", "--nodes", "2", "--tokens", "64", "--hidden", "512", "--experts", "16", "--calls", "2"]
    assert main([*small, "--top-k", "2", "--json", str(tmp_path)]) == 0, capfd.readouterr().err
    (row,) = json.loads((tmp_path / "internode_paced.json").read_text())["rows"]
    # Tokens are drawn: of 2 ranks x 2 calls x 64 tokens 77 % go to the other node, with a deviation of 4 %.
    assert row["sent_kB"] == pytest.approx(row["model_kB"], rel=0.2)
    # The pace is kept; how much longer the CPUs take is no matter here.
    assert row["dispatch_ms"] + row["combine_ms"] > 0.8 * row["card_ms"] and row["to_card"] > row["to_model"]


def test_the_model_is_the_planners():
    case = InternodeCase(4, ExpertChoice(256, 8), tokens=128, hidden=7168)
    assert case.sent_tokens == pytest.approx(128 * 2.711, rel=1e-3)
    leg = card_leg(WireOptions.from_text(PACED), None)
    assert leg is not None and leg.us(case.bytes_each_way) == pytest.approx(50 + case.bytes_each_way / 100)
    assert card_leg(WireOptions(), None) is None and card_leg(WireOptions.from_text("paced"), None) is None
    tcp = card_leg(WireOptions(), 2.0)
    assert tcp is not None and tcp.us(2000) == 1.0


WAITS = {"error": "[rank 0/3] waited 10.0 s for rank 1 in dispatch between nodes", "peer": 1}


@pytest.mark.parametrize(
    "said, hung, told",
    [
        ({0: WAITS}, [1], f"rank 1 hung: {WAITS['error']}"),
        ({0: WAITS, 2: {"error": "rank 2 waited for 0", "peer": 0}}, [1], f"rank 1 hung: {WAITS['error']}"),
        (
            {0: WAITS, 1: {"error": "rank 1 ended: killed by signal 9", "rank": 1}},
            [],
            "rank 1 ended: killed by signal 9; ",
        ),
        ({0: {"error": "cannot reach 10.0.0.1:1"}}, [], "cannot reach 10.0.0.1:1"),
    ],
)
def test_who_is_blamed(said, hung, told):
    assert describe_loss(said, hung).startswith(told)


# -- what NVSHMEM needs --


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A made-up host that has everything."""
    files = {
        "proc/driver/nvidia/version": "NVRM version: 570.1\nGCC",
        "proc/driver/nvidia/params": 'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    device = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    port = device / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}.items():
        (port / name).write_text(text)
    (device / "vendor").write_text("0x15b3")
    (device / "device").write_text("0x1021")
    config = bytearray(256)
    config[0x34], config[0x40:0x42], config[0x60] = (
        0x40,
        bytes((0x01, 0x60)),
        0x10,
    )  # power management, then PCI Express
    struct.pack_into("<H", config, 0x68, 1 << 4)
    (device / "config").write_bytes(config)
    for link, target in {
        "sys/class/infiniband/mlx5_0": device / "infiniband/mlx5_0",
        "sys/bus/pci/devices/0000:00:01.0": device,
        "sys/devices/pci0000:00/0000:00:01.0/infiniband/mlx5_0/device": device,
    }.items():
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(target)
    return tmp_path


def needs(host: Path, version: str | None = "3.4.5") -> dict[str, str]:
    return {need.name: need.found for need in nvshmem_needs(host, lambda name: version)}


def test_a_host_that_has_everything(host, monkeypatch, capfd):
    assert all(needs(host).values()), needs(host)
    assert needs(host)["network card with RDMA"] == "mlx5_0/1" == needs(host)["relaxed ordering of the card"]
    found = nvshmem_needs(host, lambda name: "3.4.5")
    monkeypatch.setattr(bench_internode, "nvshmem_needs", lambda: found)
    assert main(["--wire", "nvshmem"]) == 2
    assert "all is there; this program measures CPU ranks only" in capfd.readouterr().err


@pytest.mark.parametrize(
    "path, name",
    [
        ("proc/driver/nvidia/version", "NVIDIA driver"),
        ("proc/driver/nvidia/params", "queues that the GPU drives (IBGDA)"),
        ("sys/devices/pci0000:00/0000:00:01.0/config", "relaxed ordering of the card"),
    ],
)
def test_what_is_missing_is_told(host, path, name, monkeypatch, capfd):
    (host / path).unlink()
    missing = [need for need, found in needs(host).items() if not found]
    assert missing == [name]
    found = nvshmem_needs(host, lambda name: "3.4.5")
    monkeypatch.setattr(bench_internode, "nvshmem_needs", lambda: found)
    assert main(["--wire", "nvshmem"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"bench_internode: --wire nvshmem: {name} is missing: ")


def test_relaxed_ordering_that_is_off_or_cannot_be_read(host):
    path = host / "sys/devices/pci0000:00/0000:00:01.0/config"
    config = bytearray(path.read_bytes())
    config[0x68] = 0
    path.write_bytes(config)
    assert not has_relaxed_ordering(host, "0000:00:01.0")
    path.write_bytes(config[:64])  # as users who are not root see it
    assert not has_relaxed_ordering(host, "0000:00:01.0")
    config[0x61] = 0x40  # a circle
    config[0x60] = 0x05
    path.write_bytes(config)
    assert not has_relaxed_ordering(host, "0000:00:01.0")


def test_no_nvshmem(host):
    assert not needs(host, None)["NVSHMEM"] and needs(host, "3.4.5")["NVSHMEM"].startswith("nvidia-nvshmem-cu13 3.4.5")
