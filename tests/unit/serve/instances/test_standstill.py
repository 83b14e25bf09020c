"""Ranks that neither end nor go on."""

import asyncio
import time
from collections.abc import Callable, Coroutine

from eprt.serve.instances.standstill import Standstill
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.rank import Rank
from tests.unit.serve.instances.cases import GivenFleet


def run(life: Callable[[GivenFleet], Coroutine]) -> None:
    async def go() -> None:
        await life(GivenFleet("--prefill", "1", "--decode", "1"))

    asyncio.run(go())


def test_an_instance_that_stands_still_is_lost_and_killed(monkeypatch, capsys):
    async def life(fleet: GivenFleet) -> None:
        standstill = Standstill()
        stopped = fleet.given["decode-0"]
        killed: list[Rank] = []
        monkeypatch.setattr(Rank, "is_stopped", property(lambda rank: rank is stopped))
        monkeypatch.setattr(Rank, "kill", lambda rank: killed.append(rank))
        for _ in range(5):
            standstill.look(fleet.living)
        assert fleet.instances["decode-0"].state == "ready" and not killed, "it may go on"
        standstill.look(fleet.living)
        assert fleet.instances["decode-0"].state == "lost" and killed == [stopped]
        standstill.look(fleet.living)
        assert fleet.state == "serving" and fleet.num_lost == 1

    run(life)
    assert "decode-0, rank 0" in capsys.readouterr().err


def test_a_rank_of_another_host_is_given_up_for_its_silence(monkeypatch, capsys):
    async def life(fleet: GivenFleet) -> None:
        standstill, far = Standstill(), fleet.given["decode-0"]
        monkeypatch.setattr(Rank, "is_far", property(lambda rank: rank is far))
        monkeypatch.setattr(Rank, "is_stopped", property(lambda rank: rank is far))  # by the pid of somebody else here
        info, far.info = far.info, None
        far.beat_s -= 3600.0
        for _ in range(9):
            standstill.look(fleet.living)
        assert fleet.instances["decode-0"].state == "ready", "it may load for as long as it needs"
        assert info is not None
        far.on_loaded(info)
        standstill.look(fleet.living)
        far.on_beat(msg.Heartbeat(asleep=True, cpu_s=0.0))
        standstill.look(fleet.living)
        assert fleet.instances["decode-0"].state == "ready"
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 21)
        standstill.look(fleet.living)
        assert fleet.instances["decode-0"].state == "lost" and fleet.state == "serving"

    run(life)
    assert "was not heard of for 20 s" in capsys.readouterr().err
