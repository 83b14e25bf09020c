"""What a kernel reports into host memory, as an exception, and the way back. Codes: FailureCode of common.cuh."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.ep.api import EPError, EPTimeoutError
from eprt.ep.group.group import EPGroup

_WAITS = {
    1: "dispatch (counts)",
    2: "dispatch (tokens)",
    3: "combine",
    6: "dispatch (where its rows go)",
    7: "combine (where its outputs go)",
    10: "combine (its gate weights)",
}
_SIGNAL, _BAD_SLOT, _OVERFLOW, _SLOT_FULL = 4, 5, 8, 9


@dataclass(frozen=True)
class Asked:
    """What the caller had asked for, for the message. slots, call: what the routing and the verb are called."""

    group: EPGroup
    timeout_s: float
    top_k: int
    num_slots: int
    call: str = "dispatch_send"
    slots: str = "slot_idx_TK"


def take_failure(words: Any, asked: Asked) -> Exception | None:
    """The failure in the four words {code, peer, seen, expected}, which become free for the next; None without one."""
    if words[0] == 0:  # the usual case: as little as possible
        return None
    code, peer, seen, expected = words
    words[0] = 0
    rank, size = asked.group.rank, asked.group.size
    where = f"[rank {rank}/{size}]"
    if code in _WAITS:
        return EPTimeoutError(rank, size, peer, _WAITS[code], seen, expected, asked.timeout_s)
    if code == _SIGNAL:
        return EPError(
            f"{where} combine_send waited {asked.timeout_s:.1f} s for tile {peer}: signal {seen}, threshold {expected}"
            "; its rows were not sent. Does the kernel that computes y_RH raise it?"
        )
    if code == _OVERFLOW:
        return EPError(
            f"{where} {asked.call}: rank {peer} was to receive at least {seen} rows, but has room for {expected}; the "
            "others were left out. Raise the static bound of received rows, or send fewer tokens at once"
        )
    if code == _SLOT_FULL:
        return ValueError(
            f"{where} {asked.call}: slot {peer} of this rank got more than the {expected} rows it has room for; a "
            "token may name a slot once only"
        )
    token, k = divmod(expected, asked.top_k)
    slot = int(np.uint64(peer << 32 | seen).astype(np.int64))
    return ValueError(
        f"{where} {asked.call}: {asked.slots}[{token}, {k}] = {slot} is not in -1..{asked.num_slots - 1}; it was left "
        "out; use -1 to mask an entry"
    )


def readmit_all(group: EPGroup, ticket: Tensor, mask: Tensor) -> None:
    """Clears the mask and counts on from the largest epochs of any rank. Collective, with nothing under way.

    ticket: int64, the epoch of each kind of call. mask: of ranks that are not waited for. Both on this rank's GPU.
    """
    torch.cuda.synchronize()
    everyone = group.allgather(ticket.tolist())
    ticket.copy_(torch.tensor([max(tickets) for tickets in zip(*everyone)], dtype=torch.int64, device="cuda"))
    mask.zero_()
    torch.cuda.synchronize()
    group.barrier()
