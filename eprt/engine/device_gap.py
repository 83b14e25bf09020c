"""DeviceGap: how long the GPU had nothing to do between two steps because the host was not ready with the next one.

CUDA events measure from the last kernel of a step's sampling to the first of the next step's forward pass. What the
next step copies to the GPU lies in between: on a GPU that is kept busy a gap is that copy alone.
"""

from collections import deque

import torch


class DeviceGap:
    """The gaps since the start. On the CPU nothing is measured."""

    def __init__(self, device: torch.device):
        self._timed = device.type == "cuda"
        self.num_gaps, self.total_s = 0, 0.0
        self.recent_s: deque[float] = deque(maxlen=4096)  # the latest gaps
        self._ended: torch.cuda.Event | None = None  # of the latest step
        self._gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()  # begin and end, not measured yet

    def begin_step(self) -> None:
        if self._timed and self._ended is not None:
            self._gaps.append((self._ended, _now()))

    def end_step(self) -> None:
        if self._timed:
            self._ended = _now()

    def ignore_pause(self) -> None:
        """No rank has anything to compute: the pause that follows is not the host's fault."""
        self._ended = None

    def collect(self) -> None:
        """Adds up the gaps that the GPU has passed by now."""
        while self._gaps and self._gaps[0][1].query():
            ended, begun = self._gaps.popleft()
            self.recent_s.append(ended.elapsed_time(begun) / 1e3)
            self.num_gaps += 1
            self.total_s += self.recent_s[-1]


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
