"""Which slot each choice of an expert takes, where experts have several: by counting, never by place in the batch."""

import numpy as np
import torch
from torch import Tensor

ONE = 1 << 32  # a whole, in the fixed point of bounds and phases
# 2^32 over the golden ratio: its multiples, modulo 2^32, fill any interval evenly however many of them are taken.
GOLDEN = 2654435769


def choose_slots(expert_idx_TK: Tensor, slot_LX: Tensor, bound_LX: Tensor, sent_L: Tensor) -> Tensor:
    """int64 [T, K], a slot of each chosen expert; -1 stays -1. Integers only: equal on any device.

    slot_LX: int64 [experts + 1, X], the slots of each expert. bound_LX: int64, the part of an expert's tokens that its
    slots get, cumulated, in 1 / 2^32; 2^32 from the last slot on. sent_L: int64, choices of each expert so far, by
    which the count goes on; updated. The last row of each is for -1, with the slot -1.
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
