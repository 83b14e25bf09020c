"""Errors of communication: what failed, between which ranks, in which phase, and what to do."""


class EPError(RuntimeError):
    """Communication failed; the message says between whom, in which phase, and what was seen."""


class EPTimeoutError(EPError):
    """A wait passed its deadline."""

    def __init__(self, rank: int, num_ranks: int, peer: int, phase: str, seen: int, expected: int, waited_s: float):
        self.rank = rank  # who waited
        self.peer = peer  # for whom
        self.phase = phase  # of which call, in words
        self.seen = seen  # epoch of the last flag that came
        self.expected = expected  # epoch that was waited for
        super().__init__(
            f"[rank {rank}/{num_ranks}] waited {waited_s:.1f} s for rank {peer} in {phase}: epoch seen {seen}, "
            f"expected {expected}; is rank {peer} alive? The deadline is EPConfig.timeout_s, else "
            "EPRT_TIMEOUT_S (EPRT_GPU_TIMEOUT_S in GPU kernels)"
        )


class ViewChangedError(EPError):
    """A wait was broken off, because other ranks than before are to take part (eprt/ep/group/view.py)."""


class RankLostError(EPError):
    """A peer process has died."""

    def __init__(self, rank: int, num_ranks: int, lost: int, phase: str):
        self.rank = rank  # who noticed
        self.lost = lost  # the dead rank
        super().__init__(f"[rank {rank}/{num_ranks}] rank {lost} died during {phase}; restart the job")
