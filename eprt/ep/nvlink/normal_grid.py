"""How a launch of the normal mode is laid out: how many thread blocks, which of them send, what they keep in shared
memory.

The model, fitted to measurements on H200 (docs/dev-log.md): while all GPUs send to all others, LINK_GB_S leave each of
them, whoever stores; a thread block moves SM_GB_S, by what it does. With the rows a token makes a rank move, and the
rows of it that cross, the link is kept busy by

    blocks = (rows moved / SM_GB_S) / (rows crossing / LINK_GB_S) * margin

Where others may compute meanwhile, a launch has so many blocks, at most MAX_SMS; where nothing does, ALONE_SMS. Those
that send are in proportion, and no more than keep the link busy. Routing is taken as uniform. num_sms overrides the
number.
"""

import functools
import math
from dataclasses import dataclass

from eprt.ep.nvlink.structs import RECV, SEND

LINK_GB_S = 340.0
SM_GB_S = {
    "dispatch rows": 60.0,  # whole rows through shared memory, loaded and stored
    "dispatch by expert": 50.0,  # stored: loads hide behind several stores of a row
    "fan out": 70.0,  # stored: a row to those of the token's other experts
    "return rows": 70.0,
    "return sums": 70.0,  # weighted sums of an expert's rows
    "sum": 88.0,  # of what came back
}
MARGIN = 1.25  # for uneven routing, beginnings and ends;
CHAIN_MARGIN = 1.5  # where what has crossed is worked on as well: that can neither begin nor end with the link
MAX_SMS = 24  # of a launch that others may run beside
# Of a launch by expert of both phases: whoever asks for both at once has nothing to compute in between.
ALONE_SMS = 128
WARPS = 15  # of a thread block, that move rows; one more raises flags
_SLOTS = 2  # pieces of a warp in shared memory
COMBINE_WARP_BYTES = 14336  # kWarpBytes of normal_combine.cu
_MOST_PIECE_BYTES = 16384
_MOST_CAST_BYTES = 8192  # smaller pieces, more warps, where they also compute
_USUAL_TOP_K = 8  # where tokens come with ranks, not with experts


@dataclass(frozen=True)
class Grid:
    """Of a launch; struct Division of normal_call.cuh."""

    blocks: int
    send_blocks: int  # the first ones only send, the others only receive; 0: every block does both
    send_warps: int  # of a block that sends
    recv_warps: int  # of a block that receives
    piece_bytes: int  # of a row, through shared memory at once


@dataclass(frozen=True)
class TokenWork:
    """Of a token, in the time that a row takes at 1 GB/s: what all thread blocks of a rank do to send and to receive,
    and what the link does."""

    send: float
    receive: float
    link: float

    def blocks(self) -> int:
        if self.link == 0:
            return MAX_SMS
        margin = CHAIN_MARGIN if self.receive else MARGIN
        return min(MAX_SMS, math.ceil((self.send + self.receive) / self.link * margin))

    def send_blocks(self, blocks: int) -> int:
        """Of a launch that sends and receives. 0 where there are too few to divide."""
        if blocks < 4:
            return 0
        proportional = round(blocks * self.send / (self.send + self.receive))
        enough = math.ceil(self.send / self.link * CHAIN_MARGIN) if self.link else blocks
        return min(max(proportional, 1), enough, blocks - 1)


def count_blocks(work: TokenWork, alone: bool, num_sms: int | None, gpu_sms: int) -> int:
    """alone: whether nothing runs beside the launch."""
    return num_sms or min(ALONE_SMS if alone else work.blocks(), gpu_sms)


def dispatch_work(num_ranks: int, top_k: int, grouped: bool) -> TokenWork:
    ranks = _ranks_of_a_token(num_ranks, top_k)
    away = (num_ranks - 1) / num_ranks
    link = ranks * away / LINK_GB_S
    if not grouped:
        return TokenWork((1 + ranks) / SM_GB_S["dispatch rows"], 0.0, link)
    send = ranks * away + top_k / num_ranks
    fan_out = (top_k - ranks) * away
    return TokenWork(send / SM_GB_S["dispatch by expert"], fan_out / SM_GB_S["fan out"], link)


def combine_work(num_ranks: int, top_k: int, grouped: bool, phases: int = SEND | RECV) -> TokenWork:
    ranks = _ranks_of_a_token(num_ranks, top_k)
    away = (num_ranks - 1) / num_ranks
    crossing = ranks * away
    if not grouped:
        send, receive = 2 * crossing / SM_GB_S["return rows"], ranks + 1
    elif phases == SEND | RECV:  # what is this rank's own is summed where it is received
        send, receive = (top_k * away + crossing) / SM_GB_S["return sums"], top_k / num_ranks + crossing + 1
    else:
        send, receive = (top_k + ranks) / SM_GB_S["return sums"], ranks + 1
    return TokenWork(send, receive / SM_GB_S["sum"], crossing / LINK_GB_S)


def _ranks_of_a_token(num_ranks: int, top_k: int) -> float:
    """Expected ranks that a token goes to."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)


@functools.cache
def dispatch_grid(
    num_ranks: int,
    top_k: int,
    *,
    grouped: bool,
    phases: int,
    x_bytes: int,
    cast_scales: int,
    shared_bytes: int,
    num_sms: int | None,
    gpu_sms: int,
) -> Grid:
    """x_bytes: of a token's row here. cast_scales: scales of a token that is cast on the way, else 0. shared_bytes: of
    a thread block. gpu_sms: multiprocessors."""
    both = grouped and phases == SEND | RECV  # of rows that are items, receiving is no work
    piece_bytes = _piece_bytes(x_bytes, _MOST_CAST_BYTES if cast_scales else _MOST_PIECE_BYTES)
    senders = min(shared_bytes // (_SLOTS * (piece_bytes + _align(cast_scales * 4, 128))), WARPS)
    work = dispatch_work(num_ranks, top_k or _USUAL_TOP_K, grouped)
    blocks = count_blocks(work, both, num_sms, gpu_sms)
    return _grid(work, blocks, both, senders if grouped else WARPS, senders, piece_bytes)


@functools.cache
def combine_grid(
    num_ranks: int,
    top_k: int,
    *,
    grouped: bool,
    phases: int,
    row_bytes: int,
    shared_bytes: int,
    num_sms: int | None,
    gpu_sms: int,
) -> Grid:
    warps = min(shared_bytes // COMBINE_WARP_BYTES, WARPS)
    work = combine_work(num_ranks, top_k or _USUAL_TOP_K, grouped, phases)
    piece_bytes = _piece_bytes(row_bytes, COMBINE_WARP_BYTES // _SLOTS)
    both = phases == SEND | RECV
    return _grid(work, count_blocks(work, grouped and both, num_sms, gpu_sms), both, warps, warps, piece_bytes)


def _grid(work: TokenWork, blocks: int, both: bool, warps: int, senders: int, piece_bytes: int) -> Grid:
    """warps: of a block; senders: those that shared memory suffices for."""
    send_blocks = work.send_blocks(blocks) if both else 0
    in_turn = both and not send_blocks  # every block sends and receives
    return Grid(blocks, send_blocks, min(warps // 2 if in_turn else warps, senders), warps, piece_bytes)


def _piece_bytes(row_bytes: int, most: int) -> int:
    """Equal pieces of a row, none larger than `most`."""
    return _align(-(-row_bytes // -(-row_bytes // most)), 512)


def _align(value: int, unit: int) -> int:
    return -(-value // unit) * unit
