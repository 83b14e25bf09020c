"""LinkedHosts: what host 0 hears of other hosts, and tells them."""

import socket

import pytest

from eprt.serve.hosts.link import HostLink
from eprt.serve.hosts.linked_hosts import LinkedHosts
from eprt.serve.hosts.messages import Ended, RankEnded, Serving, StopAsked, ToFirstHost, ToOtherHost
from eprt.serve.hosts.roll_call import OtherHost
from eprt.serve.ranks.other_hosts import HostLoss, HostStop, OtherHosts
from eprt.serve.ranks.slots import RankEnd
from tests.unit.serve.hosts.cases import card

PATIENCE_S = 100.0


@pytest.fixture
def guests():
    """The other ends of two links, and the hosts behind which they are."""
    pairs = [socket.socketpair() for _ in range(2)]
    links = [HostLink(other, ToOtherHost) for _, other in pairs]
    hosts = [
        OtherHost(card(node=1 + i, name=f"h{1 + i}"), HostLink(mine, ToFirstHost)) for i, (mine, _) in enumerate(pairs)
    ]
    linked = LinkedHosts(hosts)
    yield linked, links
    linked.tell_ended(0, "")
    for link in links:
        link.close()


def test_events(guests):
    linked, (one, two) = guests
    assert linked.take_events() == [] and len(linked.filenos()) == 2
    one.send(StopAsked())
    two.send(RankEnded(5, 77, -9))
    assert linked.take_events() == [HostStop(), RankEnd(5, 77, -9, host="h2")]
    assert str(RankEnd(5, 77, -9, host="h2")) == "rank 5 (pid 77, host h2) ended: killed by signal 9"


def test_a_lost_launcher_is_told_once(guests):
    linked, (one, two) = guests
    one.send(StopAsked())
    one.close()
    events = linked.take_events() + linked.take_events()
    assert events == [HostStop(), HostLoss("host 1 (h1) was lost: its launcher is gone")]
    assert str(events[1]) == "host 1 (h1) was lost: its launcher is gone" and len(linked.filenos()) == 1
    linked.tell_serving()
    assert two.receive(PATIENCE_S) == [Serving()]


def test_only_the_first_end_counts(guests):
    linked, links = guests
    linked.tell_ended(1, "rank 3 was lost")
    linked.tell_ended(0, "")
    for link in links:
        assert link.receive(PATIENCE_S) == [Ended(1, "rank 3 was lost")]
        assert link.receive(PATIENCE_S) == [] and link.is_lost
    assert linked.filenos() == [] == linked.take_events()


def test_a_server_of_one_host_has_no_others():
    alone = OtherHosts()
    alone.tell_serving()
    alone.tell_ended(0, "")
    assert alone.filenos() == [] == alone.take_events()
