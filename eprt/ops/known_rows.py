"""What the host knows of rows that lie grouped by expert."""

from collections.abc import Sequence
from dataclasses import dataclass

# Rows per expert from which GPUs take less time for one after another than for one grouped product, the host's launches
# included (ops/cuda/experts_cublas.py).
LEAST_ROWS = 768


@dataclass(frozen=True)
class KnownRows:
    """counts: rows of each expert. storages: the matrix of each, where weights hold other experts too."""

    counts: Sequence[int]
    storages: Sequence[int]

    @property
    def mean_rows(self) -> float:
        """Of the experts that have any."""
        return sum(self.counts) / max(1, sum(count > 0 for count in self.counts))
