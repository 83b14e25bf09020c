"""What two-batch overlap could save of a layer at most, from measured parts, and what power it takes.

The bound. Both halves are computed one after another, nothing beside anything: halves_us. In exposed_us of it nothing
is computed: the exchange. If all of that were hidden, the compute kernels would still lack the SMs that the exchange
holds meanwhile, so a layer takes at least

    halves_us - exposed_us * (1 - SMs of the exchange / SMs of the GPU)

These are times from layer to layer in timelines, which begin after a pause: a rested GPU clocks as high as it can.
Passes back to back are another matter: a GPU at its power limit computes slower, the less it rests.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.tools.gpu_power import GpuPower
from eprt import EPGroup

Call = Callable[[], Any]
PAUSE_S = 0.1  # for a GPU to rest
POWER_S = 1.5  # of passes for each figure


@dataclass(frozen=True)
class TwoBatchBound:
    """us from layer to layer."""

    none_us: float  # without overlap
    halves_us: float  # both halves, one after another
    exposed_us: float  # of halves_us: nothing is computed
    sms_share: float  # of the GPU's SMs, that the exchange holds while it runs

    @property
    def least_us(self) -> float:
        """Of a layer with two-batch overlap."""
        return self.halves_us - self.exposed_us * (1 - self.sms_share)

    @property
    def saves(self) -> float:
        """Share of none_us that two-batch overlap saves at most."""
        return 1 - self.least_us / self.none_us

    def columns(self) -> dict[str, float]:
        us = {"none_period": self.none_us, "halves_period": self.halves_us, "halves_exposed": self.exposed_us}
        rounded = {f"{name}_us": round(value, 1) for name, value in {**us, "tbo_least": self.least_us}.items()}
        return rounded | {"tbo_saves_at_most": round(self.saves, 4)}


def rested_times(
    group: EPGroup, calls: Mapping[str, Call], samples: int, begin: Callable[[], None] | None
) -> dict[str, list[float]]:
    """Seconds of passes that begin after a pause: of each sample the slowest rank's.

    begin: lets all ranks' GPUs rest, then begin together; None without GPUs.
    """
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            mine[name].append(_seconds(group, call) if begin is None else _gpu_seconds(call, begin))
    everyone = group.allgather(mine)
    return {name: [max(row) for row in zip(*(ranks[name] for ranks in everyone))] for name in mine}


def _seconds(group: EPGroup, call: Call) -> float:
    group.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _gpu_seconds(call: Call, begin: Callable[[], None]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3


def power_columns(group: EPGroup, calls: Mapping[str, Call], layers: int) -> dict[str, float]:
    """Of passes back to back, the mean of all GPUs: watts, MHz of the SMs, and joules a layer; and the power limit.
    Empty where the driver tells nothing of it."""
    power = _gpu_power()
    if not all(group.allgather(power is not None)):
        return {}
    assert power is not None
    columns: dict[str, float] = {"watts_limit": round(power.limit_watts)}
    for name, call in calls.items():
        passes = _passes(group, call)
        group.barrier()
        series = power.begin()
        for _ in range(passes):
            call()
        torch.cuda.synchronize()
        use = series.end()
        everyone = group.allgather((use.watts, use.mhz, use.joules / passes / layers))
        watts, mhz, joules = (statistics.mean(values) for values in zip(*everyone))
        columns |= {f"{name}_watts": round(watts), f"{name}_mhz": round(mhz), f"{name}_joules": round(joules, 3)}
    return columns


def _gpu_power() -> GpuPower | None:
    try:
        return GpuPower()
    except OSError:
        return None


def _passes(group: EPGroup, call: Call) -> int:
    """How many take POWER_S."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return max(2, round(POWER_S / max(group.allgather(time.perf_counter() - start))))
