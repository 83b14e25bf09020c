"""GroupServices: what runs beside one group of ranks: its diagnosis, and its rebalancing. Knows nothing of HTTP."""

import asyncio
from pathlib import Path

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.hang_report import hang_subject
from eprt.serve.options import ServeOptions
from eprt.serve.ranks.pool import RankPool
from eprt.serve.rebalance.rebalancer import Rebalancer


class GroupServices:
    """name: of the group where the server has several; its diagnosis log is then in a folder of that name."""

    def __init__(self, options: ServeOptions, pool: RankPool, name: str = ""):
        self.pool, self.name = pool, name
        log_dir = options.diagnose_dir
        if log_dir is not None and name:
            log_dir = str(Path(log_dir) / name)
        log = log_dir, options.diagnose_log_bytes
        self.diagnosis = Diagnosis(pool.num_ranks, *log, options.diagnose_window_s)
        pool.culprit_of = self.diagnosis.hangs.culprit_of
        self.rebalancer = Rebalancer(options, pool, lambda: self.diagnosis.speeds_N)
        pool.elasticity.on_view.append(self.rebalancer.enter_view)
        pool.elasticity.hand_over = self.rebalancer.hand_over
        self._tasks: list[asyncio.Task] = []

    def start(self) -> None:
        """From now on windows are closed and loads looked at, until end()."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.diagnosis.run(self.pool)),
            loop.create_task(self.diagnosis.watch_hangs(self.pool)),
            loop.create_task(self.rebalancer.run()),
        ]

    def hangs(self) -> list[str]:
        """In words, of ranks that hold the others up now."""
        where = f"{self.name}: " if self.name else ""
        return [f"{where}{hang_subject(hang)} hangs: {hang.evidence}" for hang in self.diagnosis.live_hangs()]

    async def close_window(self) -> None:
        """The last window of the diagnosis, with the ranks that remain."""
        self._tasks[0].cancel()
        await self.diagnosis.close_last_window(self.pool)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
