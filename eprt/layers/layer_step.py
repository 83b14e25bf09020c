"""LayerStep: one microbatch in one decoder layer. Its methods are the stages that schedules.py puts in order."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE


@dataclass
class Microbatch:
    """Tokens that go through the layers together: a step's, or one half of them."""

    batch: ForwardBatch
    x_TH: Tensor  # the residual stream, replaced layer by layer; of several streams [T, M, H]
    index: int = 0  # 1 for the second of two
    plans: dict[str, Any] = field(default_factory=dict)  # what attention made of the batch's lengths, for all layers
    mix: Any = None  # how the layer adds its MLP's output, where that depends on its input (hyper_connections.py)


class Layer(Protocol):
    """A decoder layer, as its steps see it."""

    mlp: MLP | EPMoE

    def attend(self, microbatch: Microbatch, cache: Any) -> tuple[Tensor, Tensor]:
        """The MLP's normalised input [T, H] and the residual stream, behind norm, attention and norm.

        cache: of the kind that the layer's attention writes.
        """
        ...

    def add_output(self, microbatch: Microbatch, y_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        """The residual stream behind the MLP, whose output is the sum of both."""
        ...


class LayerStep:
    """The stages of a layer with a dense MLP."""

    h_TH: Tensor  # the MLP's input

    def __init__(self, layer: Layer, microbatch: Microbatch, cache: Any):
        self.layer, self.microbatch, self.cache = layer, microbatch, cache
        self.events: dict[str, Any] = {}  # stage -> its end, where another lane waits for it (lanes.py)

    def attention(self) -> None:
        self.h_TH, self.microbatch.x_TH = self.layer.attend(self.microbatch, self.cache)

    def mlp(self) -> None:
        self.microbatch.x_TH = self.layer.add_output(self.microbatch, self.layer.mlp(self.h_TH), None)
