"""CaughtSignals: they wake, are counted, and are what they were before in the end."""

import contextlib
import os
import signal

from eprt.serve.ranks.caught_signals import STOPS, CaughtSignals

PATIENCE_S = 100.0


def test_signals_wake_and_are_counted():
    before = [signal.getsignal(number) for number in STOPS]
    with contextlib.closing(CaughtSignals()) as signals:
        for count, number in enumerate(STOPS, 1):
            os.kill(os.getpid(), number)
            assert signals.wait([], PATIENCE_S) == [] and len(signals.times_s) == count
        assert signals.wait([], 0.0) == [] and signals.times_s == sorted(signals.times_s)
    assert [signal.getsignal(number) for number in STOPS] == before


def test_sources_are_told():
    reader, writer = os.pipe()
    with contextlib.closing(CaughtSignals()) as signals:
        assert signals.wait([reader], 0.0) == []
        os.write(writer, b"x")
        assert signals.wait([reader], PATIENCE_S) == [reader]
    os.close(reader)
    os.close(writer)
