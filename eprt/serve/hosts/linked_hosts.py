"""LinkedHosts: the other hosts of a running server, as the launcher of host 0 hears and tells them."""

from collections.abc import Sequence

from eprt.serve.hosts.messages import Ended, RankEnded, Serving, StopAsked
from eprt.serve.hosts.roll_call import OtherHost
from eprt.serve.ranks.other_hosts import HostEvent, HostLoss, HostStop, OtherHosts
from eprt.serve.ranks.slots import RankEnd


class LinkedHosts(OtherHosts):
    """hosts: those that have come, which are told to begin."""

    def __init__(self, hosts: Sequence[OtherHost]):
        self._hosts = list(hosts)  # without those that were lost
        self._ended = False

    def filenos(self) -> list[int]:
        return [host.link.fileno() for host in self._hosts]

    def take_events(self) -> list[HostEvent]:
        events: list[HostEvent] = []
        for host in list(self._hosts):
            for message in host.link.receive(0):
                match message:
                    case StopAsked():
                        events.append(HostStop())
                    case RankEnded(rank, pid, status):
                        events.append(RankEnd(rank, pid, status, host=host.card.name))
            if host.link.is_lost:
                self._hosts.remove(host)
                host.link.close()
                events.append(HostLoss(f"{host.card} was lost: its launcher is gone"))
        return events

    def tell_serving(self) -> None:
        for host in self._hosts:
            host.link.send(Serving())

    def tell_ended(self, status: int, reason: str) -> None:
        """Only the first call counts."""
        if not self._ended:
            self._ended = True
            for host in self._hosts:
                host.link.send(Ended(status, reason))
                host.link.close()
            self._hosts.clear()
