"""Heartbeats: what a rank says that it is at, also while its main thread waits."""

import threading
import time
from typing import Any

from eprt.ep.group.current_wait import CurrentWait
from eprt.serve.ranks import heartbeat
from eprt.serve.ranks.channel import FrontendLostError
from eprt.serve.ranks.heartbeat import HeartbeatThread

PATIENCE_S = 60


class KeptChannel:
    """Keeps what is sent; then refuses, if it is told to."""

    def __init__(self, most: int = 1 << 30):
        self.sent: list[Any] = []
        self._most, self.enough = most, threading.Event()

    def send(self, message: Any) -> None:
        if len(self.sent) >= self._most:
            raise FrontendLostError("gone")
        self.sent.append(message)
        if len(self.sent) >= 3:
            self.enough.set()


def test_beats_tell_of_the_wait_the_call_and_how_long(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    channel: Any = KeptChannel()
    wait = CurrentWait(2, "dispatch", time.monotonic() - 5)
    with HeartbeatThread(channel, lambda: False, (lambda: None, lambda: wait)):
        assert channel.enough.wait(PATIENCE_S)
    first = channel.sent[0]
    assert (first.asleep, first.waits_for, first.call) == (False, 2, "dispatch") and first.waited_s >= 5
    assert [beat.cpu_s for beat in channel.sent] == sorted(beat.cpu_s for beat in channel.sent)
    num = len(channel.sent)
    time.sleep(0.01)
    assert len(channel.sent) == num, "closed"


def test_a_rank_that_sleeps_waits_for_nobody():
    channel: Any = KeptChannel()
    wait = CurrentWait(2, "dispatch", time.monotonic())
    with HeartbeatThread(channel, lambda: True, (lambda: wait,)) as thread:
        assert thread.beat().asleep and thread.beat().waits_for is None
    with HeartbeatThread(channel, lambda: False, (lambda: None,)) as thread:
        assert not thread.beat().asleep and thread.beat().waits_for is None


def test_the_thread_ends_with_the_frontend_and_does_more_with_each_beat(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    channel: Any = KeptChannel(most=2)
    beats: list[int] = []
    thread = HeartbeatThread(channel, lambda: True, (), lambda: beats.append(1))
    thread._thread.join(PATIENCE_S)
    assert not thread._thread.is_alive() and len(channel.sent) == len(beats) == 2
    thread.close()
