"""What the host reads of a kernel's wait: a word that changes is a wait that lasts, one that stays is over."""

import pytest

from eprt.ep.nvlink import waiting
from eprt.ep.nvlink.waiting import KernelWait


class Clock:
    """time.monotonic(), set by hand."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(waiting.time, "monotonic", lambda: self.now_s)


def word(code: int, peer: int, seconds: float) -> list[int]:
    value = code << 56 | peer << 48 | int(seconds * 1e9) >> 20
    return [value & 0xFFFFFFFF, value >> 32]


def test_a_word_that_changes_is_a_wait_that_lasts(monkeypatch):
    clock, words = Clock(monkeypatch), [0, 0]
    kernel = KernelWait(words)
    assert kernel.look() is None
    words[:] = word(2, 5, 0.27)
    wait = kernel.look()
    assert wait is not None and (wait.peer, wait.phase) == (5, "dispatch (tokens)")
    assert wait.since_s == pytest.approx(100 - 0.27, abs=0.01)
    clock.now_s += 0.5
    words[:] = word(2, 5, 0.81)
    wait = kernel.look()
    assert wait is not None and wait.since_s == pytest.approx(100.5 - 0.81, abs=0.01)


def test_a_word_that_stays_is_a_wait_that_is_over(monkeypatch):
    clock, words = Clock(monkeypatch), word(3, 1, 9.0)
    kernel = KernelWait(words)
    assert kernel.look() is None, "it was there before anybody looked"
    words[:] = word(3, 1, 9.3)
    first = kernel.look()
    assert first is not None and first.phase == "combine"
    clock.now_s += 0.3
    again = kernel.look()
    assert again is not None and again.since_s == pytest.approx(first.since_s)
    clock.now_s += 0.5
    assert kernel.look() is None
    words[:] = word(1, 2, 0.27)
    other = kernel.look()
    assert other is not None and (other.peer, other.phase) == (2, "dispatch (counts)")


def test_a_word_that_is_written_while_it_is_read_is_read_again(monkeypatch):
    Clock(monkeypatch)

    class Torn(list):
        """Changes its upper half once, between the two looks at it."""

        num_looks = 0

        def __getitem__(self, index):
            if index == 1:
                self.num_looks += 1
                if self.num_looks == 4:
                    self[:] = word(2, 7, 0.54)
            return super().__getitem__(index)

    words = Torn(word(2, 5, 0.27))
    kernel = KernelWait(words)
    words.num_looks = 2
    words[:] = word(2, 6, 0.27)
    wait = kernel.look()
    assert wait is not None and wait.peer == 7


def test_a_wait_for_a_tile_of_its_own_has_a_name_too(monkeypatch):
    Clock(monkeypatch)
    words = [0, 0]
    kernel = KernelWait(words)
    words[:] = word(4, 3, 0.3)
    wait = kernel.look()
    assert wait is not None and wait.phase == "a signal"
