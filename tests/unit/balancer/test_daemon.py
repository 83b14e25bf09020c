"""Daemon: what it plans and posts, whom it waits for. The real server's turn is in tests/serve/test_rebalance.py."""

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.controller import Controller
from eprt.balancer.daemon import Daemon
from eprt.balancer.remote import RemoteServer
from eprt.balancer.trigger import TriggerConfig

from tests.unit.balancer.played_server import FIRST, RATE_E, PlayedServer


def make(played: PlayedServer, slow_ranks: bool = False, **options) -> Daemon:
    return Daemon(RemoteServer(played.url, played.key), Controller(TriggerConfig(**options)), 5.0, slow_ranks)


def poll_states(daemon: Daemon, count: int) -> list[str]:
    return [daemon.poll().state for _ in range(count)]


def test_it_watches_plans_posts_and_follows(played):
    daemon = make(played)
    assert poll_states(daemon, 3) == ["watching"] * 3 and daemon.pause_s == 5
    status = daemon.poll()
    assert status.state == "migrating" and status.decision.migrate and daemon.job_id == 1 and daemon.pause_s < 1
    assert status.max_over_mean == pytest.approx(1.6) and status.lifetime_s == pytest.approx(15, rel=0.1)
    assert played.posted[0].gpu_load([RATE_E]).max() == 500
    assert "migrate: worth it" in status.news and "max/mean 1.600 over 3 windows" in str(status)
    assert poll_states(daemon, 2) == ["migrating"] * 2
    played.end_migration()
    status = daemon.poll()
    assert status.state == "watching" and "migration 1 done: 1 experts in 0.1 s" in status.news
    assert daemon.job_id is None and daemon.pause_s == 5 and status.epoch == 1
    assert poll_states(daemon, 9) == ["watching"] * 9 and len(played.posted) == 1
    assert daemon.poll().max_over_mean == pytest.approx(1.0)


def test_a_migration_that_failed_is_not_tried_again_at_once(played):
    daemon = make(played, cooldown_s=0)
    poll_states(daemon, 4)
    played.end_migration("rolled_back", "the deadline of the round passed, says rank 1")
    assert "migration 1 rolled_back: 1 experts in 0.1 s: the deadline" in daemon.poll().news
    assert poll_states(daemon, 6) == ["watching"] * 6 and len(played.posted) == 1


def test_dry_run_posts_nothing_and_a_server_that_balances_itself_is_left_alone(played):
    daemon = make(played, dry_run=True)
    poll_states(daemon, 3)
    status = daemon.poll()
    assert status.state == "watching" and status.decision.verdict == "dry_run"
    played.mode = "auto"
    daemon = make(played)
    status = [daemon.poll() for _ in range(6)][-1]
    assert status.state == "standing by" and "--rebalance auto" in status.news
    assert not played.posted


def test_it_waits_for_a_server_longer_and_longer(played):
    daemon, pauses = make(played), []
    played.failure = (503, "no new requests: the model is loading")
    for _ in range(7):
        status = daemon.poll()
        pauses.append(daemon.pause_s)
    assert status.state == "unreachable" and status.news.endswith("answers 503: no new requests: the model is loading")
    assert pauses == [0.5, 1, 2, 4, 5, 5, 5]
    played.failure = None
    assert daemon.poll().state == "watching" and daemon.pause_s == 5
    played.failure = (409, "this model has no MoE layers")
    assert daemon.poll().state == "refused" and daemon.pause_s == 0.5
    nobody = Daemon(RemoteServer("http://127.0.0.1:9"), Controller())
    status = nobody.poll()
    assert status.state == "unreachable" and "no answer: " in status.news


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b"[]",
        b"\xff",
        b'{"server_id": {}}',
        b'{"server_id": "a", "mode": [], "state": 1}',
        b"[" * 100_000,
        b"PK\x03\x04",
    ],
)
def test_answers_of_another_form_do_not_end_it(played, raw):
    daemon = make(played)
    played.raw = raw
    assert poll_states(daemon, 2) == ["refused"] * 2
    played.raw = None
    assert poll_states(daemon, 1) == ["watching"]


def test_a_document_of_another_form_is_told_and_fetched_again(played):
    daemon = make(played)
    assert poll_states(daemon, 1) == ["watching"]
    for name, fields in (("load", {"layers": [None]}), ("placement", {"num_gpus": {}}), ("rebalance", {"epoch": "0"})):
        daemon, played.other = make(played), {name: fields}
        status = daemon.poll()
        assert status.state == "refused" and f"its answers have another form: /v1/eprt/{name}: " in status.news
        played.other = {}
        assert poll_states(daemon, 1) == ["watching"]
    played.other = {"load": {"layers": []}}
    assert daemon.poll().state == "waiting" and daemon.pause_s == 5


@pytest.mark.parametrize("defect", [TypeError, AttributeError, KeyError, IndexError])
def test_a_defect_of_its_own_is_no_answer_of_another_form(played, defect, monkeypatch):
    daemon = make(played)

    def due(now_s: float) -> bool:
        raise defect("ours")

    monkeypatch.setattr(daemon.controller, "due", due)
    with pytest.raises(defect, match="ours"):
        daemon.poll()


def test_after_a_restart_everything_begins_anew(played):
    daemon = make(played)
    poll_states(daemon, 4)
    assert daemon.job_id == 1
    played.restart()
    status = daemon.poll()
    assert daemon.job_id is None and "the server was restarted" in status.news and status.windows == 0
    assert poll_states(daemon, 8) == ["watching"] * 8  # a failed migration is not followed by another at once
    assert len(played.posted) == 1


def test_what_cannot_be_planned_for_is_told_and_tried_again_later(played):
    """The placement of another model than the load's, as while one server takes another's place."""
    daemon = make(played)
    played.serving = Placement(np.array([[0, 1, 2, -1]]), num_gpus=2)
    assert daemon.poll().state == "watching"
    first = daemon.poll()
    assert first.state == "refused" and "load_LE has shape (1, 5)" in first.news and daemon.pause_s < 5
    assert poll_states(daemon, 4) == ["refused"] * 4 and daemon.pause_s == 5 and not played.posted
    played.serving = FIRST
    assert poll_states(daemon, 2) == ["migrating"] * 2 and len(played.posted) == 1


def test_slow_ranks_get_less_where_that_is_wanted(played):
    played.speeds = [1.0, 0.5]
    daemon = make(played, slow_ranks=True)
    poll_states(daemon, 3)
    status = daemon.poll()
    assert status.decision.migrate and status.rank_speeds == [1.0, 0.5] and "slow ranks 1 (0.50)" in str(status)
    load_G = played.posted[0].gpu_load([RATE_E])[0]
    assert load_G[1] < 0.7 * load_G[0], load_G
    assert played.posted_speeds == [1.0, 0.5]
