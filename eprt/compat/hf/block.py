"""MoEBlock: a transformers MoE block as eprt needs it: its routing rule, and where its weights are read.

Knows nothing of transformers' classes or of how weights are stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.layers.linear import Matrix

SwigluMatrices = tuple[Matrix, Matrix, Matrix]  # gate, up, down


@dataclass(frozen=True)
class MoEBlock:
    """A mixture-of-experts block: its routing rule and weights."""

    routing: dict[str, Any]  # fields of MoEConfig
    gate_weight_EH: Tensor
    gate_bias_E: Tensor | None  # added to the scores for the choice only
    gate_table_VK: Tensor | None  # the experts of each token id, where these choose them
    num_experts: int
    intermediate_size: int  # of an expert
    expert: Callable[[int], SwigluMatrices]  # the weights of a logical expert
    shared: SwigluMatrices | None  # the shared expert
    dtype: torch.dtype | None = None  # of hidden states, where it is not that of the experts' weights
    device: str | torch.device = "cpu"  # where the weights are; "cpu" for weights that are loaded by name
