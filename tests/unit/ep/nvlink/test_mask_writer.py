"""MaskWriter without a GPU: streams are stood in for by the processor's own order."""

import contextlib

import pytest
import torch

from eprt.ep.nvlink import mask_writer
from eprt.ep.nvlink.mask_writer import MaskWriter


class StreamInOrder:
    def __init__(self, priority: int = 0):
        self.num_synchronized = 0

    def synchronize(self) -> None:
        self.num_synchronized += 1


@pytest.fixture
def mask(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(mask_writer.torch.cuda, "Stream", StreamInOrder)
    monkeypatch.setattr(mask_writer.torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(mask_writer.torch, "zeros", lambda *size, pin_memory, **kwargs: zeros(*size, **kwargs))
    return zeros(4, dtype=torch.int32)


def test_the_first_copy_is_made_before_a_kernel_can_wait(mask):
    writer = MaskWriter(mask)
    assert vars(writer._stream)["num_synchronized"] == 1, "what the first copy needs is set up in time"
    assert mask.tolist() == [0, 0, 0, 0]


def test_all_or_some_are_written(mask):
    writer = MaskWriter(mask)
    writer.write([True, False, True, False])
    assert mask.tolist() == [1, 0, 1, 0]
    writer.write([True], 1)
    assert mask.tolist() == [1, 1, 1, 0]
