"""UsualWaits: what each link's wait was before: in a saved baseline, or in the run's own past. Knows no files or pages.

The run's own past is every window that no finding covers. A finding that is as old as the run has no past: it hides no
window, and what it names stays usual.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .baseline import Baseline
from .matrices import WindowMatrices
from .medians import median
from .view import PLANES, pack

_LEAST_CALM = 2  # windows; fewer say nothing


@dataclass(frozen=True, eq=False)
class UsualWaits:
    """Medians per call. NaN: nothing is known."""

    source: str  # in words: where they come from
    planes_PNN: np.ndarray  # as in PLANES; a baseline has no tokens of single links
    compute_us_N: np.ndarray
    recv_tokens_N: np.ndarray  # of each rank, from all

    @staticmethod
    def from_past(
        matrices: WindowMatrices, findings: Sequence[Mapping[str, Any]], baseline: Baseline | None = None
    ) -> "UsualWaits":
        """findings: of eprt.findings/1, about the same windows. baseline: is taken instead where there is one."""
        if baseline is not None:
            return UsualWaits.from_baseline(baseline)
        calm_W = find_calm_windows(matrices, findings)
        num_calm, num_windows = (int(matrices.num_windows_W[at].sum()) for at in (calm_W, slice(None)))
        if calm_W.all():
            source = f"the median of {num_windows} window{'' if num_windows == 1 else 's'}"
        elif calm_W.sum() < _LEAST_CALM:
            calm_W = np.ones_like(calm_W)
            source = f"the median of all {num_windows} windows: findings cover them"
        else:
            source = f"the median of the {num_calm} of {num_windows} windows that no finding covers"
        planes = (matrices.dispatch_us_WNN, matrices.combine_us_WNN, matrices.recv_tokens_WNN)
        tokens_WN = matrices.recv_tokens_WNN.sum(axis=2)
        return UsualWaits(
            source,
            np.stack([median(plane_WNN[calm_W], 0) for plane_WNN in planes]),
            median(matrices.compute_us_WN[calm_W], 0),
            median(tokens_WN[calm_W], 0),
        )

    @staticmethod
    def from_baseline(baseline: Baseline) -> "UsualWaits":
        waits = (baseline.dispatch_us_WNN, baseline.combine_us_WNN)
        planes = [median(plane_WNN, 0) for plane_WNN in waits]
        return UsualWaits(
            "the saved baseline",
            np.stack([*planes, np.full_like(planes[0], np.nan)]),
            median(baseline.compute_us_WN, 0),
            median(baseline.recv_tokens_WN, 0),
        )

    def pack(self) -> bytes:
        """Planes, compute and tokens as float32 behind a line of JSON."""
        head = {"source": self.source, "num_ranks": len(self.compute_us_N), "planes": PLANES}
        return pack(head, self.planes_PNN, self.compute_us_N, self.recv_tokens_N)


def find_calm_windows(matrices: WindowMatrices, findings: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Whether each entry holds no window of a finding that is younger than the run."""
    first_W, last_W = matrices.window_W, matrices.last_window_W
    calm_W = np.ones(len(first_W), dtype=bool)
    for finding in findings:
        if finding["first_window"] > last_W[0]:
            calm_W &= (last_W < finding["first_window"]) | (first_W > finding["last_window"])
    return calm_W
