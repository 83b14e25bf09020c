"""HeldBack: what kept a late rank from computing, from its `usage`: quota, cores, the GPU's clock, long contexts.

Proof that a rank is late by itself, whatever its waits look like. Knows no advice.
"""

from dataclasses import dataclass

import numpy as np

from ..windows.medians import median_of_known
from .sightings import Sighting
from .yardstick import Yardstick

# Parts of the others' extra wait that must be explained. A quota stops a rank amid its waits, too.
_QUOTA_EXPLAINS, _EXPLAINS = 0.25, 0.5
_LOW_CLOCK, _LOWERED = 0.9, 0.2  # of the usual clock; part of the time
_MORE_WORK = 1.3  # times the usual context or tokens


@dataclass(frozen=True)
class HeldBack:
    """Why a column's rank is late."""

    cause: str  # "comp"; or "mixed": its requests are longer
    words: str
    is_certain: bool = False  # also of a rank that has more tokens than its peers

    @staticmethod
    def find(yardstick: Yardstick, column: Sighting) -> "HeldBack | None":
        """None where the log has no proof."""
        if column.place.rank is None or not yardstick.matrices.usage_WN:
            return None
        usage, excess_us = _Usage(yardstick, column), yardstick.excess_us(column)
        throttled_us = usage.more("throttled_us")
        if throttled_us >= _QUOTA_EXPLAINS * excess_us > 0:
            words = f"a quota of its cgroup stopped it for {usage.share('throttled_us')} of the time"
            return HeldBack("comp", words, is_certain=throttled_us >= _EXPLAINS * excess_us)
        if usage.more("run_wait_us") >= _EXPLAINS * excess_us > 0:
            return HeldBack("comp", f"it was ready to run and had no core for {usage.share('run_wait_us')} of the time")
        return usage.slow_gpu() or usage.long_attention(excess_us)


class _Usage:
    """Of a rank beside the median of the others, per call, in the windows of a sighting."""

    def __init__(self, yardstick: Yardstick, column: Sighting):
        matrices, at = yardstick.matrices, slice(column.first, column.last + 1)
        self._others = np.arange(matrices.num_ranks) != column.place.rank
        self._values = {name: values_WN[at] for name, values_WN in matrices.usage_WN.items()}
        span_us_W = (matrices.end_s_W - matrices.start_s_W)[at] * 1e6
        calls_W = matrices.calls_WN[at][:, ~self._others][:, 0]
        self._call_us = float(np.nansum(span_us_W) / max(1.0, float(np.nansum(calls_W))))

    def pair(self, name: str) -> tuple[float, float]:
        """The rank's, and the usual; NaN where they are not logged."""
        if name not in self._values:
            return np.nan, np.nan
        own_W1, others_WM = self._values[name][:, ~self._others], self._values[name][:, self._others]
        if np.isnan(own_W1).all() or np.isnan(others_WM).all():
            return np.nan, np.nan
        return median_of_known(own_W1), median_of_known(others_WM)

    def more(self, name: str) -> float:
        own, usual = self.pair(name)
        return float(np.nan_to_num(own - usual))

    def ratio(self, name: str) -> float:
        own, usual = self.pair(name)
        return own / usual if usual > 0 else np.nan

    def share(self, name: str) -> str:
        """Of the time. A quota's is counted for each core, so two threads may be stopped for longer than that."""
        return f"{100 * min(1.0, self.pair(name)[0] / max(1e-9, self._call_us)):.0f} %"

    def slow_gpu(self) -> HeldBack | None:
        clock = self.ratio("gpu_mcycles")
        for name, why in (("gpu_thermal_us", "for heat"), ("gpu_power_us", "for a limit of power")):
            if self.more(name) >= _LOWERED * self._call_us > 0:
                return HeldBack("comp", f"its GPU's clock was lowered {why} for {self.share(name)} of the time")
        return HeldBack("comp", f"its GPU's clock is at {clock:.2g}x the usual") if clock <= _LOW_CLOCK else None

    def long_attention(self, excess_us: float) -> HeldBack | None:
        if not self.more("attention_us") >= _EXPLAINS * excess_us > 0:
            return None
        context, tokens = self.ratio("context_tokens"), self.ratio("tokens")
        times = f"its attention takes {self.ratio('attention_us'):.2g}x as long"
        if context >= _MORE_WORK or tokens >= _MORE_WORK:
            return HeldBack("mixed", f"{times}: it reads {context:.2g}x the context for {tokens:.2g}x the tokens")
        return HeldBack("comp", f"{times} for {context:.2g}x the context")
