"""UsageMeter: what this rank had to work with, and what it worked on, as totals since the start (diagnostics' USAGE).

A short computation is told from a throttled processor by these. Knows nothing of what is usual.
"""

import time
from typing import Any

import torch

from eprt.gpu.clock_meter import ClockMeter, load_nvml
from eprt.serve.ranks.cpu_quota import CpuQuota, RunQueue


class UsageMeter:
    """Of one rank's engine; made by its main thread."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._quota, self._run_queue = CpuQuota(), RunQueue()
        self._clock: ClockMeter | None = None
        if engine.model.device.type == "cuda":
            self._clock = ClockMeter(f"GPU-{torch.cuda.get_device_properties().uuid}", load_nvml())

    def sample_clock(self) -> None:
        """To be called about twice a second; any thread may."""
        if self._clock is not None:
            self._clock.sample()

    def totals(self) -> dict[str, float]:
        engine = self._engine
        attention_us = engine.model.attention_us()
        if attention_us is not None and engine.team is not None:
            attention_us -= engine.team.barrier.waited_us  # for others' attention
        totals: dict[str, float | None] = {
            "cpu_us": time.process_time() * 1e6,
            "run_wait_us": self._run_queue.waited_us(),
            "attention_us": attention_us,
            "tokens": engine.runner.num_tokens,
            "context_tokens": engine.runner.num_context_tokens,
            "steps": engine.work.num_steps,
            "step_us": engine.work.total_s * 1e6,
        }
        if (quota := self._quota.totals()) is not None:
            totals["num_throttled"], totals["throttled_us"] = quota
        known = {name: value for name, value in totals.items() if value is not None}
        return known if self._clock is None else known | self._clock.totals()


def gpu_name(engine: Any) -> str | None:
    """As the driver has it; None on CPUs."""
    if engine.model.device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties().uuid}"
