"""Symmetric memory where a rank cannot take part: every rank is told, and none waits. The driver is a fake one."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eprt.gpu import driver, symmetric
from eprt.gpu.driver import CudaError
from eprt.gpu.symmetric import SymmetricMemory
from tests.emulated.device import ThreadGroup

OK = 0


class Driver:
    """Memory of all ranks: an address is (rank + 1) << 32. fails: calls that give an error on one rank."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUipcMemHandle = SimpleNamespace
    CUipcMem_flags = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=SimpleNamespace(value=1))

    def __init__(self, fails: str = "", on_rank: int = -1):
        self.here, self.live = threading.local(), set()
        self._fails, self._on_rank = fails, on_rank

    def _call(self, name: str, *values: Any) -> tuple:
        failed = name == self._fails and self.here.rank == self._on_rank
        return (2, *(0 for _ in values)) if failed else (OK, *values)

    def cuMemAlloc(self, num_bytes: int) -> tuple:
        result = self._call("cuMemAlloc", (self.here.rank + 1) << 32)
        if result[0] == OK:
            self.live.add(("own", self.here.rank))
        return result

    def cuMemsetD8(self, *args: Any) -> tuple:
        return self._call("cuMemsetD8")

    def cuIpcGetMemHandle(self, address: int) -> tuple:
        return self._call("cuIpcGetMemHandle", SimpleNamespace(reserved=str(address).encode()))

    def cuIpcOpenMemHandle(self, ipc: Any, flags: int) -> tuple:
        result = self._call("cuIpcOpenMemHandle", int(ipc.reserved) + self.here.rank)
        if result[0] == OK:
            self.live.add((self.here.rank, int(ipc.reserved) + self.here.rank))
        return result

    def cuIpcCloseMemHandle(self, address: int) -> tuple:
        self.live.remove((self.here.rank, address))
        return (OK,)

    def cuMemFree(self, address: int) -> tuple:
        assert not [mapping for mapping in self.live if mapping[1] & ~0xFFFF == address], "freed while mapped"
        self.live.remove(("own", self.here.rank))
        return (OK,)

    def cuGetErrorString(self, status: int) -> tuple:
        return OK, b"out of memory"


@pytest.fixture
def machine(monkeypatch):
    """Two ranks; rank r on device r of two that reach each other. Its fields may be changed."""
    machine = SimpleNamespace(driver=Driver(), uuids=["GPU-a", "GPU-b"], reach=True, sizes=[4096, 4096], nvlink=True)
    for module in (driver, symmetric):
        monkeypatch.setattr(module, "api", lambda: machine.driver)
    monkeypatch.setattr(symmetric, "connected_by_nvlink", lambda device, peer: machine.nvlink)
    zeros = torch.zeros
    for name, value in {
        "current_device": lambda: machine.driver.here.rank,
        "device_count": lambda: 2,
        "synchronize": lambda: None,
        "get_device_properties": lambda device: SimpleNamespace(uuid=machine.uuids[device]),
        "can_device_access_peer": lambda device, peer: machine.reach,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    return machine


def on_both(machine: Any, node_of_rank: tuple[int, int] = (0, 0), **options: bool) -> list[Any]:
    """What each rank gets: its memory, or what it raised. Whoever waits for ever is found by the barrier's timeout."""
    shared = SimpleNamespace(values=[None] * 2, barrier=threading.Barrier(2, timeout=100))
    got: list[Any] = [None, None]

    def run(rank: int) -> None:
        machine.driver.here.rank = rank
        group = ThreadGroup(rank, 2, shared)
        group.node_of_rank = node_of_rank
        try:
            got[rank] = SymmetricMemory(group, machine.sizes[rank], **options)
        except Exception as error:
            got[rank] = error
        else:
            peers = list(got[rank].peer_ptr)
            got[rank].close()
            got[rank].close()  # the second time nothing
            got[rank] = peers

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not machine.driver.live, "something was not given back"
    return got


def test_every_rank_has_its_own_and_a_mapping_of_the_others(machine):
    assert on_both(machine) == [[1 << 32, 2 << 32], [(1 << 32) + 1, 2 << 32]]


@pytest.mark.parametrize(
    "call, words",
    [
        ("cuMemAlloc", r"^\[rank 1/2\] 4096 B of symmetric GPU memory: out of memory"),
        ("cuMemsetD8", r"^\[rank 1/2\] clearing symmetric memory: out of memory"),
        ("cuIpcGetMemHandle", r"^\[rank 1/2\] exporting symmetric memory: out of memory"),
        ("cuIpcOpenMemHandle", r"^\[rank 1/2\] cannot map rank 0's GPU memory: .*peer access.*--ipc=host"),
    ],
)
def test_when_one_rank_fails_all_raise_its_error_and_none_waits(machine, call, words):
    machine.driver = Driver(call, on_rank=1)
    for error in on_both(machine):
        assert isinstance(error, CudaError), repr(error)
        with pytest.raises(CudaError, match=words):
            raise error


@pytest.mark.parametrize(
    "changed, nodes, words",
    [
        ({"reach": False}, (0, 0), r"GPU 0 \(GPU-a\) and rank 1's \(GPU-b\) have no peer access; see `nvidia-smi"),
        ({}, (0, 1), r"GPU 0 \(GPU-a\) and rank 1's \(GPU-b\) are on different nodes: no NVLink"),
        ({"uuids": ["GPU-a", "GPU-a"]}, (0, 0), r"and rank 1 share one GPU \(GPU-a\); give each rank its own"),
        ({"sizes": [4096, 8192]}, (0, 0), r"symmetric memory of 4096 B, but rank 1 asks for 8192 B"),
    ],
)
def test_gpus_out_of_reach_are_named_on_every_rank_before_anything_is_allocated(machine, changed, nodes, words):
    vars(machine).update(changed)
    machine.driver.cuMemAlloc = lambda num_bytes: pytest.fail("allocated")
    for error in on_both(machine, nodes):
        with pytest.raises(ValueError, match=rf"^\[rank 0/2\] .*{words}"):
            raise error


def test_ranks_share_a_gpu_where_they_are_told_that_they_may(machine, monkeypatch):
    machine.uuids, machine.reach = ["GPU-a", "GPU-a"], False
    monkeypatch.setenv("EPRT_RANKS_PER_GPU", "2")
    assert on_both(machine) == [[1 << 32, 2 << 32], [(1 << 32) + 1, 2 << 32]]


def test_gpus_without_nvlink_are_refused_where_lines_of_128_bytes_must_arrive_whole(machine):
    machine.nvlink = False
    assert on_both(machine) == [[1 << 32, 2 << 32], [(1 << 32) + 1, 2 << 32]]
    for error in on_both(machine, by_nvlink=True):
        with pytest.raises(ValueError, match=r"^\[rank 0/2\] GPU 0 .* rank 1's .* NVLink.*use mode='normal'"):
            raise error
