"""Errors of communication: what failed, between which ranks, in which phase, and what to do."""

from collections.abc import Sequence

CONFIGURED_DEADLINE = "EPConfig.timeout_s, else EPRT_TIMEOUT_S (EPRT_GPU_TIMEOUT_S in GPU kernels)"


class EPError(RuntimeError):
    """Communication failed; the message says between whom, in which phase, and what was seen."""


class EPTimeoutError(EPError):
    """A wait passed its deadline."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        peer: int,
        phase: str,
        seen: int,
        expected: int,
        waited_s: float,
        *,
        others: Sequence[int] = (),
        deadline: str = CONFIGURED_DEADLINE,
    ):
        self.rank = rank  # who waited
        self.peer = peer  # for whom
        self.others = tuple(others)  # that were missing, too, as far as is known
        self.phase = phase  # of which call, in words
        self.seen = seen  # epoch of the last flag that came
        self.expected = expected  # epoch that was waited for
        whom, is_there = _ranks(peer, *others), "are they" if others else f"is rank {peer}"
        super().__init__(
            f"[rank {rank}/{num_ranks}] waited {waited_s:.1f} s for {whom} in {phase}: epoch seen {seen}, "
            f"expected {expected}; {is_there} alive? The deadline is {deadline}"
        )


class ViewChangedError(EPError):
    """A wait was broken off, because other ranks than before are to take part (eprt/ep/group/view.py)."""


class RankLostError(EPError):
    """A peer process has died."""

    def __init__(self, rank: int, num_ranks: int, lost: int, phase: str, others: Sequence[int] = ()):
        self.rank = rank  # who noticed
        self.lost = lost  # the dead rank; of several the first that was known
        self.others = tuple(others)  # that had died by then, in the order in which they were noticed
        also = f", and {_ranks(*others)}" if others else ""
        super().__init__(f"[rank {rank}/{num_ranks}] rank {lost} died during {phase}{also}; restart the job")


def _ranks(*numbers: int) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
