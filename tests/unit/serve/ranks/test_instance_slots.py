"""InstanceSlots: each instance's processes know whose they are, and a lost instance is started again whole."""

import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from eprt.serve.options import RankConfig
from eprt.serve.ranks import instance_slots as module
from eprt.serve.ranks import slots as slots_module
from eprt.serve.ranks.instance_slots import InstanceSlots
from eprt.serve.ranks.slots import AdoptedProcess

PLAN = [("prefill-0", "prefill", 2), ("decode-0", "decode", 1)]


@pytest.fixture
def started(monkeypatch):
    """(configuration, process) of every rank that was started."""
    made: list[tuple[RankConfig, subprocess.Popen]] = []

    def start(config: RankConfig) -> subprocess.Popen:
        made.append((config, subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])))
        return made[-1][1]

    monkeypatch.setattr(slots_module, "start_rank", start)
    yield made
    for _, process in made:
        process.kill()
        process.wait()


def make_slots(gpus: tuple[str, ...] = ()) -> InstanceSlots:
    options = SimpleNamespace(instance_plan=PLAN)
    slots = InstanceSlots(RankConfig(options, 0, 3, -1, "unix:x", "secret", 1), gpus)  # type: ignore[arg-type]
    slots.start_all()
    return slots


def reap(slots: InstanceSlots, count: int) -> list:
    ends, deadline_s = [], time.monotonic() + 60
    while len(ends) < count:
        ends += slots.reap()
        assert time.monotonic() < deadline_s
    return ends


def test_each_rank_knows_its_instance_its_place_and_the_host(started):
    slots = make_slots()
    configs = [config for config, _ in started]
    assert [(c.instance.name, c.instance.role, c.rank, c.num_ranks, c.first_rank) for c in configs] == [
        ("prefill-0", "prefill", 0, 2, 0),
        ("prefill-0", "prefill", 1, 2, 0),
        ("decode-0", "decode", 0, 1, 2),
    ]
    assert {config.num_host_ranks for config in configs} == {3} and slots.num_running == 3
    assert configs[0].board_fd == configs[1].board_fd != configs[2].board_fd
    assert configs[0].instance == configs[1].instance


def test_a_lost_instance_is_started_again_once_all_its_ranks_have_ended(started, monkeypatch):
    slots = make_slots()
    started[0][1].kill()
    (end,) = reap(slots, 1)
    assert str(end) == f"prefill-0, rank 0 (pid {started[0][1].pid}) ended: killed by signal 9"
    assert slots.plan_restart(end) == 1.0
    now_s = time.monotonic() + 1.5
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    slots.restart_due()
    assert len(started) == 3, "the other rank is still leaving"
    monkeypatch.undo()
    monkeypatch.setattr(slots_module, "start_rank", lambda config: started.append((config, None)) or started[1][1])
    started[1][1].kill()
    reap(slots, 1)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    slots.restart_due()
    slots.restart_due()
    before, again = started[0][0].instance, [config.instance for config, _ in started[3:]]
    assert [one.name for one in again] == ["prefill-0"] * 2 and again[0].incarnation != before.incarnation
    del started[3:]


def test_signals_reach_all(started):
    slots = make_slots()
    slots.send_signal(signal.SIGKILL)
    assert {end.instance for end in reap(slots, 3)} == {"prefill-0", "decode-0"} and slots.num_running == 0


def test_further_instances_take_the_names_of_those_that_have_ended(started):
    slots = make_slots()
    name, pids = slots.start_instance("prefill", 1)
    assert name == "prefill-1" and pids == [started[3][1].pid]
    config = started[3][0]
    assert (config.first_rank, config.num_ranks, config.num_host_ranks) == (3, 1, 4)
    assert config.instance.incarnation != started[0][0].instance.incarnation
    assert slots.start_instance("prefill", 2)[0] == "prefill-2"
    started[3][1].kill()
    reap(slots, 1)
    assert slots.start_instance("prefill", 2)[0] == "prefill-3", "the one that has ended had one rank"
    assert slots.start_instance("prefill", 1)[0] == "prefill-1"
    end = reap_one(slots, started[2][1])
    slots.plan_restart(end)
    assert slots.start_instance("decode", 1)[0] == "decode-1", "decode-0 comes back by itself"


def reap_one(slots: InstanceSlots, process: subprocess.Popen):
    process.kill()
    (end,) = reap(slots, 1)
    return end


def test_each_instance_has_gpus_of_its_own_until_it_ends_for_good(started):
    slots = make_slots(("a", "b", "c", "d"))
    assert [config.gpus for config, _ in started] == [("a", "b"), ("a", "b"), ("c",)]
    with pytest.raises(ValueError, match=r"an instance of 2 ranks needs room.* have 3, which leaves 1"):
        slots.start_instance("prefill", 2)
    joiner = slots.config_of_joiner("decode", 1)
    assert joiner.gpus == ("d",) and joiner.num_ranks == 1
    slots.add_joiner(joiner, AdoptedProcess(started[2][1].pid))
    with pytest.raises(ValueError, match="which leaves 0"):
        slots.config_of_joiner("decode", 1)
    slots.plan_restart(reap_one(slots, started[2][1]))  # the decode instance comes back to its GPU; the joiner is gone
    assert slots.start_instance("decode", 1)[0] == "decode-1" and started[-1][0].gpus == ("d",)
    started[0][1].kill()
    started[1][1].kill()
    reap(slots, 2)
    assert slots.start_instance("prefill", 1)[0] == "prefill-1" and started[-1][0].gpus == ("a",)
    with pytest.raises(ValueError, match="which leaves 1"):
        slots.start_instance("prefill", 2)
    reap_one(slots, started[-1][1])
    assert slots.start_instance("prefill", 2)[0] == "prefill-0" and started[-1][0].gpus == ("a", "b")
