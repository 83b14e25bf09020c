"""Lanes as CUDA streams: which fork, which meet, and when. The streams are fakes that note who waits for whom."""

import contextlib

import torch

from eprt import EPGroup
from eprt.ep.config import EPConfig
from eprt.ep.registry import make_backend
from eprt.layers.lanes import StreamLanes
from eprt.layers.layer_step import Microbatch
from eprt.layers.moe_step import MoEStep
from eprt.layers.schedules import SINGLE_BATCH_TILES, Stage
from tests.unit.layers.cases import HIDDEN, TOP_K, IdleLayer, IdleMoE, batch_of


class FakeStreams:
    """torch.cuda's streams and events as far as lanes use them: notes who waits for whom."""

    def __init__(self, monkeypatch):
        self.log: list[tuple] = []
        self.current = self.Stream("compute", self.log)
        names = iter(("comm", "side"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: self.Stream(next(names), self.log))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)

    @contextlib.contextmanager
    def _enter(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    class Stream:
        def __init__(self, name, log):
            self.name, self.log = name, log

        def wait_stream(self, other):
            self.log.append((self.name, "joins", other.name))

        def wait_event(self, event):
            self.log.append((self.name, "awaits", event))

        def record_event(self):
            self.log.append((self.name, "records"))
            return f"event {sum(entry[1] == 'records' for entry in self.log)}"


def test_lanes_are_streams_that_fork_and_meet(monkeypatch):
    streams = FakeStreams(monkeypatch)
    backend = make_backend("cpu", EPConfig(HIDDEN, 8, TOP_K, 8, mode="low_latency"), EPGroup.single())
    moe = IdleMoE(EPGroup.single(), {"low_latency": backend}, 8)
    batch = batch_of([1, 1], [3, 3], 2, overlap="sbo", split=None, mode="low_latency")
    microbatch = Microbatch(batch, torch.zeros(2, HIDDEN, dtype=torch.bfloat16))
    step, lanes, seen = MoEStep(IdleLayer(moe), moe, microbatch, torch.empty(0)), StreamLanes(), []

    @contextlib.contextmanager
    def trace(stage: Stage, index: int):
        seen.append((stage.name, streams.current.name, index))
        yield

    lanes.trace = trace
    for stage in SINGLE_BATCH_TILES:
        lanes.run(stage, step)
    assert seen == [(stage.name, stage.lane, 0) for stage in SINGLE_BATCH_TILES]
    assert streams.log == [
        ("side", "joins", "compute"),
        ("side", "records"),
        ("compute", "records"),  # tokens are here, the experts are not launched yet
        ("side", "joins", "compute"),
        ("side", "records"),
        ("comm", "awaits", "event 2"),  # which must not wait for them
        ("comm", "records"),
        ("compute", "awaits", "event 4"),
        ("compute", "awaits", "event 1"),
        ("compute", "awaits", "event 3"),
    ]
    assert not step.events, "what was recorded was waited for"
    backend.close()
