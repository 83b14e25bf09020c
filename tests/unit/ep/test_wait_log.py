"""WaitLog: windows of a program without a server end at equal steps, and a disk that refuses stops nothing."""

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from eprt.diagnostics import read_log

from eprt.ep.group.group import EPGroup
from eprt.ep.stats import EPStats
from eprt.ep.wait_log import WaitLog


class _Backend:
    """Counts one call of 5 us, with 7 tokens, per `call`."""

    def __init__(self, blocked: bool = True):
        self._blocked, self._num_calls = blocked, 3  # of before the log

    def call(self) -> None:
        self._num_calls += 1

    def stats(self, reset: bool = False) -> EPStats:
        n, one = self._num_calls, np.ones(1)
        self._num_calls = 0 if reset else n
        return EPStats(
            num_calls=n,
            dispatch_wait_us_N=5.0 * n * one,
            combine_wait_us_N=1.0 * n * one,
            recv_tokens_N=7 * n * one.astype(int),
            sent_tokens_N=7 * n * one.astype(int),
            compute_us=9.0 * n,
            blocked_us=6.0 * n if self._blocked else None,
        )


def test_windows_end_every_so_many_steps_and_what_is_left_is_the_last(tmp_path):
    backends = [_Backend(), _Backend()]
    for first in (0, 3):  # a second run goes on in the same directory
        with WaitLog(tmp_path, EPGroup.single(), [*backends, backends[0]], steps_per_window=4) as log:
            for _ in range(10):
                for backend in backends:
                    backend.call()
                log.step()
        records = read_log(tmp_path).records[first:]
        assert [(r.window, r.num_calls) for r in records] == [(first, 8), (first + 1, 8), (first + 2, 4)]
        assert records[0].dispatch_wait_us == (40.0,) and records[0].combine_wait_us == (8.0,)
        assert records[0].recv_tokens == records[0].sent_tokens == (56,)
        assert records[0].compute_us == 72.0 and records[0].blocked_us == 48.0
        assert all(a.t_end == b.t_start for a, b in itertools.pairwise(records)) and log.latest == records[-1]


def test_steps_without_calls_write_no_line_and_unknown_stays_unknown(tmp_path):
    backend = _Backend(blocked=False)
    with WaitLog(tmp_path, EPGroup.single(), [backend], steps_per_window=2) as log:
        log.step()
        log.step()
        backend.call()
        log.step()
    (record,) = read_log(tmp_path).records
    assert (record.window, record.num_calls, record.blocked_us) == (1, 1, None)


def test_a_full_disk_is_said_and_stops_nothing(tmp_path, caplog):
    backend: Any = _Backend()
    log = WaitLog(tmp_path, EPGroup.single(), [backend], steps_per_window=1)

    def refuse(record) -> None:
        raise OSError("no space left")

    log._writer = SimpleNamespace(write=refuse)  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        backend.call()
        log.step()
    assert "window 0 cannot be written: no space left" in caplog.text


def test_a_window_needs_steps(tmp_path):
    with pytest.raises(ValueError, match="steps_per_window=0: must be at least 1"):
        WaitLog(tmp_path, EPGroup.single(), [], steps_per_window=0)
