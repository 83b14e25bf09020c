"""MigrationJob and MigrationStatus: plain data that the HTTP frontend shares with the ranks (no torch)."""

from dataclasses import dataclass, field

from eprt.balancer.migration import Round

# What a rank reports in place of its progress when it cannot go on. Of several ranks the smallest number is believed.
FAILURES = {
    -1: "the deadline of the round passed",
    -2: "a chunk had not come or not left when the deadline passed",
    -3: "a chunk arrived damaged",
    -4: "a connection between ranks broke",
    -5: "it was cancelled",
}
SLOW, LATE, DAMAGED, DISCONNECTED, CANCELLED = FAILURES


@dataclass(frozen=True)
class MigrationJob:
    """A migration, the same on all ranks."""

    job_id: int  # larger than any before
    epoch: int  # of the placement it starts from
    rounds: tuple[Round, ...]
    # Layer -> part of its expert's tokens that each slot gets once the layer has its last row; default even.
    weights: dict[int, tuple[float, ...]] = field(default_factory=dict)
    rank_speeds: tuple[float, ...] = ()  # what each rank can carry, where each step splits its batch; default all alike
    # Most bytes that a rank sends, and receives, in one step. None: as many as the transport can; pace.py makes it
    # fewer where steps are short.
    chunk_bytes: int | None = None
    timeout_s: float = 120.0  # deadline of each round, and of all ranks' being told


@dataclass(frozen=True)
class MigrationStatus:
    """How far a rank's migration has come, or how the last one ended."""

    job_id: int = 0
    state: str = "idle"  # "idle", "running", or how the job ended: "done", "rolled_back" or "refused"
    reason: str = ""  # why it is not done
    epoch: int = 0  # of the placement that serves: counts the commits since the start
    rounds_done: int = 0  # committed ones count, also when the rest was rolled back
    num_rounds: int = 0
    sent_bytes: int = 0  # of weights
    received_bytes: int = 0
    work_s: float = 0.0  # time that this rank spent
    max_work_s: float = 0.0  # most in one step
    chunk_bytes: int = 0  # of the latest tick
    cap_bytes: int = 0  # memory set aside for experts on their way
    used_bytes: int = 0  # most of it that was ever used at once
    buffer_bytes: int = 0  # cap_bytes and the buffers for chunks
