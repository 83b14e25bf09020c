"""InstanceSlots: the processes of a server's instances on one host; an instance that was lost is started again whole.

Further ones are started when they are asked for. Instances that another shell has started (`eprt join --role`) have
names here, and no more: their ranks are that shell's. Knows nothing of the frontend, nor of what instances do.
"""

import itertools
import os
import signal
import time
from dataclasses import dataclass

import msgspec

from eprt.ep.group.host_board import HostBoard
from eprt.serve.options import InstanceName, RankConfig
from eprt.serve.ranks.slots import AdoptedProcess, RankEnd, RankSlots, next_delay_s


@dataclass(slots=True)
class _Place:
    """One instance, which may have successors."""

    name: str
    role: str
    num_ranks: int
    first_rank: int  # ranks of the instances before it
    slots: RankSlots | None = None  # of its latest incarnation
    board: HostBoard | None = None  # likewise
    started_s: float = 0.0
    delay_s: float = 0.0  # until its latest restart
    due_s: float | None = None  # when it is started again


class InstanceSlots:
    """All instances. config: of every rank, but for what it is part of."""

    def __init__(self, config: RankConfig):
        self.config = config
        self._joined: dict[str, tuple[AdoptedProcess, int]] = {}  # by name: who started it, and its ranks
        self._places: dict[str, _Place] = {}
        for name, role, num_ranks in config.options.instance_plan:
            self._places[name] = _Place(name, role, num_ranks, self._num_ranks)

    @property
    def _num_ranks(self) -> int:
        return sum(place.num_ranks for place in self._places.values())

    @property
    def _num_joined_ranks(self) -> int:
        return sum(num_ranks for _, num_ranks in self._joined.values())

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
        )
        place.slots = RankSlots(config, place.board)
        place.slots.start_all()

    # -- further instances --

    def start_instance(self, role: str, num_ranks: int) -> tuple[str, list[int]]:
        """A further instance of this launcher: its name, and its processes. It has the name of one of as many ranks
        that has ended, if there is one."""
        self._forget_joiners()
        place = next((one for one in self._places.values() if _is_free(one, role, num_ranks)), None)
        if place is None or place.name in self._joined:
            name = self._free_name(role)
            place = _Place(name, role, num_ranks, self._num_ranks + self._num_joined_ranks)
            self._places[name] = place
        self._start(place)
        assert place.slots is not None, "it has just been started"
        return place.name, list(place.slots.pid_of_rank.values())

    def _forget_joiners(self) -> None:
        self._joined = {name: one for name, one in self._joined.items() if one[0].poll() is None}

    def _free_name(self, role: str) -> str:
        names = {*self._places, *self._joined}
        return next(name for k in itertools.count() if (name := f"{role}-{k}") not in names)

    def config_of_joiner(self, role: str, num_ranks: int) -> RankConfig:
        """Of the first rank of an instance with the first name that is free."""
        self._forget_joiners()
        before = self._num_ranks + self._num_joined_ranks
        return msgspec.structs.replace(
            self.config,
            num_ranks=num_ranks,
            instance=InstanceName(self._free_name(role), role, os.urandom(8).hex(), num_ranks),
            first_rank=before,
            num_host_ranks=before + num_ranks,
        )

    def add_joiner(self, name: InstanceName, process: AdoptedProcess) -> None:
        """process: that has started the instance's ranks, and lives as long as they."""
        self._joined[name.name] = process, name.num_ranks

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
    ended = place.slots is None or not place.slots.num_running
    return (place.role, place.num_ranks) == (role, num_ranks) and ended and place.due_s is None
