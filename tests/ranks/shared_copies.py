"""Memory of experts that all ranks of a node can read, and copies that take their time: for CPU ranks, what
PeerTransport asks of GPUs. The transport and the state machine above it are those of GPUs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eprt.engine.engine import Engine
from eprt.ep.group.group import EPGroup
from eprt.ep.migration.pace import Pace
from eprt.ep.migration.peer import Fetch, PeerTransport
from eprt.layers.experts import ExpertPool
from eprt.ops.checksum import add_checksum
from eprt.ops.weight import Weight

POLLS = 3  # until what was asked for has been done


class LazyWork:
    """Done only when it has been asked about a few times: nothing may rely on it before."""

    def __init__(self, copy: Callable[[], None], parts: Sequence[Tensor]):
        self._copy, self._parts, self._left = copy, parts, POLLS
        self._total = torch.zeros(1, dtype=torch.int64)

    def is_done(self) -> bool:
        if self._left:
            self._left -= 1
            if not self._left:
                self._copy()
                self._sum_up()
        return not self._left

    def _sum_up(self) -> None:
        first = 0
        for part in self._parts:
            add_checksum(part, self._total, first)
            first += len(part)

    def checksum(self) -> int:
        assert not self._left
        return int(self._total)

    def seconds(self) -> float:
        assert not self._left
        return 1e-5


class SharedCopies:
    """Collective. Moves the pools into shared memory. damage: called with what has just been fetched."""

    def __init__(self, group: EPGroup, pools: Sequence[ExpertPool]):
        self._local_ranks, self._windows, self._everyones = group.local_ranks, [], []
        self.damage: Callable[[Sequence[Fetch]], None] = lambda fetches: None
        for pool in pools:
            pool.w13, pool.w2 = (
                Weight(self._share(group, stack.data), None if stack.scale is None else self._share(group, stack.scale))
                for stack in (pool.w13, pool.w2)
            )
            stacks = (pool.w13.data, pool.w13.scale, pool.w2.data, pool.w2.scale)
            pool.parts = [s.view(len(s), -1).view(torch.uint8) for s in stacks if s is not None]

    def _share(self, group: EPGroup, stack: Tensor) -> Tensor:
        window = group.shared_window(stack.numel() * stack.element_size())
        segments = [torch.from_numpy(segment)[: stack.numel() * stack.element_size()] for segment in window.segments]
        own = segments[group.local_ranks.index(group.rank)].view(stack.dtype).view(stack.shape)
        own.copy_(stack)
        self._windows.append(window)
        self._everyones.append(segments)
        return own

    def sum_up(self, parts: Sequence[Tensor]) -> LazyWork:
        return LazyWork(lambda: None, parts)

    def fetch(self, fetches: Sequence[Fetch]) -> LazyWork:
        def copy() -> None:
            for to, rank, tensor, offset in fetches:
                there = self._everyones[tensor][self._local_ranks.index(rank)]
                to.copy_(there[offset : offset + len(to)])
            self.damage(fetches)

        return LazyWork(copy, [fetch.to for fetch in fetches])

    def close(self) -> None:
        """The windows go with the group: the model still reads its weights there."""


def share_experts(engine: Engine) -> SharedCopies:
    """From now on the engine's experts travel as between GPUs. Collective, before the first migration."""
    group, migrator = engine.group, engine.migrator
    assert migrator is not None
    pools = list({id(layer.pool): layer.pool for layer in engine.model.moe_layers()}.values())
    copies = SharedCopies(group, pools)
    migrator._transport.close()
    migrator._transport = PeerTransport(group, pools, copies, 64 << 20)
    migrator._pace = Pace(min_bytes=migrator._transport.min_chunk_bytes, max_bytes=64 << 20)
    return copies
