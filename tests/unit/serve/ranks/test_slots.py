"""RankSlots: processes by rank, what is known of their ends, and when lost ones are started again."""

import contextlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from eprt.ep.group.host_board import HostBoard
from eprt.serve.options import RankConfig
from eprt.serve.ranks import slots as slots_module
from eprt.serve.ranks.slots import AdoptedProcess, RankEnd, RankSlots

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def started():
    """Every process that a test has started; none outlives it."""
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def slots(monkeypatch, started):
    """Slots of three ranks, whose processes do as `slots.code` says."""
    with contextlib.closing(HostBoard.create(3)) as board:
        config = RankConfig(SimpleNamespace(), 0, 3, board.fd, "unix:x", "secret", 1)  # type: ignore[arg-type]
        made = RankSlots(config, board)
        made.board, made.code, made.configs = board, SLEEP, []  # type: ignore[attr-defined]

        def start(config: RankConfig) -> subprocess.Popen:
            made.configs.append(config)  # type: ignore[attr-defined]
            started.append(subprocess.Popen([sys.executable, "-c", made.code]))  # type: ignore[attr-defined]
            return started[-1]

        monkeypatch.setattr(slots_module, "start_rank", start)
        yield made


def reaped(slots: RankSlots) -> list:
    deadline_s = time.monotonic() + 60
    while not (ends := slots.reap()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return ends


def test_ends_are_told_once_with_how(slots, started):
    slots.start(0)
    slots.code = "raise SystemExit(3)"
    slots.start(1)
    (end,) = reaped(slots)
    assert str(end) == f"rank 1 (pid {started[1].pid}) ended: exit status 3"
    assert slots.pid_of_rank == {0: started[0].pid}
    assert slots.board.has_ended(1) and not slots.board.has_ended(0)
    slots.send_signal(signal.SIGKILL)
    (end,) = reaped(slots)
    assert str(end) == f"rank 0 (pid {started[0].pid}) ended: killed by signal 9"
    assert not slots.reap() and not slots.pid_of_rank


def test_a_process_of_another_shell_is_watched_by_its_pid(slots):
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as elsewhere:
        slots.board.mark_ended(2, True)
        slots.add_process(2, AdoptedProcess(elsewhere.pid))
        assert slots.pid_of_rank == {2: elsewhere.pid} and not slots.reap()
        assert not slots.board.has_ended(2)
        slots.send_signal(signal.SIGKILL)
        (end,) = reaped(slots)
        assert str(end) == f"rank 2 (pid {elsewhere.pid}) ended" and slots.board.has_ended(2)
    AdoptedProcess(elsewhere.pid).send_signal(signal.SIGTERM)  # to nobody


def test_a_lost_rank_is_started_again_as_a_joiner_when_its_time_has_come(slots, monkeypatch):
    slots.start(1)
    slots.send_signal(signal.SIGKILL)
    (end,) = reaped(slots)
    assert slots.plan_restart(end) == 1.0
    slots.restart_due()
    assert not slots.pid_of_rank
    now_s = time.monotonic() + 1.0
    monkeypatch.setattr(slots_module.time, "monotonic", lambda: now_s)
    slots.restart_due()
    slots.restart_due()
    assert [(config.rank, config.joins) for config in slots.configs] == [(1, False), (1, True)]


def test_the_delay_doubles_until_a_process_lasts(slots, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(slots_module.time, "monotonic", lambda: now_s)
    process = SimpleNamespace(pid=1, poll=lambda: 1)

    def lose() -> float:
        slots.add_process(0, process)
        slots.reap()
        return slots.plan_restart(RankEnd(0, 1, 1))

    assert [lose() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    slots.add_process(0, process)
    now_s += 61
    slots.reap()
    assert slots.plan_restart(RankEnd(0, 1, 1)) == 1


def test_who_joins_by_hand_cancels_the_restart(slots, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(slots_module.time, "monotonic", lambda: now_s)
    process = SimpleNamespace(pid=1, poll=lambda: None)
    slots.add_process(0, process)
    slots.plan_restart(RankEnd(0, 1, 1))
    slots.add_process(0, process)
    now_s += 100
    slots.restart_due()
    assert not slots.configs
