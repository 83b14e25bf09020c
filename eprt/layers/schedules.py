"""Overlap schedules: which stages of a layer run concurrently.

A schedule lists the stages of one layer in the order in which the host starts them for one microbatch. A stage has a
lane: on GPUs each lane is a CUDA stream (lanes.py), elsewhere all are one thread. `needs` names the stages on other
lanes that a stage waits for; without it a COMM or SIDE stage waits for everything started on COMPUTE before it.

Two-batch overlap (TBO): a step's tokens are two microbatches, a and b, that take turns at every PAUSE. Of one layer:

    compute   attention a | attention b | experts a  | experts b | shared a | attention a, next layer | shared b | ...
    comm                  | dispatch a  | dispatch b | combine a |  combine b  ...

Single-batch overlap (SBO): one microbatch, for decodes.

    compute   attention | gate | dispatch | experts: up, then down projection | combine | ...
    side                | shared expert ...   | count

and where sending takes long enough (sm_split.py), combine send runs beside the down projection, on SMs of its own:

    comm                                  | combine send: each tile of rows when it is there |

Without overlap, tokens travel beside the shared expert where the backend sends in the background (PLAIN); else dispatch
is one call, before the shared expert (IN_TURN). A rank that has all experts sends nothing: its decodes go from gate to
combine in one operator (ALONE).

Every rank follows the same schedule in a step, so that all ranks' exchanges come in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eprt.layers.layer_step import LayerStep
from eprt.layers.moe_step import MoEStep

COMPUTE, COMM, SIDE = "compute", "comm", "side"
Work = Callable[[Any], None]  # a method of LayerStep or MoEStep


@dataclass(frozen=True)
class Stage:
    """One call of a step's method, on one lane."""

    work: Work
    lane: str = COMPUTE
    needs: tuple[Work, ...] = ()  # stages of the same step, on other lanes, that it follows
    marks: bool = False  # on COMPUTE only: records an event, as a stage on another lane has it in `needs`

    @property
    def name(self) -> str:
        return self.work.__name__


def _pause(step: LayerStep) -> None:
    """Nothing: here the other microbatch takes its turn."""


PAUSE = Stage(_pause)

DENSE = (Stage(LayerStep.attention), Stage(LayerStep.mlp))

PLAIN = (
    Stage(MoEStep.attention),
    Stage(MoEStep.gate),
    Stage(MoEStep.dispatch_send),
    Stage(MoEStep.shared),  # while tokens travel
    Stage(MoEStep.dispatch_recv),
    Stage(MoEStep.count),
    Stage(MoEStep.experts),
    Stage(MoEStep.combine),
    Stage(MoEStep.add),
)

IN_TURN = (
    Stage(MoEStep.attention),
    Stage(MoEStep.gate),
    Stage(MoEStep.dispatch),
    Stage(MoEStep.shared),
    Stage(MoEStep.count),
    Stage(MoEStep.experts),
    Stage(MoEStep.combine),
    Stage(MoEStep.add),
)

# Where all experts are on this rank and a step has decodes alone: one operator from gate to combine.
ALONE = (
    Stage(MoEStep.attention),
    Stage(MoEStep.mix),
    Stage(MoEStep.add),
)

TWO_BATCH = (
    Stage(MoEStep.attention),
    Stage(MoEStep.gate),
    Stage(MoEStep.dispatch_send, COMM),
    Stage(MoEStep.dispatch_start, COMM),
    PAUSE,  # attention or experts of the other, while these tokens travel
    Stage(MoEStep.dispatch_recv, needs=(MoEStep.dispatch_start,)),
    Stage(MoEStep.count),
    Stage(MoEStep.experts),
    Stage(MoEStep.combine_send, COMM),
    Stage(MoEStep.combine_start, COMM),
    PAUSE,  # experts or attention of the other, while these outputs travel
    Stage(MoEStep.shared),
    Stage(MoEStep.combine_recv, needs=(MoEStep.combine_start,)),
    Stage(MoEStep.add),
)

SINGLE_BATCH = (
    Stage(MoEStep.attention),
    Stage(MoEStep.shared, SIDE),
    Stage(MoEStep.gate),
    Stage(MoEStep.dispatch),
    Stage(MoEStep.count, SIDE),
    Stage(MoEStep.experts),
    Stage(MoEStep.combine),
    Stage(MoEStep.add, needs=(MoEStep.shared, MoEStep.count)),
)

SINGLE_BATCH_TILES = (
    Stage(MoEStep.attention),
    Stage(MoEStep.shared, SIDE),
    Stage(MoEStep.gate),
    Stage(MoEStep.dispatch_send),
    Stage(MoEStep.dispatch_recv, marks=True),
    Stage(MoEStep.count, SIDE),
    Stage(MoEStep.experts),
    # Its kernel waits on the GPU for what the experts write, so the host must launch the experts first: loading
    # code or taking memory may need an idle GPU, which it would prevent. It runs beside them, on SMs they leave free.
    Stage(MoEStep.combine_send, COMM, needs=(MoEStep.dispatch_recv,)),
    Stage(MoEStep.combine_recv, needs=(MoEStep.combine_send,)),
    Stage(MoEStep.add, needs=(MoEStep.shared, MoEStep.count)),
)
