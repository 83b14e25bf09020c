"""Which of an expert's slots each choice of it takes: decided by counting choices, not by place in the batch."""

import numpy as np
import torch
from torch import Tensor

ONE = 1 << 32  # 1.0 in the fixed point of bounds and phases
# 2^32 / golden ratio: its first n multiples modulo 2^32 are spread evenly, for every n.
GOLDEN = 2654435769


def choose_slots(expert_idx_TK: Tensor, slot_LX: Tensor, bound_LX: Tensor, sent_L: Tensor) -> Tensor:
    """int64 [T, K], a slot of each chosen expert; -1 stays -1. Integer arithmetic: equal on all devices.

    slot_LX: int64 [experts + 1, X], the slots of each expert. The last row is for -1 and holds the slot -1.
    bound_LX: int64, the cumulative shares of an expert's slots in its tokens, in 1 / 2^32; 2^32 from its last slot on.
    sent_L: int64, the choices of each expert so far, from which counting continues. Updated.
    """
    if slot_LX.shape[1] == 1:
        return slot_LX[:, 0][expert_idx_TK]
    expert_A, sent, bound = expert_idx_TK.reshape(-1).numpy(), sent_L.numpy(), bound_LX.numpy()
    order = np.argsort(expert_A, kind="stable")
    sorted_A = expert_A[order]
    starts = np.nonzero(np.diff(sorted_A, prepend=-2))[0]
    counts = np.diff(starts, append=len(sorted_A))
    number_A = np.arange(len(sorted_A)) - np.repeat(starts, counts) + sent[sorted_A]
    sent[sorted_A[starts]] += counts
    replica_A = np.empty(len(expert_A), dtype=np.int64)
    replica_A[order] = ((number_A * GOLDEN % ONE)[:, None] >= bound[sorted_A]).sum(1)
    return torch.from_numpy(slot_LX.numpy()[expert_A, replica_A]).view(expert_idx_TK.shape)
