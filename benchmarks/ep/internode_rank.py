"""One rank of bench_internode: measures dispatch and combine of each case, and prints them as a line of JSON.

    python -m benchmarks.ep.internode_rank '{"groups": [["HOST:PORT", "tcp", null]], "rank": 0, ...}'

Knows nothing of the model.
"""

import json
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.tools.timing import Timing
from eprt.ep.config import EPConfig
from eprt.ep.errors import EPError, EPTimeoutError, RankLostError
from eprt.ep.registry import make_backend
from eprt.ep.wire.wire_group import WireGroup

_WARMUP = 3


class CountingGroup(WireGroup):
    """Counts what this rank gives to the wire."""

    sent_bytes = 0

    def isend(self, buffer: np.ndarray, peer: int, tag: int):
        self.sent_bytes += buffer.nbytes
        return super().isend(buffer, peer, tag)


@dataclass
class Candidate:
    """One wire's exchange of a case, and what was measured of it."""

    group: CountingGroup
    backend: Any
    dispatch_s: list[float] = field(default_factory=list)
    combine_s: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)

    def call(self, x_TH: torch.Tensor, slot_idx_TK: torch.Tensor, weights_TK: torch.Tensor, counts: bool) -> None:
        group, backend, before = self.group, self.backend, self.group.sent_bytes
        group.barrier()
        start_s = time.perf_counter()
        handle = backend.dispatch_send(x_TH, slot_idx_TK, weights_TK)
        received = backend.dispatch_recv(handle)
        dispatch_s = time.perf_counter() - start_s
        y_RH = backend.combine_buffer(handle, received)
        group.barrier()
        start_s = time.perf_counter()
        backend.combine_send(y_RH, handle)
        backend.combine_recv(handle)
        combine_s = time.perf_counter() - start_s
        if counts:
            self.dispatch_s.append(dispatch_s)
            self.combine_s.append(combine_s)
            self.sent_bytes.append(group.sent_bytes - before)

    def columns(self) -> dict[str, float]:
        """The same on all ranks: the slowest rank's medians."""
        dispatch, combine = Timing.from_samples(self.dispatch_s), Timing.from_samples(self.combine_s)
        mine = {**dispatch.columns("dispatch", "ms"), **combine.columns("combine", "ms")}
        everyones = self.group.allgather((mine, float(np.mean(self.sent_bytes))))
        columns = {name: max(one[name] for one, _ in everyones) for name in mine}
        return {"sent_kB": float(np.mean([num for _, num in everyones])) / 1e3, **columns}


def measure_case(groups: list[CountingGroup], case: dict[str, Any], tokens: int) -> dict[str, float]:
    """Columns of the report, the same on all ranks. groups: over the wire, and over one without a pace, if there is
    one; their calls take turns."""
    hidden, experts, top_k = case["hidden"], case["experts"], case["top_k"]
    config = EPConfig(hidden, experts, top_k, tokens)
    candidates = [Candidate(group, make_backend("cpu", config, group)) for group in groups]
    generator = torch.Generator().manual_seed(groups[0].rank)
    x_TH = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    weights_TK = torch.full((tokens, top_k), 1 / top_k)
    for call in range(_WARMUP + case["calls"]):
        slot_idx_TK = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
        for candidate in candidates:
            candidate.call(x_TH, slot_idx_TK, weights_TK, counts=call >= _WARMUP)
    columns = candidates[0].columns()
    for candidate in candidates[1:]:
        without = candidate.columns()
        columns["cpu_ms"] = without["dispatch_ms"] + without["combine_ms"]
    for candidate in candidates:
        candidate.backend.close()
    return columns


def main() -> int:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    groups: list[CountingGroup] = []
    try:
        for meeting, wire, listener_fd in case["groups"]:
            listener = None if listener_fd is None else socket.socket(fileno=listener_fd)
            groups.append(CountingGroup(meeting, case["rank"], case["size"], wire=wire, listener=listener))
        cases = [measure_case(groups, case, tokens) for tokens in case["tokens"]]
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


if __name__ == "__main__":
    sys.exit(main())
