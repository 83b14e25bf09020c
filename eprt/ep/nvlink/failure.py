"""What a kernel reports into host memory, as an exception. Codes: FailureCode of csrc/cuda/common.cuh."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from eprt.ep.errors import CONFIGURED_DEADLINE, EPError, EPTimeoutError
from eprt.ep.group.group import EPGroup

WAITS = {  # for data of another rank, by code
    1: "dispatch (counts)",
    2: "dispatch (tokens)",
    3: "combine",
    6: "dispatch (where its rows go)",
    7: "combine (where its outputs go)",
    10: "combine (its gate weights)",
    11: "entries of a prompt that is split",
}
_SIGNAL, _BAD_SLOT, _OVERFLOW, _SLOT_FULL = 4, 5, 8, 9


@dataclass(frozen=True)
class CallContext:
    """What a failed call was about, for the message."""

    group: EPGroup
    timeout_s: float
    top_k: int
    num_slots: int
    call: str = "dispatch_send"  # what the caller knows the call as
    slots: str = "slot_idx_TK"  # and its routing
    deadline: str = CONFIGURED_DEADLINE  # what sets timeout_s


def take_failure(words: Any, context: CallContext) -> Exception | None:
    """The failure in the four words {code, peer, seen, expected}, which become free for the next; None without one."""
    if words[0] == 0:  # the usual case: as little as possible
        return None
    code, peer, seen, expected = words
    words[0] = 0
    rank, size = context.group.rank, context.group.size
    where = f"[rank {rank}/{size}]"
    if code in WAITS:
        return EPTimeoutError(
            rank, size, peer, WAITS[code], seen, expected, context.timeout_s, deadline=context.deadline
        )
    if code == _SIGNAL:
        return EPError(
            f"{where} combine_send waited {context.timeout_s:.1f} s for tile {peer}: signal {seen}, threshold "
            f"{expected}; its rows were not sent. Does the kernel that computes y_RH raise it?"
        )
    if code == _OVERFLOW:
        return EPError(
            f"{where} {context.call}: rank {peer} was to receive at least {seen} rows, but has room for {expected}; "
            "the others were left out. Raise the static bound of received rows, or send fewer tokens at once"
        )
    if code == _SLOT_FULL:
        return ValueError(
            f"{where} {context.call}: slot {peer} of this rank got more than the {expected} rows it has room for; a "
            "token may name a slot once only"
        )
    token, k = divmod(expected, context.top_k)
    slot = int(np.uint64(peer << 32 | seen).astype(np.int64))
    return ValueError(
        f"{where} {context.call}: {context.slots}[{token}, {k}] = {slot} is not in -1..{context.num_slots - 1}; it was "
        "left out; use -1 to mask an entry"
    )
