"""What of a layer runs beside what: schedules, and the executor that takes microbatches through them.

A schedule lists the stages of one layer in the order in which the host starts them for one microbatch. A stage has a
lane: on GPUs each lane is a CUDA stream (lanes.py), elsewhere all are one thread. A stage names what it needs of other
lanes; one that is not on the compute lane and names nothing needs all that was started on the compute lane before it.

Two-batch overlap (TBO): a step's tokens are two microbatches, a and b, that take turns at every PAUSE. Of one layer:

    compute   attention a | attention b | experts a  | experts b | shared a | attention a, next layer | shared b | ...
    comm                  | dispatch a  | dispatch b | combine a |  combine b  ...

Single-batch overlap (SBO): one microbatch, for decodes.

    compute   attention | gate | dispatch | experts: up, then down projection | combine | ...
    side                | shared expert ...

and where sending takes long enough (sm_split.py), tile by tile beside the down projection, on SMs of its own:

    comm                                  | combine send: each tile of rows when it is there |

Every rank follows the same schedule in a step, so that all ranks' exchanges come in the same order.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, EPBackend, Received
from eprt.layers.batch import ForwardBatch

COMPUTE, COMM, SIDE = "compute", "comm", "side"
Work = Callable[["Microbatch"], None]  # of one stage


@dataclass(frozen=True)
class Stage:
    """name: key of Layer.stages. needs: stages of the same microbatch and layer, on other lanes, that it follows.
    marks: it is on the compute lane, and a stage on another lane needs it alone."""

    name: str
    lane: str = COMPUTE
    needs: tuple[str, ...] = ()
    marks: bool = False


PAUSE = Stage("pause")

DENSE = (Stage("attention"), Stage("mlp"))

# rounds: EXCHANGE, as often as the rank with the most tokens needs it.
PLAIN = (Stage("attention"), Stage("gate"), Stage("rounds"), Stage("add"))
EXCHANGE = (
    Stage("dispatch_send"),
    Stage("shared"),  # while tokens travel
    Stage("receive"),
    Stage("experts"),
    Stage("combine_send"),
    Stage("combine_recv"),
)

TWO_BATCH = (
    Stage("attention"),
    Stage("gate"),
    Stage("dispatch_send", COMM),
    Stage("dispatch_start", COMM),
    PAUSE,  # attention or experts of the other, while these tokens travel
    Stage("receive", needs=("dispatch_start",)),
    Stage("experts"),
    Stage("combine_send", COMM),
    Stage("combine_start", COMM),
    PAUSE,  # experts or attention of the other, while these outputs travel
    Stage("shared"),
    Stage("combine_recv", needs=("combine_start",)),
    Stage("add"),
)

SINGLE_BATCH = (
    Stage("attention"),
    Stage("shared", SIDE),
    Stage("gate"),
    Stage("dispatch"),
    Stage("experts"),
    Stage("combine"),
    Stage("add", needs=("shared",)),
)

SINGLE_BATCH_TILES = (
    Stage("attention"),
    Stage("shared", SIDE),
    Stage("gate"),
    Stage("dispatch_send"),
    Stage("receive"),
    Stage("signals", marks=True),
    Stage("experts"),
    # Waits on the GPU for what the experts write, so it must be launched behind them: to load a kernel or to take
    # memory the host may have to wait until the GPU is idle. It begins beside them, on SMs that they leave free.
    Stage("combine_send", COMM, needs=("signals",)),
    Stage("combine_recv", needs=("combine_send",)),
    Stage("add", needs=("shared",)),
)


class Lanes:
    """Runs stages, here all in the caller's order. trace(stage, index), if set, is a context around each."""

    trace: Callable[[Stage, int], Any] | None = None

    def run(self, stage: Stage, microbatch: "Microbatch", work: Work) -> None:
        if self.trace is None:
            work(microbatch)
        else:
            with self.trace(stage, microbatch.index):
                work(microbatch)


@dataclass
class Microbatch:
    """Tokens on their way through the layers, and what each stage leaves for later ones.

    index: 0, or 1 for the second of two. lanes: what runs its stages. x_TH: the residual stream. h_TH: the MLP's input.
    logits_TE: the gate's. ep: the exchange of this step's mode. y_RH: the experts' outputs, y_TH: their sums.
    shared_TH: of the shared expert. signal: tells combine_send which rows are there. done: events that lanes wait
    for. plans: what attention made of the batch's lengths, for all layers.

    Tensors made on one lane and read on another stay here until the same stage of the next layer: by then the lanes
    have met, so that their memory may be used again.
    """

    batch: ForwardBatch
    x_TH: Tensor
    index: int = 0
    lanes: Lanes = field(default_factory=Lanes)
    kv_pages: Tensor = None  # type: ignore[assignment]
    h_TH: Tensor = None  # type: ignore[assignment]
    logits_TE: Tensor = None  # type: ignore[assignment]
    weights_TK: Tensor = None  # type: ignore[assignment]
    slot_idx_TK: Tensor = None  # type: ignore[assignment]
    ep: EPBackend = None  # type: ignore[assignment]
    num_rounds: int = 1
    handle: DispatchHandle = None  # type: ignore[assignment]
    received: Received = None  # type: ignore[assignment]
    y_RH: Tensor = None  # type: ignore[assignment]
    y_TH: Tensor = None  # type: ignore[assignment]
    shared_TH: Tensor | None = None
    signal: Any = None
    done: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, Any] = field(default_factory=dict)

    def of_rows(self, rows: slice) -> "Microbatch":
        """Some of its tokens, on their way through one exchange."""
        return Microbatch(
            self.batch, self.x_TH, self.index, self.lanes, h_TH=self.h_TH[rows], ep=self.ep,
            weights_TK=self.weights_TK[rows], slot_idx_TK=self.slot_idx_TK[rows],
        )  # fmt: skip


class Layer(Protocol):
    """A layer of the model, as the executor sees it. stages: by name; each reads and writes the microbatch."""

    stages: dict[str, Work]

    def schedule(self, batch: ForwardBatch) -> tuple[Stage, ...]: ...


def stages_of(*works: Work) -> dict[str, Work]:
    """Methods of a layer as its stages: _experts does the work of the stage "experts"."""
    return {work.__name__.removeprefix("_"): work for work in works}


def run_layers(
    layers: Sequence[Layer], x_TH: Tensor, batch: ForwardBatch, kv_pages_L: Sequence[Tensor] | Tensor, lanes: Lanes
) -> Tensor:
    """The residual stream behind the layers. Two microbatches if batch.overlap is "tbo", else one."""
    if batch.overlap == "tbo":
        first, second = batch.halves()
        at = first.num_tokens
        microbatches = [Microbatch(first, x_TH[:at], 0, lanes), Microbatch(second, x_TH[at:], 1, lanes)]
    else:
        microbatches = [Microbatch(batch, x_TH, 0, lanes)]
    for _ in zip_longest(*(_walk(layers, microbatch, kv_pages_L) for microbatch in microbatches)):
        pass
    results = [microbatch.x_TH for microbatch in microbatches]
    return results[0] if len(results) == 1 else torch.cat(results)


def _walk(
    layers: Sequence[Layer], microbatch: Microbatch, kv_pages_L: Sequence[Tensor] | Tensor
) -> Generator[None, None, None]:
    """Takes one microbatch through all layers; yields at every PAUSE."""
    for layer, kv_pages in zip(layers, kv_pages_L, strict=True):
        microbatch.kv_pages = kv_pages
        for stage in layer.schedule(microbatch.batch):
            if stage is PAUSE:
                yield
            else:
                microbatch.lanes.run(stage, microbatch, layer.stages[stage.name])
