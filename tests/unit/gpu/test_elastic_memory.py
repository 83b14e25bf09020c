"""Memory of ranks that come and go, as rank 0 of two sees it. The driver is a fake one."""

from typing import Any

import pytest

from eprt.fd_desk import FdDesk
from eprt.gpu.driver import CudaError
from eprt.gpu.elastic_memory import ElasticMemory
from eprt.gpu.shared_allocation import SharedAllocation
from tests.gather_group import GatherGroup


class OneOfTwo(GatherGroup):
    """other: the process that is rank 1 by now."""

    def __init__(self, joins: bool = False):
        self.rank, self.size, self.node_of_rank, self.joins = 0, 2, (0, 0), joins
        self.desk = FdDesk()
        self.replace_other()

    def replace_other(self) -> None:
        self.other_desk = FdDesk()
        self.other = SharedAllocation(0, 4096)
        self.ticket = self.other_desk.offer(self.other.take_fd())

    def end_other(self) -> None:
        self.other_desk.close()
        self.other.close()

    def fd_desk(self) -> FdDesk:
        return self.desk

    def allgather(self, value: Any) -> list[Any]:
        where_the_gpu_is = isinstance(value, tuple) and len(value) == 3
        return [value, ("GPU-b", 0, 4096) if where_the_gpu_is else value]

    def lasting_allgather(self, value: Any) -> Any:
        return lambda rank: self.ticket if rank else value

    def barrier(self) -> None: ...

    def lost_ranks(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self.desk.close()


def test_a_lost_ranks_memory_is_let_go_and_its_successors_lies_at_its_address(fake):
    group = OneOfTwo()
    memory = ElasticMemory(group, 4096)
    own, there = memory.peer_ptr
    assert fake.inode_at(there) == fake.inode_at(group.other.address) != fake.inode_at(own)
    for _ in range(2):
        group.end_other()
        memory.remap([True, False])
        assert there not in fake.mapped, "memory of a process that has ended stays taken"
        group.replace_other()
        memory.remap([True, True])
        assert memory.peer_ptr == [own, there] and fake.inode_at(there) == fake.inode_at(group.other.address)
    group.other_desk.close()  # nothing is asked for where nothing has changed
    memory.remap([True, True])
    memory.close()
    group.other.close()
    assert fake.is_empty()
    group.close()


def test_a_rank_that_joins_maps_who_lives_and_the_others_once_they_take_part(fake):
    living = OneOfTwo(joins=True)
    memory = ElasticMemory(living, 4096)
    there = memory.peer_ptr[1]
    assert fake.inode_at(there) == fake.inode_at(living.other.address)
    memory.close()
    living.end_other()
    living.close()
    group = OneOfTwo(joins=True)
    group.end_other()
    memory = ElasticMemory(group, 4096)
    before = memory.peer_ptr
    assert before[1] not in fake.mapped and before[1] in fake.ranges
    group.replace_other()
    memory.remap([True, True])
    assert memory.peer_ptr == before and fake.inode_at(before[1]) == fake.inode_at(group.other.address)
    memory.close()
    group.end_other()
    assert fake.is_empty()
    group.close()


def test_a_rank_that_cannot_be_mapped_is_named_and_nothing_is_kept(fake):
    group = OneOfTwo()
    group.end_other()
    with pytest.raises(CudaError, match=r"^\[rank 0/2\] cannot map rank 1's GPU memory: "):
        ElasticMemory(group, 4096)
    assert fake.is_empty()
    group.close()
