"""Roster: which ranks take part, and how they go from one view to the next.

A view is a number and the ranks that take part. The frontend decides on it, and takes the ranks there in two rounds:

    Suspend -> Suspended   they take no more steps, and say which experts their slots hold
    Resume -> Resumed      they load what nobody holds any more, and know whom to wait for from now on
    Go                     all have entered: they take steps

With defers_loading, a view in which experts are missing is entered without them. Ranks read them while they serve
(LoadExperts -> ExpertsLoaded), and the next view, of the same ranks, has them.

A loss amid a change begins it anew, with a larger number, for those that are left. Slots keep their numbers. Knows
nothing of requests, sockets or processes (pool.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.recovery import count_missing, recovery_rows, rows_without_loading

# What a slot's rank does: it loads at the start; serves; its process has ended; it loads while others serve; its
# requests end, and then it leaves.
STATES = ("starting", "ready", "gone", "warming", "retiring")


@dataclass(slots=True)
class Slot:
    """The place of one rank."""

    state: str = "starting"
    since_s: float = field(default_factory=time.time)  # Unix time of its latest change
    view: int = 0  # the first view of the latest state "ready" or "gone"


@dataclass(frozen=True)
class NewView:
    """A view that all its ranks have entered."""

    number: int
    alive: tuple[bool, ...]
    returned: tuple[int, ...]  # ranks that took no part in the view before
    rows: list[list[int]]  # per MoE layer: the expert of every slot, -1: none
    placement_epoch: int
    num_missing: int = 0  # experts without a slot, of all layers together


class Roster:
    """The slots of one server.

    Args:
        send: sends a message to a rank.
        num_experts: of the loaded model; asked for at each change.
        defers_loading: ranks serve while they read experts that were lost.
    """

    def __init__(
        self,
        num_ranks: int,
        send: Callable[[int, msg.ToRank], None],
        num_experts: Callable[[], int],
        defers_loading: bool = False,
    ):
        self.slots = [Slot() for _ in range(num_ranks)]
        self.alive = [True] * num_ranks  # of the latest view, also while it is being entered
        self.number = 0  # of that view
        self.num_lost = self.num_changes = 0
        self.change_s = 0.0  # that all changes took together
        self._send, self._num_experts = send, num_experts
        self._entered = list(self.alive)  # those of the latest view that all its ranks have entered
        self._phase = "steady"  # then "suspending", "resuming"
        self._may_load = False  # ranks may be reading experts for a view that was given up
        self._suspended: dict[int, msg.Suspended] = {}
        self._resumed: set[int] = set()
        self._rows: list[list[int]] = []
        self._defers_loading = defers_loading
        self._whole_rows: list[list[int]] = []  # that ranks load to, beside the view; empty: its own are whole
        self._loaded: set[int] = set()  # ranks that have what whole_rows give them
        self.num_missing = 0  # experts without a slot in the view that was entered last, of all layers together
        self._placement_epoch = 0
        self._begun_s = self._phase_begun_s = 0.0

    @property
    def changing(self) -> bool:
        """Whether a view is being entered: no rank takes steps, or it will soon take none."""
        return self._phase != "steady"

    @property
    def is_suspending(self) -> bool:
        """Whether ranks of the latest view have still to answer its Suspend."""
        return self._phase == "suspending"

    @property
    def members(self) -> list[int]:
        """Ranks of the latest view."""
        return [rank for rank, alive in enumerate(self.alive) if alive]

    @property
    def is_whole(self) -> bool:
        """Whether every slot takes part, and every expert is there."""
        return all(self.alive) and not self.changing and not self.num_missing

    @property
    def has_loaded(self) -> bool:
        """Whether all ranks have read what the view that they are in lacks."""
        return not self.changing and self.num_missing > 0 and self._loaded.issuperset(self.members)

    def overdue(self, suspend_s: float, resume_s: float) -> list[int]:
        """Ranks that have not answered the latest Suspend, or Resume, within so many seconds."""
        if not self.changing:
            return []
        answered, allowed_s = (
            (set(self._suspended), resume_s if self._may_load else suspend_s)
            if self._phase == "suspending"
            else (self._resumed, resume_s)
        )
        late = time.monotonic() - self._phase_begun_s > allowed_s
        return [rank for rank in self.members if late and rank not in answered]

    def set_state(self, rank: int, state: str) -> None:
        slot = self.slots[rank]
        slot.state, slot.since_s = state, time.time()
        if state in ("ready", "gone"):
            slot.view = self.number

    def begin(self, alive: Sequence[bool], after_seq: int | None = None, leaving: Sequence[int] = ()) -> None:
        """To the view of these ranks. after_seq: see Suspend; ranks that took no part before need not wait for it.
        leaving: ranks that leave, and must be told so."""
        before = self.members
        self.number += 1
        self.alive = list(alive)
        if not self.changing:
            self._begun_s = time.monotonic()
        self._may_load |= self._phase == "resuming"
        self._phase, self._phase_begun_s = "suspending", time.monotonic()
        self._suspended.clear()
        self._resumed.clear()
        self._loaded.clear()
        for rank in sorted({*self.members, *leaving}):
            self._send(rank, msg.Suspend(self.number, self.alive, after_seq if rank in before else None))

    def on_suspended(self, rank: int, message: msg.Suspended, pids: list[int]) -> None:
        """pids: of all ranks. Raises CapacityError where the experts do not fit into the slots that are left."""
        if message.view != self.number or self._phase != "suspending":
            return
        self._suspended[rank] = message
        if len(self._suspended) < len(self.members):
            return
        contents = {r: one.expert_of_slot for r, one in self._suspended.items()}
        self._rows, self._whole_rows = recovery_rows(contents, len(self.slots), self._num_experts()), []
        if self._defers_loading and (reduced := rows_without_loading(self._rows, contents)) != self._rows:
            self._rows, self._whole_rows = reduced, self._rows
        self._placement_epoch = 1 + max(one.placement_epoch for one in self._suspended.values())
        self._phase, self._phase_begun_s = "resuming", time.monotonic()
        epoch = 1 + max(one.epoch for one in self._suspended.values())
        for member in self.members:
            resume = msg.Resume(
                self.number, self._rows, epoch, self._placement_epoch, pids, lacks_experts=bool(self._whole_rows)
            )
            self._send(member, resume)

    def on_resumed(self, rank: int, message: msg.Resumed, seq: int) -> NewView | None:
        """The view, once its last rank has entered it; all have then been told to go. seq: the latest number."""
        if message.view != self.number or self._phase != "resuming":
            return None
        self._resumed.add(rank)
        if len(self._resumed) < len(self.members):
            return None
        self._phase, self._may_load = "steady", False
        returned = tuple(r for r in self.members if not self._entered[r])
        self._entered = list(self.alive)
        self.num_missing = count_missing(self._rows, self._num_experts()) if self._whole_rows else 0
        for member in self.members:
            if self._whole_rows:
                self._send(member, msg.LoadExperts(self.number, self._whole_rows))
            self._send(member, msg.Go(self.number, seq))
        for member in returned:
            self.set_state(member, "ready")
        self.num_changes += 1
        self.change_s += time.monotonic() - self._begun_s
        return NewView(self.number, tuple(self.alive), returned, self._rows, self._placement_epoch, self.num_missing)

    def on_loaded(self, rank: int, message: msg.ExpertsLoaded) -> None:
        """A rank has read what it is to hold; see has_loaded."""
        if message.view == self.number and not self.changing:
            self._loaded.add(rank)
