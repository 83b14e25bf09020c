"""Pages of several GPUs under one numbering: what a number leads to, on every rank. The GPUs' memory is not there."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from eprt.engine import team_pages
from eprt.engine.team_pages import TeamPages, agreed_pages
from eprt.ep.group.window import SharedWindow
from eprt.gpu.driver import CudaError
from eprt.ops.kv_format import KVFormat

UNIT = 1 << 21


class FakeMemory:
    """As AdjacentGpuMemory, all ranks' bytes in one row. fails: no GPU has room."""

    fails = False

    def __init__(self, group: Any, num_bytes: int, desk: Any):
        if self.fails:
            raise CudaError("out of memory")
        assert num_bytes % UNIT == 0
        self.num_bytes, self._group, self.remapped = num_bytes, group, []
        self.is_closed = False

    def place_of(self, rank: int) -> int:
        return (rank - self._group.rank) % self._group.size

    def row(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self._group.size * self.num_bytes // dtype.itemsize, dtype=dtype)

    def remap(self, alive: Any) -> None:
        self.remapped.append(alive)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(team_pages, "AdjacentGpuMemory", FakeMemory)
    monkeypatch.setattr(team_pages, "granularity", lambda device: UNIT)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def make(rank: int, size: int, page_size: int = 16, entry: KVFormat | None = None, **sizes: int) -> TeamPages:
        group: Any = SimpleNamespace(rank=rank, size=size, fd_desk=lambda: None)
        entry = entry or KVFormat(512, 64, torch.bfloat16)
        return TeamPages.on_gpus(sizes.get("num_layers", 3), sizes.get("num_pages", 11), page_size, entry, group)

    return make


@pytest.mark.parametrize("entry", [KVFormat(512, 64, torch.bfloat16), KVFormat(512, 64, torch.uint8)])
def test_a_page_is_the_same_memory_for_every_rank(made, entry):
    size = 3
    teams = [made(rank, size, entry=entry) for rank in range(size)]
    page_bytes = 16 * entry.width * entry.dtype.itemsize
    for owner in range(size):
        for layer in range(3):
            for page in (0, 7, 10):
                places = set()
                for rank, team in enumerate(teams):
                    (pages, memory), number = (team.layers[layer], team.memory), page + team.shift_N[owner]
                    at = pages.latents[number].data_ptr() - team.layers[0].latents.data_ptr()
                    copy, offset = divmod(at, memory.num_bytes)
                    places.add(((rank + copy) % size, offset))
                assert places == {(owner, (layer * 11 + page) * page_bytes)}
    for rank, team in enumerate(teams):
        assert team.first_page == team.shift_N[rank] == 0 and team.layers[0].padding_page == 10
        team.restart((True, False, True))
        assert team.memory.remapped == [(True, False, True)]
        team.close()
        assert team.memory.is_closed


def test_what_does_not_fit_names_the_flag(made):
    with patch.object(FakeMemory, "fails", True), pytest.raises(MemoryError, match="lower --kv-cache-gb if there is"):
        made(0, 2)
    with pytest.raises(ValueError, match=r"--prompt-ranks: the KV caches of 8 ranks have .* lower --kv-cache-gb"):
        made(0, 8, num_layers=61, num_pages=300_000)


def test_all_ranks_have_as_many_pages_and_one_that_joins_as_many_as_its_predecessor():
    kept = [np.zeros(8, dtype=np.uint8) for _ in range(3)]
    group: Any = SimpleNamespace(rank=1, size=3, joins=False, allgather=lambda value: [70, value, 80])
    group.local_ranks, group.lasting_window = (0, 1, 2), lambda num_bytes: SharedWindow(list(kept))
    assert agreed_pages(group, 75) == 70
    group.joins, group.allgather = True, lambda value: [71, value, 80]  # 71: of a rank that has joined, too
    assert agreed_pages(group, 75) == 70
