"""Elasticity: what the pool does where ranks may be lost: losses, processes that take a gone slot, ranks that retire.

Decides on views, and lets Roster take the ranks there. A rank that hangs is killed before the others go on: what
it would write later is theirs. Knows nothing of HTTP, nor of how ranks enter a view.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec

from eprt import env
from eprt.ep.group.host_board import HostBoard
from eprt.serve.errors import ApiError, print_line
from eprt.serve.options import ServeOptions
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.elastic_pool import ElasticPool
from eprt.serve.ranks.hang_judge import HangJudge
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.recovery import CapacityError, capacity_words
from eprt.serve.ranks.roster import NewView

_log = logging.getLogger(__name__)

SCHEMA = "eprt.ranks/1"
_LOOK_S = 0.2  # between two looks at the processes' states
_LIFE_LOOK_S = 0.02
_STOPPED_LOOKS = 4  # that must find a process stopped
_TOLD_S = 0.3  # who tells one process to stop may be about to tell all
_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1")
_LOADS = 10  # times as long as a Suspend a Resume may take: experts are read
# What differs between ranks of one server, or changes while it runs.
_OWN_INFO = ("expert_of_slot", "kv_tokens", "page_owner", "gpu")


class Elasticity:
    """Of one pool. options.max_lost_ranks 0: nothing is survived, nobody joins."""

    def __init__(self, pool: ElasticPool, options: ServeOptions):
        self._pool, self._roster = pool, pool.roster
        self.max_lost_ranks, self._retire_s = options.max_lost_ranks, options.drain_timeout_s
        self._answer_s: float = env.get("EPRT_TIMEOUT_S")  # for the answer to a Suspend
        # Before a rank retires: gives its experts to others, while all serve.
        self.hand_over: Callable[[int], Awaitable[None]] = _hand_over_nothing
        self.on_view: list[Callable[[NewView], None]] = []  # called with each view that was entered
        self._joiners: dict[int, Rank] = {}  # by slot: said Hello, take no part yet
        self._leaving: set[int] = set()  # retiring ranks whose requests have ended or were given time enough
        self._retiring: dict[int, asyncio.Task] = {}
        self._departing: tuple[int, ...] = ()  # ranks that were told to leave between two steps
        self._told: set[int] = set()  # ranks that have got a signal, a moment ago
        self._hurried: set[int] = set()  # retiring ranks whose requests need not end there
        timeout_s = options.hang_timeout_s
        self._judge = HangJudge(timeout_s, sees_sleep=options.engine.device == "cpu")
        self._stopped_looks = _STOPPED_LOOKS if timeout_s is None else round(timeout_s / _LOOK_S)

    @property
    def enabled(self) -> bool:
        return self.max_lost_ranks > 0

    @property
    def warming(self) -> list[Rank]:
        """Ranks that load beside those that serve."""
        admitted = [r for r in self._joiners.values() if self._roster.slots[r.rank].state == "warming"]
        return [rank for rank in admitted if rank.info is None]

    # -- losses --

    def watch(self, rank: Rank) -> None:
        if self.enabled:
            rank.watch_process()

    def survive(self, rank: Rank, what: str, details: str = "") -> bool:
        """Goes on without this rank; False where that cannot be done."""
        pool, roster = self._pool, self._roster
        if not self.enabled or not pool.ready.is_set() or pool.ended.is_set():
            return False
        rank.lost = True
        rank.kill()
        rank.transport.abort()
        if self._joiners.get(rank.rank) is rank:
            self._drop_joiner(rank, what, details)
            return True
        if not roster.alive[rank.rank]:
            if roster.is_suspending:  # it was leaving after a step that the others wait for in vain
                self._change(list(roster.alive))
            return True
        others = [r for r in roster.members if r != rank.rank]
        if not others:
            return False
        self._note_gone(rank)
        roster.num_lost += 1
        num = pool.sequences.num_on(rank.rank)
        goes_on = f"; {num} sequence{'' if num == 1 else 's'} go{'es' if num == 1 else ''} on elsewhere" if num else ""
        print_line(f"eprt: {rank} {what}{goes_on}{': ' if details else ''}{details}")
        if pool.state == "stopping" and any(r.left for r in pool.members):
            roster.alive[rank.rank] = False  # all have agreed to leave: nobody waits for it
            pool.check_ended()
            return True
        self._change([r in others for r in range(pool.num_ranks)])
        return True

    def _note_gone(self, rank: Rank) -> None:
        """The rank takes no part any more, nor gets requests."""
        self._leaving.discard(rank.rank)
        self._pool.router.close_rank(rank.rank)
        self._roster.set_state(rank.rank, "gone")
        if rank.stats is not None:
            rank.stats = replace(rank.stats, num_running_now=0, num_waiting_now=0, kv_pages_used_now=0)
        if rank.routing is not None and not rank.routing.done():
            rank.routing.cancel()

    def _change(self, alive: list[bool], after_seq: int | None = None, leaving: tuple[int, ...] = ()) -> None:
        """Begins a view, and moves the sequences of ranks that take no part in it to others. leaving: ranks to be told
        that they leave; those that were told so before, and have not left, are told again."""
        pool = self._pool
        gone = [rank for rank in self._roster.members if not alive[rank]]
        before = tuple(r for r in self._departing if not (pool.ranks[r].left or pool.ranks[r].lost or alive[r]))
        self._departing = (*before, *leaving)
        self._roster.begin(alive, after_seq, self._departing)
        if not any(pool.router.is_open):  # the ranks that are left are about to retire
            for rank in self._roster.members:
                pool.router.open_rank(rank)
        for rank in gone:
            if adds := pool.sequences.move_from(rank):
                pool.send_numbered(adds)

    # -- changes under way --

    def on_message(self, rank: Rank, message: msg.Lost | msg.Suspended | msg.Resumed | msg.ExpertsLoaded) -> None:
        if isinstance(message, msg.Lost):
            self._on_lost(rank, message)
        elif isinstance(message, msg.ExpertsLoaded):
            self._roster.on_loaded(rank.rank, message)
            self._begin_next()
        elif isinstance(message, msg.Suspended):
            try:
                self._roster.on_suspended(rank.rank, message, self._pids())
            except CapacityError as error:
                self._pool.lose(self._latest_gone(), f"is gone, and {error}")
        elif view := self._roster.on_resumed(rank.rank, message, self._pool.seq):
            self._enter(view)

    def _on_lost(self, who: Rank, message: msg.Lost) -> None:
        """who waited in vain. It waits for a new view now, also where the other rank was only slow to be seen."""
        lost = self._pool.ranks[self._pool.culprit_of(message.rank) if message.hung else message.rank]
        if lost.lost:
            return
        how = f"hangs, says {who}" if message.hung else "was lost: its process is gone"
        if not self.survive(lost, how, message.message if message.hung else ""):
            self._pool.lose(lost, "was lost", message.message)

    def _pids(self) -> list[int]:
        return [self._pool.ranks[rank].pid for rank in range(self._pool.num_ranks)]

    def _latest_gone(self) -> Rank | str:
        gone = [rank for rank, slot in enumerate(self._roster.slots) if slot.state == "gone"]
        if not gone:
            return "a rank"
        return self._pool.ranks[max(gone, key=lambda rank: self._roster.slots[rank].since_s)]

    def _enter(self, view: NewView) -> None:
        for rank in view.returned:
            self._pool.router.open_rank(rank)
        for listener in self.on_view:
            listener(view)
        without = f"; {view.num_missing} experts of all layers are read meanwhile" if view.num_missing else ""
        _log.info("view %d: ranks %s take part%s", view.number, ", ".join(map(str, self._roster.members)), without)
        self._begin_next()

    def _begin_next(self) -> None:
        """What waited for the end of a change: ranks that join or leave, experts that were read meanwhile."""
        if self._roster.changing or self._pool.state not in ("serving", "draining"):
            return
        loaded = [r for r in self._joiners.values() if r.info is not None]
        leaving = tuple(sorted(self._leaving))
        self._leaving.clear()
        if leaving and (words := self._lacks_capacity_without(*leaving)):
            for rank in leaving:
                self._stay(rank, words)
            leaving = ()
        if loaded or leaving or self._roster.has_loaded:
            for rank in loaded:
                self._pool.ranks[rank.rank] = self._joiners.pop(rank.rank)
            enters = {rank.rank for rank in loaded}
            alive = [(a or r in enters) and r not in leaving for r, a in enumerate(self._roster.alive)]
            self._change(alive, self._pool.next_seq(), leaving)
            for rank in leaving:
                self._note_gone(self._pool.ranks[rank])
            return
        for rank in self._joiners.values():
            if self._roster.slots[rank.rank].state != "warming":
                self._roster.set_state(rank.rank, "warming")
                rank.progress_s = time.monotonic()  # until now it had to wait
                rank.send(msg.Admit())

    # -- joining --

    def on_hello(self, rank: Rank) -> bool:
        """Whether the rank may take a slot while the others serve."""
        reason = self._why_not(rank)
        if reason is not None:
            _log.warning("refused %s: %s", rank, reason)
            rank.send(msg.Refused(reason))
            rank.transport.close() if self.enabled else rank.transport.abort()
            return False
        self.watch(rank)
        self._joiners[rank.rank] = rank
        self._begin_next()
        return True

    def _why_not(self, rank: Rank) -> str | None:
        slot = self._roster.slots[rank.rank]
        if not self.enabled:
            return "the server takes no ranks: it was started without --max-lost-ranks"
        if rank.rank in self._joiners:
            return f"{self._joiners[rank.rank]} is about to take this slot"
        if slot.state != "gone":
            return f"slot {rank.rank} is taken: {self._pool.ranks[rank.rank]} is {slot.state}"
        if self._pool.state != "serving":
            return f"the server is {self._pool.state}"
        return None

    def on_loaded(self, rank: Rank) -> None:
        """It has loaded the model; it enters as soon as no other change is under way."""
        assert rank.info is not None
        mine, others = msgspec.structs.asdict(rank.info), msgspec.structs.asdict(self._pool.infos[0])
        differs = [name for name in mine if name not in _OWN_INFO and mine[name] != others[name]]
        if differs:
            name = differs[0]
            reason = f"another model or other flags: its {name} is {mine[name]}, that of the others {others[name]}"
            rank.send(msg.Refused(reason))
            self.survive(rank, "was refused", reason)
            return
        self._begin_next()

    def _drop_joiner(self, rank: Rank, what: str, details: str) -> None:
        del self._joiners[rank.rank]
        self._roster.set_state(rank.rank, "gone")
        print_line(f"eprt: {rank}, about to take part, {what}{': ' if details else ''}{details}")

    def refuse_joiners(self, reason: str) -> None:
        for rank in list(self._joiners.values()):
            rank.send(msg.Refused(reason))
            rank.lost = True
            rank.transport.close()
        self._joiners.clear()

    # -- retiring --

    def retire(self, number: int) -> dict[str, Any]:
        """Lets a rank leave once its requests have ended, or after the drain's time, moved. Returns document(). One
        that is about to leave already does not change its mind."""
        if number in self._retiring and self._roster.slots[number].state == "retiring":
            return self.document()
        self._check_retirement(number)
        self._roster.set_state(number, "retiring")
        self._pool.router.close_rank(number)
        self._retiring[number] = asyncio.get_running_loop().create_task(self._empty_and_leave(number))
        return self.document()

    def _check_retirement(self, number: int) -> None:
        if not 0 <= number < self._pool.num_ranks:
            raise ApiError(404, f"rank {number}: there are 0..{self._pool.num_ranks - 1}", code="not_found")
        if not self.enabled:
            message = "ranks cannot leave: the server was started without --max-lost-ranks"
            raise ApiError(409, message, code="not_elastic")
        state = self._roster.slots[number].state
        if state != "ready":
            raise ApiError(409, f"rank {number} is {state}: only a ready rank retires", code="not_ready")
        if words := self._lacks_capacity_without(number, *self._retiring):
            raise ApiError(409, f"rank {number} cannot retire: {words}", code="capacity")

    def on_told_to_stop(self, rank: Rank, reason: str) -> bool:
        """Its process has got a signal. Whether that means this rank, and not the whole server: then it retires, and at
        a further signal moves its requests at once."""
        if not self.enabled or self._pool.state != "serving" or reason not in _SIGNALS:
            return False
        if self._pool.ranks[rank.rank] is not rank:
            return True  # it takes no part yet, and ends by itself
        if rank.rank in self._retiring:
            self._hurried.add(rank.rank)
            return True
        if not self._told:
            asyncio.get_running_loop().call_later(_TOLD_S, self._retire_told, reason)
        self._told.add(rank.rank)
        return True

    def _retire_told(self, reason: str) -> None:
        """The ranks that have got signals retire; the server stops where it cannot do without them."""
        told, self._told = sorted(self._told), set()
        told = [rank for rank in told if self._roster.slots[rank].state == "ready"]
        if not told or self._pool.state != "serving":
            return
        try:
            for rank in told:
                self.retire(rank)
                _log.info("rank %d retires: %s", rank, reason)
        except ApiError as error:
            _log.warning("%s; the server stops", error.message)
            self._pool.on_drain(reason, told[0])

    def _lacks_capacity_without(self, *leaving: int) -> str:
        """Why the ranks that are left could not hold all experts, "" if they could."""
        num_left = sum(rank not in leaving for rank in self._roster.members)
        info = self._pool.infos[0]
        num_slots = max((len(row) for row in info.expert_of_slot), default=0)
        if num_left < 1 or num_left * num_slots < info.num_experts:
            return capacity_words(info.num_experts, num_slots, num_left)
        return ""

    def _stay(self, number: int, why: str) -> None:
        """A rank that was to leave is needed after all: another one was lost meanwhile."""
        _log.warning("rank %d does not leave: %s", number, why)
        self._roster.set_state(number, "ready")
        self._pool.router.open_rank(number)

    async def _empty_and_leave(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._retire_s
        await self.hand_over(number)
        while self._pool.sequences.num_on(number) and loop.time() < deadline_s and number not in self._hurried:
            await asyncio.sleep(0.05)
        self._hurried.discard(number)
        if self._roster.slots[number].state == "retiring":
            self._leaving.add(number)
            self._begin_next()
        del self._retiring[number]

    # -- for the API and the frontend's life --

    def document(self) -> dict[str, Any]:
        """eprt.ranks/1."""
        ranks = []
        for number, slot in enumerate(self._roster.slots):
            rank = self._joiners.get(number) or self._pool.ranks.get(number)
            whose = {"pid": rank.pid, "host": rank.host} if rank else {"pid": None, "host": None}
            ranks.append({"rank": number, "state": slot.state, **whose, "since_s": slot.since_s, "view": slot.view})
        return {
            "schema": SCHEMA,
            "view": self._roster.number,
            "changing": self._roster.changing,
            "max_lost_ranks": self.max_lost_ranks,
            "ranks_lost": self._roster.num_lost,
            "missing_experts": self._roster.num_missing,
            "requests_replayed": self._pool.sequences.num_moved,
            "ranks": ranks,
        }

    async def watch_processes(self) -> None:
        """Notices ranks that were stopped (SIGSTOP), hang in a step, or do not answer amid a change; ends only by
        cancellation. What looks like a long computation is noticed by those that wait for it, at the deadline."""
        num_looks = dict.fromkeys(range(self._pool.num_ranks), 0)
        while self.enabled:
            await asyncio.sleep(_LOOK_S)
            for rank in [*self._pool.members, *self._joiners.values()]:
                num_looks[rank.rank] = num_looks[rank.rank] + 1 if rank.is_stopped else 0
                if num_looks[rank.rank] >= self._stopped_looks and not rank.lost and self._pool.ready.is_set():
                    num_looks[rank.rank] = 0
                    self._give_up(rank, "was stopped, and is killed")
            for rank, evidence in self.hung_ranks():
                self._give_up(rank, "hangs, and is killed", evidence)
            for late in self._roster.overdue(self._answer_s, _LOADS * self._answer_s):
                self._give_up(self._pool.ranks[late], "did not answer, and is killed")

    def hung_ranks(self) -> list[tuple[Rank, str]]:
        """Those that take part and hang in a step, and how that shows."""
        pool = self._pool
        if not pool.ready.is_set() or pool.ended.is_set() or self._roster.changing:
            return []
        quiet_s, ask_after_s = pool.quiet_s, self._judge.patience_s / 2
        for rank in pool.members:  # one that sleeps, while its requests wait for something else, answers at once
            if quiet_s.get(rank.rank, 0.0) >= ask_after_s and rank.pinged_s < rank.heard_s:
                rank.pinged_s = time.monotonic()
                rank.send(msg.Ping())
        return self._judge.look([r for r in pool.members if not (r.left or r.lost)], quiet_s)

    async def watch_lives(self, board: HostBoard) -> None:
        """Notices ranks that were killed, before their sockets close (life_lock.py); ends only by cancellation."""
        while True:
            await asyncio.sleep(_LIFE_LOOK_S)
            died_R = board.died()
            if died_R.any() and self._pool.state in ("serving", "draining"):
                for rank in self._pool.members:
                    if died_R[rank.rank] and not (rank.lost or rank.left):
                        self._give_up(rank, "was lost: its process is gone")

    def _give_up(self, rank: Rank, what: str, details: str = "") -> None:
        if not self.survive(rank, what, details):
            self._pool.lose(rank, what, details)


async def _hand_over_nothing(rank: int) -> None:
    """Without experts that can move."""
