"""Memory of all ranks in a row of addresses, as one of three ranks sees it. The driver is a fake one."""

from typing import Any

import pytest

from eprt.fd_desk import FdDesk
from eprt.gpu.adjacent_memory import AdjacentGpuMemory
from eprt.gpu.driver import CudaError
from eprt.gpu.shared_allocation import SharedAllocation
from tests.gather_group import GatherGroup

SIZE, NUM_BYTES = 3, 8192


class OneOfThree(GatherGroup):
    """Whose ranks cannot be replaced, or can. The others' memory is there already."""

    def __init__(self, rank: int, elastic: bool = False):
        self.rank, self.size, self.node_of_rank = rank, SIZE, (0,) * SIZE
        self.desk = FdDesk()
        self._elastic = elastic
        self.others = {other: SharedAllocation(0, NUM_BYTES) for other in range(SIZE) if other != rank}
        self.tickets: dict[int, Any] = {rank: self.desk.offer(each.take_fd()) for rank, each in self.others.items()}

    def fd_desk(self) -> FdDesk | None:
        return self.desk if self._elastic else None

    def replace(self, rank: int) -> None:
        self.others[rank].close()
        self.others[rank] = SharedAllocation(0, NUM_BYTES)
        self.tickets[rank] = self.desk.offer(self.others[rank].take_fd())

    def allgather(self, value: Any) -> list[Any]:
        where_the_gpu_is = isinstance(value, tuple) and len(value) == 3
        return [(f"GPU-{rank}", 0, NUM_BYTES) if where_the_gpu_is else value for rank in range(SIZE)]

    def lasting_allgather(self, value: Any) -> Any:
        return lambda rank: value if rank == self.rank else self.tickets[rank]

    def barrier(self) -> None: ...

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        for each in self.others.values():
            each.close()
        self.desk.close()


@pytest.mark.parametrize("rank", range(SIZE))
def test_its_own_copy_is_first_and_the_others_follow_in_the_order_of_ranks(fake, rank):
    group = OneOfThree(rank)
    memory = AdjacentGpuMemory(group, NUM_BYTES, group.desk)
    begin = memory.peer_ptr[rank]
    for other in range(SIZE):
        place = memory.place_of(other)
        assert memory.peer_ptr[other] == begin + place * NUM_BYTES and place == (other - rank) % SIZE
        if other != rank:
            assert fake.inode_at(memory.peer_ptr[other]) == fake.inode_at(group.others[other].address)
    memory.close()
    group.close()
    assert fake.is_empty()


def test_a_lost_ranks_copy_goes_and_its_successors_comes_to_the_same_place(fake):
    group = OneOfThree(1, elastic=True)
    memory = AdjacentGpuMemory(group, NUM_BYTES)
    before = memory.peer_ptr
    memory.remap([True, True, False])
    assert before[2] not in fake.mapped and before[0] in fake.mapped
    group.replace(2)
    memory.remap([True, True, True])
    assert memory.peer_ptr == before and fake.inode_at(before[2]) == fake.inode_at(group.others[2].address)
    memory.close()
    group.close()
    assert fake.is_empty()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle"])
def test_what_fails_halfway_leaves_nothing(fake, call):
    group = OneOfThree(0)
    fake.fails = call
    with pytest.raises(CudaError, match="GPU memory: out of memory"):
        AdjacentGpuMemory(group, NUM_BYTES, group.desk)
    fake.fails = ""
    group.close()
    assert fake.is_empty()


def test_ranks_that_cannot_be_mapped_leave_nothing(fake):
    group = OneOfThree(0)
    fake.fails = "cuMemImportFromShareableHandle"
    with pytest.raises(CudaError, match=r"^\[rank 0/3\] cannot map rank 1's GPU memory: "):
        AdjacentGpuMemory(group, NUM_BYTES, group.desk)
    group.close()
    assert fake.is_empty()
