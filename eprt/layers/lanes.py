"""StreamLanes: every lane of a schedule is a CUDA stream; the compute lane is the caller's.

Streams fork and meet by events alone, so that a step may be captured in a CUDA graph. Memory: what a stage allocates
belongs to its stream, and torch gives it to later work of that stream only. A stage on another lane that allocates
waits for all that the compute lane was given before; so a tensor of such a lane may be dropped as soon as its last
reader on the compute lane is launched. A tensor of the compute lane that another lane reads stays in the Microbatch
until they have met.
"""

import torch

from eprt.layers.overlap import COMM, COMPUTE, SIDE, Lanes, Microbatch, Stage, Work


class StreamLanes(Lanes):
    """On the current GPU. Communication goes before computation where both ask for a place (stream priority)."""

    def __init__(self):
        self._streams = {COMM: torch.cuda.Stream(priority=-1), SIDE: torch.cuda.Stream()}

    def run(self, stage: Stage, microbatch: Microbatch, work: Work) -> None:
        compute = torch.cuda.current_stream()
        stream = compute if stage.lane == COMPUTE else self._streams[stage.lane]
        if stream is not compute and not stage.needs:
            stream.wait_stream(compute)
        for name in stage.needs:
            stream.wait_event(microbatch.done.pop(name))
        with torch.cuda.stream(stream):
            super().run(stage, microbatch, work)
        if stream is not compute or stage.marks:
            microbatch.done[stage.name] = stream.record_event()
