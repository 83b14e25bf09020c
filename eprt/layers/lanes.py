"""Lanes: what runs the stages of a schedule. On GPUs every lane is a CUDA stream; the compute lane is the caller's.

Streams fork and meet by events alone, so that a step may be captured in a CUDA graph. Memory: what a stage allocates
belongs to its stream, and torch gives it to later work of that stream only. A stage on another lane that allocates
waits for all that the compute lane was given before; so a tensor of such a lane may be dropped as soon as its last
reader on the compute lane is launched. A tensor of the compute lane that another lane reads stays in the step until
they have met.
"""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from eprt.layers.layer_step import LayerStep
from eprt.layers.schedules import COMM, COMPUTE, SIDE, Stage


class Lanes:
    """Runs stages, here all in the caller's order."""

    trace: Callable[[Stage, int], Any] | None = None  # a context around each stage; its microbatch's index
    _attention_ns = 0

    def run(self, stage: Stage, step: LayerStep) -> None:
        if stage.work is not LayerStep.attention:
            self._do_work(stage, step)
            return
        began_ns = perf_counter_ns()
        self._do_work(stage, step)
        self._attention_ns += perf_counter_ns() - began_ns

    def attention_us(self) -> float | None:
        """Time in attention, with the norms around it, since the start; None where the host cannot tell."""
        return self._attention_ns / 1e3

    def _do_work(self, stage: Stage, step: LayerStep) -> None:
        if self.trace is None:
            stage.work(step)
        else:
            with self.trace(stage, step.microbatch.index):
                stage.work(step)


class StreamLanes(Lanes):
    """On the current GPU. Communication goes before computation where both ask for a place (stream priority)."""

    def __init__(self):
        self._streams = {COMM: torch.cuda.Stream(priority=-1), SIDE: torch.cuda.Stream()}

    def run(self, stage: Stage, step: LayerStep) -> None:
        compute = torch.cuda.current_stream()
        stream = compute if stage.lane == COMPUTE else self._streams[stage.lane]
        if stream is not compute and not stage.needs:
            stream.wait_stream(compute)
        for work in stage.needs:
            stream.wait_event(step.events.pop(work.__name__))
        with torch.cuda.stream(stream):
            self._do_work(stage, step)
        if stream is not compute or stage.marks:
            step.events[stage.name] = stream.record_event()

    def attention_us(self) -> float | None:
        return None
