"""A step of decodes through the experts of a rank that has them all, as one operator (ops.mix_decodes).

Knows nothing of attention and of other ranks.
"""

import operator
from typing import Any

from torch import Tensor

from eprt.layers.experts import Experts
from eprt.layers.gate import Gate
from eprt.layers.mlp import MLP
from eprt.ops.decode_layer import MOST_EXPERT_ROWS, MOST_TOP_K, DecodeExperts


class DecodeParts:
    """One layer's, put together anew where a part has been exchanged."""

    def __init__(self):
        self._parts: tuple = ()
        self._made: DecodeExperts | None = None

    def for_tokens(self, num_tokens: int, *parts: Any) -> DecodeExperts | None:
        """For so many decodes; None where gate, experts and shared expert must be called one by one. parts: of
        decode_experts()."""
        if not self._parts or not all(map(operator.is_, parts, self._parts)):
            self._parts, self._made = parts, decode_experts(*parts)
        made = self._made
        return made if made is not None and 0 < num_tokens * made.rule.top_k <= MOST_EXPERT_ROWS else None


def decode_experts(
    gate: Gate, slot_L: Tensor | None, experts: Experts, shared: MLP | None, load_S: Tensor
) -> DecodeExperts | None:
    """None for a layer on a GPU, with replicas, or with what only DeepSeek V4 has.

    slot_L: the slot of each expert, where each has one (SlotTable.only_slot_L).
    """
    pool = experts.pool
    if slot_L is None or gate.rule.top_k > MOST_TOP_K or load_S.is_cuda:
        return None
    if gate.table_VK is not None or pool.swiglu_limit is not None or pool.w13.is_fp4:
        return None
    pair = None if shared is None else (shared.gate_up.weight, shared.down.weight)
    matrices = experts.buffer_E, pool.w13, pool.w2
    return DecodeExperts(gate.linear.weight.data, gate.bias_E, gate.rule, slot_L, *matrices, pair, load_S)
