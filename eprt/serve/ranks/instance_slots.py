"""InstanceSlots: the processes of a server's instances on one host; an instance that was lost is started again whole.

Further ones are started when they are asked for. Instances that another shell has started (`eprt join --role`) have
names here, and no more: their ranks are that shell's. Knows nothing of the frontend, nor of what instances do.
"""

import itertools
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from eprt import env
from eprt.ep.group.host_board import HostBoard
from eprt.serve.gpu_shares import choose_gpus
from eprt.serve.options import InstanceName, RankConfig
from eprt.serve.ranks.slots import AdoptedProcess, RankEnd, RankSlots, next_delay_s


@dataclass(slots=True)
class _Place:
    """One instance, which may have successors."""

    name: str
    role: str
    num_ranks: int
    first_rank: int  # ranks of the instances before it
    gpus: tuple[str, ...]  # UUID of each rank's; empty on CPUs
    slots: RankSlots | None = None  # of its latest incarnation
    board: HostBoard | None = None  # likewise
    started_s: float = 0.0
    delay_s: float = 0.0  # until its latest restart
    due_s: float | None = None  # when it is started again


class _Joiner(NamedTuple):
    """An instance of another shell."""

    starter: AdoptedProcess
    num_ranks: int
    gpus: tuple[str, ...]


class InstanceSlots:
    """All instances.

    Args:
        config: of every rank, but for what it is part of.
        gpus: UUIDs of those that ranks may have; empty: ranks are on CPUs.
    """

    def __init__(self, config: RankConfig, gpus: Sequence[str] = ()):
        self.config, self.gpus = config, tuple(gpus)
        self._joined: dict[str, _Joiner] = {}  # by name
        self._places: dict[str, _Place] = {}
        for name, role, num_ranks in config.options.instance_plan:
            self._places[name] = _Place(name, role, num_ranks, self._num_ranks, self._choose_gpus(num_ranks))

    @property
    def _num_ranks(self) -> int:
        return sum(place.num_ranks for place in self._places.values())

    @property
    def _num_joined_ranks(self) -> int:
        return sum(joiner.num_ranks for joiner in self._joined.values())

    def _choose_gpus(self, num_ranks: int) -> tuple[str, ...]:
        """ValueError where no GPUs are left for an instance."""
        if not self.gpus:
            return ()
        used = [place.gpus for place in self._places.values() if not _has_ended(place)]
        used += [joiner.gpus for joiner in self._joined.values()]
        return choose_gpus(num_ranks, self.gpus, itertools.chain(*used), env.get("EPRT_RANKS_PER_GPU"))

    @property
    def num_running(self) -> int:
        """Processes that were started here."""
        return sum(place.slots.num_running for place in self._places.values() if place.slots is not None)

    def start_all(self) -> None:
        for place in self._places.values():
            self._start(place)

    def _start(self, place: _Place) -> None:
        """A new incarnation. The memory of the one before goes with its processes."""
        if place.board is not None:
            place.board.close()
        place.board = HostBoard.create(place.num_ranks)
        place.started_s, place.due_s = time.monotonic(), None
        name = InstanceName(place.name, place.role, os.urandom(8).hex(), place.num_ranks)
        config = msgspec.structs.replace(
            self.config,
            num_ranks=place.num_ranks,
            board_fd=place.board.fd,
            instance=name,
            first_rank=place.first_rank,
            num_host_ranks=self._num_ranks + self._num_joined_ranks,
            gpus=place.gpus,
        )
        place.slots = RankSlots(config, place.board)
        place.slots.start_all()

    # -- further instances --

    def start_instance(self, role: str, num_ranks: int) -> tuple[str, list[int]]:
        """A further instance of this launcher: its name, and its processes. It has the name of one of as many ranks
        that has ended, if there is one. ValueError where no GPUs are left for it."""
        self._forget_joiners()
        gpus = self._choose_gpus(num_ranks)
        place = next((one for one in self._places.values() if _is_free(one, role, num_ranks)), None)
        if place is None or place.name in self._joined:
            name = self._free_name(role)
            place = _Place(name, role, num_ranks, self._num_ranks + self._num_joined_ranks, gpus)
            self._places[name] = place
        place.gpus = gpus
        self._start(place)
        assert place.slots is not None, "it has just been started"
        return place.name, list(place.slots.pid_of_rank.values())

    def _forget_joiners(self) -> None:
        self._joined = {name: one for name, one in self._joined.items() if one.starter.poll() is None}

    def _free_name(self, role: str) -> str:
        names = {*self._places, *self._joined}
        return next(name for k in itertools.count() if (name := f"{role}-{k}") not in names)

    def config_of_joiner(self, role: str, num_ranks: int) -> RankConfig:
        """Of the first rank of an instance with the first name that is free. ValueError where no GPUs are left."""
        self._forget_joiners()
        before = self._num_ranks + self._num_joined_ranks
        return msgspec.structs.replace(
            self.config,
            num_ranks=num_ranks,
            instance=InstanceName(self._free_name(role), role, os.urandom(8).hex(), num_ranks),
            first_rank=before,
            num_host_ranks=before + num_ranks,
            gpus=self._choose_gpus(num_ranks),
        )

    def add_joiner(self, config: RankConfig, process: AdoptedProcess) -> None:
        """config: as config_of_joiner() gave it. process: that has started the instance's ranks, and lives as long."""
        assert config.instance is not None, "it has just been named"
        self._joined[config.instance.name] = _Joiner(process, config.num_ranks, config.gpus)

    # -- their ends --

    def reap(self) -> list[RankEnd]:
        """The processes that have ended since the last call."""
        return [
            RankEnd(end.rank, end.pid, end.status, place.name)
            for place in self._places.values()
            if place.slots is not None
            for end in place.slots.reap()
        ]

    def plan_restart(self, end: RankEnd) -> float:
        """As RankSlots.plan_restart, of the whole instance: its other ranks end too."""
        place = self._places[end.instance]
        if place.due_s is None:
            place.delay_s = next_delay_s(place.delay_s, time.monotonic() - place.started_s)
            place.due_s = time.monotonic() + place.delay_s
        return place.delay_s

    def restart_due(self) -> None:
        for place in self._places.values():
            ended = place.slots is None or not place.slots.num_running
            if place.due_s is not None and time.monotonic() >= place.due_s and ended:
                self._start(place)

    def send_signal(self, number: signal.Signals) -> None:
        for place in self._places.values():
            if place.slots is not None:
                place.slots.send_signal(number)


def _is_free(place: _Place, role: str, num_ranks: int) -> bool:
    """Whether its processes have ended, and no others will come by themselves."""
    return (place.role, place.num_ranks) == (role, num_ranks) and _has_ended(place)


def _has_ended(place: _Place) -> bool:
    """For good: what comes by itself has its place."""
    return place.slots is not None and not place.slots.num_running and place.due_s is None
