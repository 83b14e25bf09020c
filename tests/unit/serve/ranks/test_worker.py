"""What a rank's loop owes to signals, which come between any two of its instructions."""

import sys

import numpy as np
import pytest
import torch

from eprt.serve.ranks.messages import Drain
from eprt.serve.ranks.worker import Worker, _describe


class _Channel:
    def __init__(self):
        self.stop_reasons: list[str] = ["SIGTERM"]
        self.sent: list[Drain] = []

    def send(self, message: Drain) -> None:
        self.sent.append(message)


def _told_with_a_signal_at(instruction: int) -> tuple[list[str], bool]:
    """What the frontend hears of in two rounds, and whether the second signal came in the first of them."""
    channel = _Channel()
    worker = Worker(engine=None, channel=channel, window_s=1)  # type: ignore[arg-type]
    left = instruction

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not Worker._handle_messages.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                channel.stop_reasons.append("SIGINT")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        worker._handle_messages([])
    finally:
        sys.settrace(before)
    worker._handle_messages([])
    return [message.reason for message in channel.sent], left <= 0


def test_no_signal_is_lost_whenever_it_comes():
    instruction, came = 1, True
    while True:
        told, came = _told_with_a_signal_at(instruction)
        if not came:
            break
        assert told == ["SIGTERM", "SIGINT"], f"SIGINT at instruction {instruction}"
        instruction += 1
    assert instruction > 10, "nothing was traced: the test proves nothing"


@pytest.mark.parametrize("take", [lambda: torch.empty(1 << 55), lambda: np.empty(1 << 55)], ids=["torch", "numpy"])
def test_memory_that_is_not_there_is_one_line_with_the_flags(take):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        take()
    told = _describe(caught.value)
    assert "\n" not in told and "llocate" in told and "lower --chunk-size, " in told, told
    assert _describe(MemoryError("lower --kv-cache-gb")) == "lower --kv-cache-gb"
    assert _describe(torch.OutOfMemoryError("CUDA out of memory. Tried")).startswith("CUDA out of memory. Tried; take")
    assert "RuntimeError: a defect" in _describe(RuntimeError("a defect"))
