"""Agreement of all ranks: on what they were given, and on whether a step of the start has succeeded everywhere.

What differs silently would be a hang, or wrong answers, much later.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from eprt.config import EngineConfig
from eprt.ep.group.group import EPGroup


@contextmanager
def all_or_none(group: EPGroup, what: str) -> Iterator[None]:
    """Runs the body on every rank; if it raised anywhere, raises everywhere: no rank is left waiting.

    what: that the rank which raised could not do, for the message on the others.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    messages = group.allgather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise ValueError(f"[rank {group.rank}/{group.size}] rank {rank} could not {what}: {message}")


@dataclass(frozen=True)
class Difference:
    """One value that a rank has and rank 0 has not."""

    name: str
    rank: int
    value: Any
    of_rank0: Any


def first_difference(group: EPGroup, values: Mapping[str, Any]) -> Difference | None:
    """Compares every rank's values with rank 0's. The same answer on all ranks; None where they agree. Collective.

    values: picklable and comparable. A name that a rank lacks counts as None.
    """
    by_rank = group.allgather(dict(values))
    for rank, theirs in enumerate(by_rank):
        for name, of_rank0 in by_rank[0].items():
            if theirs.get(name) != of_rank0:
                return Difference(name, rank, theirs.get(name), of_rank0)
    return None


def require_same_options(group: EPGroup, config: EngineConfig) -> None:
    """ValueError, on all ranks, unless all have the same but for the directory. Collective."""
    differs = first_difference(group, {k: v for k, v in asdict(config).items() if k != "model_dir"})
    if differs is not None:
        raise ValueError(
            f"[rank {group.rank}/{group.size}] rank {differs.rank} has {differs.name}={differs.value!r}, rank 0 has "
            f"{differs.of_rank0!r}; give all ranks the same engine options"
        )
