"""KnownRows: what the host knows of rows that are grouped by expert. Knows nothing of the GPU's own counts."""

from collections.abc import Sequence
from dataclasses import dataclass

# Rows per expert from which one product per expert is faster on GPUs than one grouped product, the host's launches
# included (ops/cuda/experts_cublas.py).
LEAST_ROWS = 768


@dataclass(frozen=True)
class KnownRows:
    """How many rows each expert has, and which matrix of the weights is its own."""

    counts: Sequence[int]  # rows of each expert
    matrices: Sequence[int]  # index of each expert's matrix: weights may hold other experts too

    @property
    def mean_rows(self) -> float:
        """Rows per expert, over the experts that have any."""
        return sum(self.counts) / max(1, sum(count > 0 for count in self.counts))
