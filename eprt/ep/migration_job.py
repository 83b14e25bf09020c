"""What a migration is asked to do and what it says of itself: plain data, which the HTTP frontend shares (no torch)."""

from dataclasses import dataclass, field

from eprt.balancer.migration import Round

# What a rank shows instead of its progress when it cannot go on.
FAILURES = {-1: "a chunk arrived damaged", -2: "the deadline of the round passed", -3: "it was cancelled"}
DAMAGED, LATE, CANCELLED = FAILURES


@dataclass(frozen=True)
class Job:
    """A migration, the same on all ranks. job_id: larger than any before. epoch: of the placement it starts from.

    weights: layer -> part of its expert's tokens each slot gets once the layer has its last row; default even.
    chunk_bytes: most bytes a rank sends, and takes in, in one step. timeout_s: deadline of each round.
    """

    job_id: int
    epoch: int
    rounds: tuple[Round, ...]
    weights: dict[int, tuple[float, ...]] = field(default_factory=dict)
    chunk_bytes: int = 1 << 18
    timeout_s: float = 30.0


@dataclass(frozen=True)
class MigrationStatus:
    """state: "idle", "running", "done", "rolled_back" or "refused", the last three of job job_id; reason: why not done.

    epoch: counts the commits since the start. rounds_done of num_rounds: committed ones count, also when the rest was
    rolled back. sent_bytes, received_bytes: of weights. work_s: time this rank spent, max_work_s: most in one step.
    buffer_bytes: memory set aside for experts on their way and for chunks; used_bytes: most that experts on their way
    took at once.
    """

    job_id: int = 0
    state: str = "idle"
    reason: str = ""
    epoch: int = 0
    rounds_done: int = 0
    num_rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    work_s: float = 0.0
    max_work_s: float = 0.0
    buffer_bytes: int = 0
    used_bytes: int = 0
