"""A rank's loop from one view to the next: what it says, what it waits for, and in which order."""

import pytest
from msgspec.structs import replace

from eprt.engine.outputs import StepResult, SuspendedState, TokenOutput
from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.serve.options import OptionError
from eprt.serve.ranks import start_engine
from eprt.serve.ranks.messages import (
    AbortRequest,
    Admit,
    ExpertsLoaded,
    Go,
    LoadExperts,
    Lost,
    Refused,
    Resume,
    Resumed,
    StepReport,
    Stop,
    Suspend,
    Suspended,
    Wake,
)
from eprt.serve.ranks.worker import Worker
from tests.unit.serve.ranks.test_worker import GivenChannel, GivenEngine, run


class GivenGroup:
    """Rank 1 of two."""

    rank, size = 1, 2

    def __init__(self):
        self.interrupt = None
        self.watched: list[tuple[int, int]] = []

    def watch(self, rank: int, pid: int) -> None:
        self.watched.append((rank, pid))


class ElasticEngine(GivenEngine):
    """Its steps are results, or errors that break them off."""

    def __init__(self, *results):
        super().__init__(*results)
        self.group, self.views, self.boundaries, self.num_suspended = GivenGroup(), [], [], 0
        self.watches, self.membership = False, self
        self.view_errors: list[Exception] = []  # of enter_view, one call after the other

    def step(self, seen_seq: int) -> StepResult:
        if self.results and isinstance(self.results[0], Exception):
            self.seen.append(seen_seq)
            raise self.results.pop(0)  # type: ignore
        if self.group.interrupt is not None:
            self.group.interrupt()
        return super().step(seen_seq)

    def watch_losses(self) -> None:
        self.watches = True

    def leave_at_boundary(self, view: int) -> None:
        self.boundaries.append(view)

    def suspend(self) -> SuspendedState:
        self.num_suspended += 1
        return SuspendedState([[0, 1]], epoch=9, placement_epoch=2, outputs=[TokenOutput("1", self.num_suspended)])

    def enter_view(self, view, rows, epoch, placement_epoch, lacks_experts) -> None:
        if self.view_errors:
            raise self.view_errors.pop(0)
        self.lacks_experts = lacks_experts
        self.views.append((view.number, view.alive, rows, epoch, placement_epoch))


RESUME = Resume(1, [[0, 1, -1, -1]], 10, 3, [100, 101])


def run_elastic(channel: GivenChannel, engine: ElasticEngine) -> bool:
    return Worker(engine, channel, window_s=1, survives=True).run()  # type: ignore[arg-type]


def answers(channel: GivenChannel) -> list:
    return [message for message in channel.sent if isinstance(message, (Lost, Suspended, Resumed))]


def test_a_step_that_waits_is_broken_off_by_a_suspend_and_the_view_is_entered():
    engine = ElasticEngine(StepResult([], all_idle=False))
    channel = GivenChannel(
        [Wake(4)], [], [AbortRequest("x"), Suspend(1, [True, True])], [RESUME], [Go(1, 7)], [Stop(8)]
    )
    assert run_elastic(channel, engine)
    assert engine.num_suspended == 1 and engine.aborted == ["x"], "what came amid the step is not lost"
    assert engine.views == [(1, (True, True), [[0, 1, -1, -1]], 10, 3)] and engine.group.watched == [(0, 100)]
    assert answers(channel) == [Suspended(1, [[0, 1]], 9, 2), Resumed(1)]
    assert engine.seen[-1] == 8 and StepReport([TokenOutput("1", 1)]) in channel.sent, "finished steps are reported"


@pytest.mark.parametrize(
    "error, lost",
    [
        (RankLostError(1, 2, 0, "dispatch"), Lost(0, False, str(RankLostError(1, 2, 0, "dispatch")))),
        (
            EPTimeoutError(1, 2, 0, "combine", 3, 4, 30.0),
            Lost(0, True, str(EPTimeoutError(1, 2, 0, "combine", 3, 4, 30.0))),
        ),
    ],
    ids=["died", "hangs"],
)
def test_a_rank_that_waited_in_vain_says_for_whom_and_waits_for_a_view(error, lost):
    channel = GivenChannel([Wake(1)], [], [], [Suspend(1, [False, True])], [RESUME, Go(1, 1)], [Stop(2)])
    engine = ElasticEngine(error)
    assert run_elastic(channel, engine)
    assert answers(channel) == [lost, Suspended(1, [[0, 1]], 9, 2), Resumed(1)]
    assert engine.group.watched == [], "a rank that takes no part is not watched"


def test_a_rank_that_is_lost_while_others_enter_is_told_of_and_the_next_view_awaited():
    engine = ElasticEngine()
    engine.view_errors = [RankLostError(1, 2, 0, "the change of the view")]
    both, alone = [True, True], [False, True]
    channel = GivenChannel(
        [Suspend(1, both)], [RESUME], [Suspend(2, alone)], [replace(RESUME, view=2), Go(2, 1)], [Stop(2)]
    )
    assert run_elastic(channel, engine) and engine.watches
    lost = Lost(0, False, str(RankLostError(1, 2, 0, "the change of the view")))
    assert answers(channel) == [Suspended(1, [[0, 1]], 9, 2), lost, Suspended(2, [[0, 1]], 9, 2), Resumed(2)]
    assert [view[:2] for view in engine.views] == [(2, (False, True))]


def test_experts_are_read_beside_the_steps_of_a_view_and_their_end_is_told_once():
    """One that came for a view whose Suspend is here already is not begun."""
    rows = [[0, 1, 2, 3]]
    channel = GivenChannel(
        [Suspend(1, [True, True])],
        [replace(RESUME, lacks_experts=True)],
        [LoadExperts(1, rows), Go(1, 2)],
        [Wake(3)],
        [],
        [Suspend(2, [True, True]), LoadExperts(1, rows)],
        [replace(RESUME, view=2)],
        [Go(2, 4)],
        [Stop(5)],
    )
    engine = ElasticEngine(StepResult([], all_idle=False), StepResult([], all_idle=False))
    engine.deferred.take_end.side_effect = [False, False, False, False, True, *[False] * 20]
    assert run_elastic(channel, engine)
    engine.deferred.begin.assert_called_once_with(rows)
    assert [message for message in channel.sent if isinstance(message, ExpertsLoaded)] == [ExpertsLoaded(1)]
    assert [view[0] for view in engine.views] == [1, 2] and not engine.lacks_experts


def test_a_later_suspend_makes_an_earlier_resume_void():
    channel = GivenChannel(
        [Suspend(1, [True, True])], [Suspend(2, [False, True]), RESUME, Go(1, 1)], [Go(2, 5)], [Stop(6)]
    )
    channel.batches.insert(2, [Resume(2, [[0, 1, -1, -1]], 11, 4, [100, 101])])
    engine = ElasticEngine()
    assert run_elastic(channel, engine)
    assert [view[0] for view in engine.views] == [2] and engine.num_suspended == 2
    assert answers(channel)[-1] == Resumed(2)


def test_between_two_steps_all_ranks_stop_after_the_same_one():
    results = StepResult([], all_idle=False), StepResult([], all_idle=False), StepResult([], False, leaves=True)
    channel = GivenChannel([Wake(1)], [Suspend(1, [True, True], 2)], [], [], [], [], [], [RESUME, Go(1, 2)], [Stop(3)])
    engine = ElasticEngine(*results)
    assert run_elastic(channel, engine)
    assert engine.boundaries == [1] and engine.num_suspended == 1 and engine.seen == [2, 2, 2, 3]


def test_a_rank_that_takes_no_part_any_more_leaves_alone():
    channel = GivenChannel([Wake(1)], [Suspend(1, [True, False])])
    engine = ElasticEngine()
    assert not run_elastic(channel, engine) and engine.num_suspended == 0


def test_a_rank_that_joins_waits_until_it_is_admitted():
    channel = GivenChannel([], [Admit()])
    start_engine.wait_admitted(channel)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the slot is taken"):
        start_engine.wait_admitted(GivenChannel([Refused("the slot is taken")]))  # type: ignore[arg-type]


def test_without_the_flag_a_lost_rank_ends_the_loop():
    engine = ElasticEngine(RankLostError(1, 2, 0, "dispatch"))  # type: ignore
    with pytest.raises(RankLostError):
        run(GivenChannel([Wake(1)]), engine)
    assert engine.group.interrupt is None
