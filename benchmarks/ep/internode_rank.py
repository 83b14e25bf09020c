"""One rank of bench_internode: measures dispatch and combine of each case, and prints them as a line of JSON.

    python -m benchmarks.ep.internode_rank '{"groups": [["HOST:PORT", "tcp", null]], "rank": 0, ...}'

Knows nothing of the model.
"""

import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.ep.wire_rank import CountingGroup, run_rank
from benchmarks.tools.timing import Timing
from eprt.ep.config import EPConfig
from eprt.ep.registry import make_backend

_WARMUP = 3


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
        group.start_together()
        start_s = time.perf_counter()
        handle = backend.dispatch_send(x_TH, slot_idx_TK, weights_TK)
        received = backend.dispatch_recv(handle)
        dispatch_s = time.perf_counter() - start_s
        y_RH = backend.combine_buffer(handle, received)
        group.start_together()
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


def measure(groups: list[CountingGroup], case: dict[str, Any]) -> list[dict[str, float]]:
    return [measure_case(groups, case, tokens) for tokens in case["tokens"]]


if __name__ == "__main__":
    sys.exit(run_rank(measure))
