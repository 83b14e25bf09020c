"""What a migration is asked to do and what it says of itself: plain data, which the HTTP frontend shares (no torch)."""

from dataclasses import dataclass, field

from eprt.balancer.migration import Round

# What a rank shows instead of its progress when it cannot go on. Of several ranks the smallest number is believed.
FAILURES = {
    -1: "the deadline of the round passed",
    -2: "a chunk had not come or not left when the deadline passed",
    -3: "a chunk arrived damaged",
    -4: "a connection between ranks broke",
    -5: "it was cancelled",
}
SLOW, LATE, DAMAGED, DISCONNECTED, CANCELLED = FAILURES


@dataclass(frozen=True)
class Job:
    """A migration, the same on all ranks. job_id: larger than any before. epoch: of the placement it starts from.

    weights: layer -> part of its expert's tokens each slot gets once the layer has its last row; default even.
    rank_speeds: what each rank can carry, where batches are split anew in each step; default all alike.
    chunk_bytes: most bytes a rank sends, and takes in, in one step, None: as many as the transport can; pace.py makes
    it fewer where steps are short.
    timeout_s: deadline of each round, and of all ranks' being told.
    """

    job_id: int
    epoch: int
    rounds: tuple[Round, ...]
    weights: dict[int, tuple[float, ...]] = field(default_factory=dict)
    rank_speeds: tuple[float, ...] = ()
    chunk_bytes: int | None = None
    timeout_s: float = 120.0


@dataclass(frozen=True)
class MigrationStatus:
    """state: "idle", "running", "done", "rolled_back" or "refused", the last three of job job_id; reason: why not done.

    epoch: counts the commits since the start. rounds_done of num_rounds: committed ones count, also when the rest was
    rolled back. sent_bytes, received_bytes: of weights. work_s: time this rank spent, max_work_s: most in one step.
    chunk_bytes: of the latest tick. cap_bytes: memory set aside for experts on their way; used_bytes: most of it that
    was ever used at once; buffer_bytes: with the buffers for chunks.
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
    chunk_bytes: int = 0
    cap_bytes: int = 0
    used_bytes: int = 0
    buffer_bytes: int = 0
