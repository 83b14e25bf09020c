"""A step of decodes through the experts of a rank that has them all, as one operator (ops.mix_decodes).

Knows nothing of attention and of other ranks.
"""

from torch import Tensor

from eprt.layers.experts import Experts
from eprt.layers.gate import Gate
from eprt.layers.mlp import MLP
from eprt.ops.decode_layer import MOST_EXPERT_ROWS, MOST_TOP_K, DecodeExperts


def decode_experts(
    num_tokens: int, gate: Gate, slot_L: Tensor | None, experts: Experts, shared: MLP | None, load_S: Tensor
) -> DecodeExperts | None:
    """For so many decodes; None where gate, experts and shared expert must be called one by one.

    slot_L: the slot of each expert, where each has one (SlotTable.only_slot_L).
    """
    pool, top_k = experts.pool, gate.rule.top_k
    if slot_L is None or not 0 < num_tokens * top_k <= MOST_EXPERT_ROWS or top_k > MOST_TOP_K or load_S.is_cuda:
        return None
    if gate.table_VK is not None or pool.swiglu_limit is not None or pool.w13.is_fp4:  # DeepSeek V4
        return None
    pair = None if shared is None else (shared.gate_up.weight, shared.down.weight)
    matrices = experts.buffer_E, pool.w13, pool.w2
    return DecodeExperts(gate.linear.weight.data, gate.bias_E, gate.rule, slot_L, *matrices, pair, load_S)
