"""One rank of a benchmark over a wire: joins its groups, measures, and prints what it found as a line of JSON.

What wire_ranks.py starts; knows nothing of what is measured.
"""

import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from eprt.ep.errors import EPError, EPTimeoutError, RankLostError
from eprt.ep.group.int_all_gather import IntAllGather
from eprt.ep.wire.wire_group import WireGroup


class CountingGroup(WireGroup):
    """Counts what this rank gives to the wire."""

    sent_bytes = 0
    _starts: IntAllGather | None = None

    def isend(self, buffer: np.ndarray, peer: int, tag: int):
        self.sent_bytes += buffer.nbytes
        return super().isend(buffer, peer, tag)

    def start_together(self) -> None:
        """A barrier whose deadline is that of messages, not of set-up calls, and whose error names who is missing. Its
        own bytes do not count."""
        if self._starts is None:
            self._starts = IntAllGather(self, 1)
        before = self.sent_bytes
        self._starts.all_gather([0])
        self.sent_bytes = before


def run_rank(measure: Callable[[list[CountingGroup], dict[str, Any]], list[dict[str, Any]]]) -> int:
    """The program of one rank; its exit status. measure: from its groups, one over each wire, and the case's fields to
    what all ranks say alike."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    groups: list[CountingGroup] = []
    try:
        for meeting, wire, listener_fd in case["groups"]:
            listener = None if listener_fd is None else socket.socket(fileno=listener_fd)
            groups.append(CountingGroup(meeting, case["rank"], case["size"], wire=wire, listener=listener))
        cases = measure(groups, case)
    except (EPError, ValueError, OSError) as error:
        said: dict[str, Any] = {"error": str(error)}
        if isinstance(error, EPTimeoutError):
            said["peer"] = error.peer
        if isinstance(error, RankLostError):
            said["peer"] = error.lost
        print(json.dumps(said), flush=True)
        return 1
    print(json.dumps({"cases": cases}), flush=True)
    for group in groups:
        group.close()
    return 0
