"""LayerStep: one microbatch in one decoder layer. Its methods are the stages that schedules.py puts in order."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.layer_cache import LayerCache
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE


@dataclass
class Microbatch:
    """Tokens that go through the layers together: a step's, or one half of them."""

    batch: ForwardBatch
    x_TH: Tensor  # the residual stream, replaced layer by layer
    index: int = 0  # 1 for the second of two
    plans: dict[str, Any] = field(default_factory=dict)  # what attention made of the batch's lengths, for all layers


class Layer(Protocol):
    """A decoder layer, as its steps see it."""

    mlp: MLP | EPMoE

    def attend(self, microbatch: Microbatch, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """The MLP's normalised input and the residual stream, both [T, H], behind norm, attention and norm."""
        ...


class LayerStep:
    """The stages of a layer with a dense MLP."""

    h_TH: Tensor  # the MLP's input

    def __init__(self, layer: Layer, microbatch: Microbatch, cache: LayerCache):
        self.layer, self.microbatch, self.cache = layer, microbatch, cache
        self.events: dict[str, Any] = {}  # stage -> its end, where another lane waits for it (lanes.py)

    def attention(self) -> None:
        self.h_TH, self.microbatch.x_TH = self.layer.attend(self.microbatch, self.cache)

    def mlp(self) -> None:
        self.microbatch.x_TH = self.microbatch.x_TH + self.layer.mlp(self.h_TH)
