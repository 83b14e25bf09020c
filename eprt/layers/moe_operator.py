"""EPMoE as an opaque operator of torch, for torch.compile: the compiler sees shapes, the layer computes.

A compiled program names its layer by a number; the layers of this process are found by it while they live. Knows
nothing of what a layer computes.
"""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# (hidden, token ids, mode) -> hidden, or (hidden, router logits)
Forward = Callable[[Tensor, Tensor | None, str | None], Any]


_numbers = itertools.count()
_layers: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def number_layer(layer: Any) -> Tensor:
    """A number for the layer, by which it is found while it lives. A tensor, so that a compiled program for one layer
    serves all of its shape; on the CPU, so that no GPU is waited for."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def _forward_of(layer: Tensor) -> Forward:
    number = int(layer.item())
    if number not in _layers:
        raise RuntimeError(
            f"a compiled or exported program calls EPMoE number {number}, which this process does not have; run the "
            "program in the process that made it, while the model lives"
        )
    return _layers[number].forward_now


# layer: said to change, so that the compiler neither drops nor merges nor exchanges calls of a layer: ranks would wait
# for each other. It does not: what a call really changes, the layer's counts, no program sees.
@torch.library.custom_op("eprt::moe", mutates_args=("layer",))
def moe(hidden: Tensor, token_ids: Tensor | None, layer: Tensor, exchange_mode: str | None) -> Tensor:
    return _forward_of(layer)(hidden, token_ids, exchange_mode)


@moe.register_fake
def _(hidden: Tensor, token_ids: Tensor | None, layer: Tensor, exchange_mode: str | None) -> Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("eprt::moe_with_logits", mutates_args=("layer",))
def moe_with_logits(
    hidden: Tensor, token_ids: Tensor | None, layer: Tensor, exchange_mode: str | None, num_experts: int
) -> tuple[Tensor, Tensor]:
    return _forward_of(layer)(hidden, token_ids, exchange_mode)


@moe_with_logits.register_fake
def _(
    hidden: Tensor, token_ids: Tensor | None, layer: Tensor, exchange_mode: str | None, num_experts: int
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(math.prod(hidden.shape[:-1]), num_experts)
