"""Roster: the two rounds of a change, losses amid it, and ranks that come and go between two steps."""

import pytest

from eprt.serve.ranks.messages import ExpertsLoaded, Go, LoadExperts, Resume, Resumed, Suspend, Suspended
from eprt.serve.ranks.recovery import CapacityError
from eprt.serve.ranks.roster import Roster

HELD = {0: [[0, 1]], 1: [[1, 2]], 2: [[2, 0]]}
PIDS = [7, 8, 9]


class Server:
    """Three ranks of two slots each, three experts."""

    def __init__(self, num_experts: int = 3, defers_loading: bool = False):
        self.sent: list[tuple[int, object]] = []
        self.roster = Roster(
            3, lambda rank, message: self.sent.append((rank, message)), lambda: num_experts, defers_loading
        )

    def take_sent(self) -> list[tuple[int, object]]:
        sent, self.sent = self.sent, []
        return sent

    def suspended(self, rank: int, epoch: int = 0, placement_epoch: int = 0) -> None:
        number = self.roster.number
        self.roster.on_suspended(rank, Suspended(number, HELD[rank], epoch, placement_epoch), PIDS)

    def resumed(self, rank: int, seq: int = 9):
        return self.roster.on_resumed(rank, Resumed(self.roster.number), seq)


def test_a_loss_takes_the_others_to_the_next_view():
    server = Server()
    roster = server.roster
    roster.begin([True, False, True])
    suspend = Suspend(1, [True, False, True])
    assert server.take_sent() == [(0, suspend), (2, suspend)] and roster.changing and not roster.is_whole
    server.suspended(2, epoch=5, placement_epoch=7)
    assert server.take_sent() == []
    server.suspended(0, epoch=8)
    resume = Resume(1, [[0, 1, -1, -1, 2, 0]], 9, 8, PIDS)
    assert server.take_sent() == [(0, resume), (2, resume)]
    assert server.resumed(0) is None and server.take_sent() == []
    view = server.resumed(2)
    assert server.take_sent() == [(0, Go(1, 9)), (2, Go(1, 9))] and not roster.changing
    assert (view.number, view.alive, view.returned) == (1, (True, False, True), ())
    assert view.rows == resume.rows and view.placement_epoch == 8 and roster.num_changes == 1
    assert roster.members == [0, 2]


def test_a_loss_amid_a_change_begins_it_anew():
    server = Server()
    roster = server.roster
    roster.begin([True, False, True])
    server.suspended(0)
    server.take_sent()
    roster.begin([True, False, False])
    assert server.take_sent() == [(0, Suspend(2, [True, False, False]))]
    roster.on_suspended(0, Suspended(1, HELD[0], 0, 0), PIDS)  # the answer to the first
    assert server.take_sent() == []
    with pytest.raises(CapacityError, match="1 rank of 2 slots per MoE layer hold 2 experts; the model has 3"):
        server.suspended(0)


def test_a_late_resumed_of_an_earlier_view_counts_for_nothing():
    server = Server()
    roster = server.roster
    roster.begin([True, False, True])
    server.suspended(0), server.suspended(2)
    roster.begin([True, False, True])
    assert roster.on_resumed(0, Resumed(1), 1) is None
    server.suspended(0), server.suspended(2)
    assert server.resumed(2) is None and server.resumed(0) is not None


def test_a_rank_enters_between_two_steps_and_is_ready():
    server = Server()
    roster = server.roster
    roster.begin([True, False, True])
    for answer in (server.suspended, server.resumed):
        answer(0), answer(2)
    roster.set_state(1, "warming")
    server.take_sent()
    roster.begin([True] * 3, after_seq=4)
    told = dict(server.take_sent())
    assert told[0].after_seq == told[2].after_seq == 4 and told[1].after_seq is None, "it was in no step"
    for rank in range(3):
        server.suspended(rank)
    views = [server.resumed(rank) for rank in range(3)]
    assert views[2].returned == (1,) and views[2].rows == [[0, 1, 1, 2, 2, 0]]
    assert roster.slots[1].state == "ready" and roster.slots[1].view == 2 and roster.is_whole


def test_a_rank_that_leaves_is_told_and_not_waited_for():
    server = Server()
    server.roster.begin([True, True, False], after_seq=3, leaving=[2])
    assert [rank for rank, _ in server.take_sent()] == [0, 1, 2]
    server.suspended(0), server.suspended(1)
    assert server.roster.changing
    assert server.resumed(0) is None and server.resumed(1) is not None


def test_ranks_serve_while_they_read_what_was_lost():
    """Of four experts, one is lost with rank 1. The slot that is to get it holds a replica until then."""
    server = Server(num_experts=4, defers_loading=True)
    roster = server.roster
    roster.begin([True, False, True])
    server.suspended(0)
    held = Suspended(1, [[2, 0]], 0, 0)
    roster.on_suspended(2, held, PIDS)
    whole, reduced = [[3, 1, -1, -1, 2, 0]], [[-1, 1, -1, -1, 2, 0]]
    resume = Resume(1, reduced, 1, 1, PIDS, lacks_experts=True)
    assert [message for _, message in server.take_sent()[-2:]] == [resume, resume]
    server.resumed(0)
    view = server.resumed(2)
    assert view.num_missing == roster.num_missing == 1 and view.rows == reduced
    sent = [(rank, message) for rank in (0, 2) for message in (LoadExperts(1, whole), Go(1, 9))]
    assert server.take_sent() == sent and not roster.is_whole and not roster.has_loaded
    roster.on_loaded(0, ExpertsLoaded(1))
    roster.on_loaded(2, ExpertsLoaded(0))  # of another view
    assert not roster.has_loaded
    roster.on_loaded(2, ExpertsLoaded(1))
    assert roster.has_loaded
    roster.begin([True, False, True], after_seq=12)
    assert not roster.has_loaded
    roster.on_suspended(0, Suspended(2, [[3, 1]], 5, 1), PIDS)
    roster.on_suspended(2, Suspended(2, [[2, 0]], 5, 1), PIDS)
    assert server.take_sent()[-1] == (2, Resume(2, whole, 6, 2, PIDS))
    server.resumed(0)
    assert server.resumed(2).num_missing == 0 == roster.num_missing
    assert [type(message) for _, message in server.take_sent()] == [Go, Go]


def test_nobody_serves_without_experts_unless_that_is_asked_for():
    server = Server(num_experts=4)
    server.roster.begin([True, False, True])
    server.suspended(0)
    server.roster.on_suspended(2, Suspended(1, [[2, 0]], 0, 0), PIDS)
    assert server.take_sent()[-1] == (2, Resume(1, [[3, 1, -1, -1, 2, 0]], 1, 1, PIDS))
