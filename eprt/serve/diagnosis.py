"""Diagnosis: the ranks' wait counters, cut into windows, for /v1/eprt/diagnose and the diagnosis log.

Ranks report totals since their start; a window is the difference between two looks at them. What the windows mean is
eprt.diagnostics' business, which is imported when the first window or question comes.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from eprt.serve.messages import WaitTotals

_MAX_WINDOWS = 60  # ten minutes of work
_PER_RANK = ("dispatch_wait_us", "combine_wait_us", "recv_tokens", "sent_tokens")


class Diagnosis:
    """log_dir: where to write diagnose_rank*.log, None for nowhere."""

    def __init__(self, num_ranks: int, log_dir: str | None = None):
        self._num_ranks, self._log_dir = num_ranks, log_dir
        self._before: dict[int, WaitTotals] = {}
        self._began_s = time.time()
        self._num_windows = 0
        self._records: deque[Any] = deque(maxlen=_MAX_WINDOWS * num_ranks)
        self._writer: Any = None

    def close_window(self, totals: Mapping[int, WaitTotals], node_of_rank: tuple[int, ...]) -> None:
        """Ends a window with the ranks' latest totals. A window in which some rank made no call is dropped: idle
        ranks wait for nobody. OSError when the log cannot be written."""
        from eprt.diagnostics import WindowRecord, WindowWriter

        before, began_s = self._before, self._began_s
        self._before, self._began_s = dict(totals), time.time()
        if len(before) < self._num_ranks or any(totals[r].num_calls == before[r].num_calls for r in before):
            return
        window = [
            WindowRecord(
                window=self._num_windows,
                t_start=began_s,
                t_end=self._began_s,
                rank=rank,
                num_ranks=self._num_ranks,
                node_of_rank=node_of_rank,
                num_calls=now.num_calls - before[rank].num_calls,
                compute_us=now.compute_us - before[rank].compute_us,
                **{name: _difference(getattr(now, name), getattr(before[rank], name)) for name in _PER_RANK},
            )
            for rank, now in sorted(totals.items())
        ]
        self._num_windows += 1
        self._records.extend(window)
        if self._log_dir is not None:
            self._writer = self._writer or WindowWriter(self._log_dir)
            for record in window:
                self._writer.write(record)

    def records(self, since: int) -> list[dict[str, Any]]:
        """The log lines of the windows after `since` that are remembered, as JSON objects."""
        import json

        return [json.loads(record.to_line()) for record in self._records if record.window > since]

    def findings(self) -> dict[str, Any]:
        """eprt.findings/1 over the last ten minutes of work."""
        from eprt.diagnostics import Report

        if not self._records:
            return {"schema": "eprt.findings/1", "num_ranks": self._num_ranks, "windows": 0, "findings": []}
        return Report.of_records(list(self._records)).to_json()


def _difference(now: list, before: list) -> tuple:
    return tuple(a - b for a, b in zip(now, before))
