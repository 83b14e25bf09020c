"""WaitLog: the diagnosis log of a program that uses EPMoE, or bare backends, without eprt's server.

    backends = [backend for layer in layers for backend in layer.ep.values()]  # layers: the program's EPMoE
    with WaitLog("run/diagnose", group, backends) as log:
        for batch in batches:
            model(batch)
            log.step()

Then `eprt diagnose run/diagnose`, also while it runs. Every rank writes its own file, into a directory that all ranks
share, and asks nobody: windows end at the same step everywhere, because all ranks call the layers equally often.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from eprt.diagnostics import WindowRecord, WindowWriter
from eprt.ep.api import Backend
from eprt.ep.group.group import EPGroup
from eprt.ep.stats import EPStats

_log = logging.getLogger(__name__)


class WaitLog:
    """Construction is collective; ValueError for a window without steps.

    backends: those of all layers; one that layers share counts once. Their counts are reset with every window.
    steps_per_window: some ten seconds' worth; equal on all ranks.
    max_bytes: of a file, before it is rotated.
    """

    def __init__(
        self,
        directory: str | Path,
        group: EPGroup,
        backends: Iterable[Backend],
        steps_per_window: int = 500,
        max_bytes: int = 32 << 20,
    ):
        if steps_per_window < 1:
            raise ValueError(f"steps_per_window={steps_per_window}: must be at least 1")
        self._group, self._steps_per_window = group, steps_per_window
        self._backends = list({id(backend): backend for backend in backends}.values())
        self._writer = WindowWriter(directory, max_bytes)
        if group.rank == 0:
            self._writer.new_run(group.size, group.node_of_rank)
        group.barrier()
        self._window = max(group.allgather(self._writer.first_window))
        self._num_steps = 0
        self.latest: WindowRecord | None = None  # the line written last
        for backend in self._backends:
            backend.stats(reset=True)
        self._since_s = time.time()

    def step(self) -> None:
        """After each step of the program. Ends a window now and then; a disk that refuses stops nothing."""
        self._num_steps += 1
        if self._num_steps >= self._steps_per_window:
            self._end_window()

    def close(self) -> None:
        """Ends the last window, however short. Before the backends are closed."""
        if self._num_steps:
            self._end_window()

    def _end_window(self) -> None:
        counted = [stats for backend in self._backends if (stats := backend.stats(reset=True)) is not None]
        record = self._record(EPStats.total(counted)) if counted else None
        self._num_steps, self._window = 0, self._window + 1
        self._since_s = time.time() if record is None else record.t_end
        if record is None or not record.num_calls:  # nobody was waited for
            return
        self.latest = record
        try:
            self._writer.write(record)
        except OSError as error:
            _log.error("diagnosis: window %d cannot be written: %s", record.window, error)

    def _record(self, counted: EPStats) -> WindowRecord:
        group, now_s = self._group, time.time()
        return WindowRecord(
            window=self._window,
            t_start=min(self._since_s, now_s),
            t_end=now_s,
            rank=group.rank,
            num_ranks=group.size,
            node_of_rank=group.node_of_rank,
            num_calls=counted.num_calls,
            dispatch_wait_us=counted.dispatch_wait_us_N.tolist(),
            combine_wait_us=counted.combine_wait_us_N.tolist(),
            recv_tokens=counted.recv_tokens_N.tolist(),
            sent_tokens=counted.sent_tokens_N.tolist(),
            compute_us=counted.compute_us,
            blocked_us=counted.blocked_us,
        )

    def __enter__(self) -> "WaitLog":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()
