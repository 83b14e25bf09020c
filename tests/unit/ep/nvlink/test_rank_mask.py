"""RankMask without a GPU: streams are stood in for by the processor's own order."""

import contextlib

import pytest
import torch

from eprt.ep.nvlink import rank_mask
from eprt.ep.nvlink.rank_mask import RankMask
from tests.emulated.device import HostWords


class StreamInOrder:
    def __init__(self, priority: int = 0):
        self.num_synchronized = 0

    def synchronize(self) -> None:
        self.num_synchronized += 1


@pytest.fixture
def mask(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(rank_mask.torch.cuda, "Stream", StreamInOrder)
    monkeypatch.setattr(rank_mask.torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(rank_mask.torch, "zeros", lambda *size, dtype, **_: zeros(*size, dtype=dtype))
    monkeypatch.setattr(rank_mask, "HostWords", HostWords)
    return RankMask(4)


def both(mask: RankMask) -> list[int]:
    assert list(mask.told.words) == mask.on_gpu.tolist()
    return mask.on_gpu.tolist()


def test_the_first_copy_is_made_before_a_kernel_can_wait(mask):
    assert vars(mask._stream)["num_synchronized"] == 1, "what the first copy needs is set up in time"
    assert both(mask) == [0, 0, 0, 0]


def test_all_or_some_are_written(mask):
    mask.write([True, False, True, False])
    assert both(mask) == [1, 0, 1, 0]
    mask.write([True], 1)
    assert both(mask) == [1, 1, 1, 0]


def test_one_or_all_are_taken_back(mask):
    mask.write([True, True, True, False])
    mask.take_back(1)
    assert both(mask) == [1, 0, 1, 0]
    mask.take_back()
    assert both(mask) == [0, 0, 0, 0]


def test_host_memory_is_written_before_the_copy_which_may_have_to_wait(mask, monkeypatch):
    seen = []
    monkeypatch.setattr(mask, "_copy", lambda masked, some: seen.append((list(mask.told.words), masked, some)))
    mask.write([True, True], 2)
    assert seen == [([0, 0, 1, 1], [True, True], slice(2, 4))]
