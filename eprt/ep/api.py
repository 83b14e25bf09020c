"""The one communication interface: what the ranks of an expert-parallel group call to exchange tokens.

Shape suffixes, in the whole package unless a module defines a letter otherwise (E is often all experts, R ranks):
    T  tokens of this rank          H  hidden size            K  experts per token (top-k)
    R  rows received by this rank   E  expert slots of this rank
    S  expert slots of all ranks    N  ranks

The four EP calls, in order: dispatch_send, dispatch_recv, combine_send, combine_recv. Every rank makes all four for
every layer, also with zero tokens. Between the first two the caller may compute what needs no remote token (the shared
expert); two handles may be in flight at once (two-batch overlap). order.py has the rules.

Slots: slot s lives on rank s // (S / N). slot_idx -1 masks an entry: it is sent nowhere and adds nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eprt.ep.config import EPConfig
from eprt.ep.errors import CONFIGURED_DEADLINE, EPError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup
from eprt.ep.stats import EPStats


@dataclass(slots=True, eq=False)  # not frozen: that makes a call 0.5 us slower
class DispatchHandle:
    """One dispatch under way: what combine needs to find its way back. Opaque to callers except for num_tokens."""

    num_tokens: int  # T of this rank
    epoch: int  # counts this backend's dispatches, equal on all ranks
    topk_weights_TK: Tensor  # fp32 gate weights, kept so that a backend may apply them on either side of the wire
    backend: Any  # whose handle this is
    state: Any = None  # what the backend keeps of this dispatch, a dataclass of its own


@dataclass(frozen=True)
class Received:
    """Tokens for this rank's experts."""

    # Rows grouped by local slot, inside a slot ordered by (source rank, token): deterministic. dtype EPConfig.dtype, or
    # float8_e4m3fn with scale_RG for an fp8 payload.
    x_RH: Tensor
    # int32 [E], rows per local slot. Rows of slot e start at sum(recv_count_E[:e]); for a backend with an expert
    # alignment each of these counts is first rounded up to a multiple of it.
    recv_count_E: Tensor
    scale_RG: Tensor | None = None  # fp32 [R, ceil(H / 128)]
    num_rounds: int = 1  # largest number of dispatch rounds that any rank announced; 1 in most calls
    counts: Sequence[int] | None = None  # a GPU's recv_count_E on the host, where that takes no further wait


@dataclass(frozen=True)
class OverlapAdvice:
    """Which overlap schedule, if any, pays with this backend."""

    kind: str  # "none", "tbo" or "sbo", as --overlap has them; layers/schedules.py says what they are
    reason: str  # for the log


class Backend(ABC):
    """One way to exchange tokens. registry.py lists the implementations by name."""

    config: EPConfig
    group: EPGroup

    # -- the four calls --

    @abstractmethod
    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        """Starts sending tokens to the ranks of their slots. Returns without waiting for anyone.

        x_TH: [T, H] of config.dtype, T in 0..num_max_tokens_per_rank.
        slot_idx_TK: int32 or int64 in -1..S-1.
        topk_weights_TK: fp32.
        num_rounds: how many dispatches this rank still needs for its tokens, this one included. A caller with more than
            num_max_tokens_per_rank tokens splits them; all ranks learn the largest number.

        Raises ValueError naming the value, the rank and the remedy.
        """

    @abstractmethod
    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        """Waits for every rank's tokens of this epoch. Raises EPTimeoutError naming waiter, peer and phase."""

    @abstractmethod
    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        """Offers the experts' outputs, rows as in Received.x_RH, of config.dtype.

        signal: from new_signal(); outputs then leave tile by tile, while the experts still compute.
        """

    @abstractmethod
    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        """y_TH [T, H] of config.dtype: for each token the fp32 sum over k of weight * output, in order of k."""

    # -- two calls in one, where nothing is computed in between --

    def dispatch(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> tuple[DispatchHandle, Received]:
        """dispatch_send and dispatch_recv."""
        handle = self.dispatch_send(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        return handle, self.dispatch_recv(handle)

    def combine(self, y_RH: Tensor, handle: DispatchHandle) -> Tensor:
        """combine_send and combine_recv."""
        self.combine_send(y_RH, handle)
        return self.combine_recv(handle)

    def sends_in_background(self) -> bool:
        """Whether tokens travel while the caller computes between dispatch_send and dispatch_recv. Where they do not,
        callers with something to compute call dispatch() first, which takes less time."""
        return True

    def is_alone(self) -> bool:
        """Whether all slots are this rank's and rows reach experts as they are: then a caller may compute without the
        four calls, and says so by count_alone()."""
        return False

    def count_alone(self, num_tokens: int, compute_ns: int) -> None:
        """Counts a dispatch that no call has seen. compute_ns: in the routed experts."""

    # -- receives ahead of their calls, for backends whose calls only enqueue work on the current CUDA stream --

    def dispatch_start(self, handle: DispatchHandle) -> None:
        """Enqueues the receive on the current stream, ahead of dispatch_recv, whose result is valid once the stream has
        got there. Does nothing on a backend that has no receive to enqueue."""

    def combine_start(self, handle: DispatchHandle) -> None:
        """As dispatch_start, ahead of combine_recv."""

    # -- what the experts need in between --

    def combine_buffer(self, handle: DispatchHandle, received: Received) -> Tensor:
        """Memory for y_RH ([R, H] of config.dtype, rows as in received.x_RH) from which combine_send need not copy.

        Asked for between dispatch_recv and combine_send, passed to combine_send whole, not touched after that.
        """
        rows = received.x_RH.shape[0]
        return received.x_RH.new_empty(rows, self.config.hidden_size, dtype=self.config.dtype)

    def new_signal(self, block_m: int, num_sms: int) -> Any:
        """Counters by which the experts tell combine_send what is computed, all zero; None: this backend sends once all
        outputs are there.

        block_m: rows of a tile, the unit that is counted.
        num_sms: thread blocks to send with.
        """
        return None

    # -- beside the calls --

    def stats(self, reset: bool = False) -> EPStats | None:
        """What was counted since the last reset; None for a backend that waits for nobody."""
        return None

    def recent_stats(self) -> EPStats | None:
        """stats() without waiting for a GPU that is busy, and therefore a little older."""
        return self.stats()

    def current_wait(self) -> CurrentWait | None:
        """The wait for another rank in which this rank's GPU is now, where it lasts. None where no GPU waits; those of
        the host are EPGroup.current_wait. From one thread, at most twice a second."""
        return None

    def set_deadline(self, timeout_s: float, named: str = CONFIGURED_DEADLINE) -> None:
        """From now on, of every wait; recorded CUDA graphs keep the deadline that they were recorded with.

        timeout_s: in seconds. named: how errors call it. Nothing where nobody waits for another rank.
        """

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        """Goes on without a rank, or takes it back: nothing is sent to it, nobody here waits for it."""
        raise ValueError(f"mask_rank({rank}): {type(self).__name__} cannot go on without a rank; restart the job")

    @property
    def epoch(self) -> int:
        """Of the latest dispatch, also where it failed."""
        raise ValueError(self._no_restart())

    def require_restartable(self) -> None:
        """Raises ValueError, saying why, unless this exchange can go on with other ranks."""
        raise ValueError(self._no_restart())

    def halt(self, error: EPError, view_number: int) -> None:
        """Ends whatever waits on a GPU for another rank, at once and from any thread: until restart() nobody is awaited
        or sent to, what is under way gives wrong results, and check() raises the error. Nothing where no GPU waits, or
        where the ranks of another view than this one exchange by now."""

    def restart(self, epoch: int) -> None:
        """From now on the ranks of group.view exchange, and nobody else; the next dispatch has this epoch.

        On all of them before the first call of any, with the same epoch, larger than any before. Handles in flight are
        void; counts go on.
        """
        raise ValueError(self._no_restart())

    def restart_without_lost(self) -> None:
        """As restart(), after a call that has failed on all ranks for the same lost rank (EPGroup.fails_in_order), or
        between calls, at an epoch that all ranks find by themselves."""
        raise ValueError(self._no_restart())

    def _no_restart(self) -> str:
        where = f"[rank {self.group.rank}/{self.group.size}]"
        return f"{where} {type(self).__name__} cannot go on with other ranks; restart the job"

    def delay_link(self, source: int, delay_s: float) -> None:
        """Fault injection: what rank `source` sends reaches this rank delay_s later from now on; 0 mends the link."""
        raise ValueError(f"delay_link({source}, {delay_s}): {type(self).__name__} has no link that can be delayed")

    def check(self) -> None:
        """Raises a failure that no call has raised yet. For replayed CUDA graphs, which make no Python calls."""

    def require_recordable(self) -> None:
        """Raises ValueError, saying why, unless all calls may be captured in a CUDA graph."""
        raise ValueError(f"{type(self).__name__} waits for the GPU in its calls")

    def overlap_advice(self) -> OverlapAdvice:
        """What pays in steps of config.mode, for --overlap auto."""
        if self.group.size == 1:
            return OverlapAdvice("none", "one rank sends nothing")
        return OverlapAdvice("none", "this exchange leaves no time to compute in")

    def close(self) -> None:
        """Frees all memory. Collective while all ranks live; never hangs when some do not."""
