"""GpuPower: what this process's GPU has drawn and how fast it runs, by the driver's NVML library.

A GPU at its power limit lowers its clock. There, hiding one kernel behind another slows both down. Knows nothing of
kernels.
"""

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

_SM_CLOCK = 1  # NVML_CLOCK_SM
_CLOCK_EVERY_S = 0.004


@dataclass(frozen=True)
class PowerUse:
    """Of a GPU over a while."""

    seconds: float
    joules: float  # the counter advances every 20 to 100 ms: measure seconds, not steps
    mhz: float  # mean clock of the SMs

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


class GpuPower:
    """Of the current GPU. OSError where there is no NVML."""

    def __init__(self):
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._gpu = ctypes.c_void_p()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix("GPU-")
        self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._gpu))

    @property
    def limit_watts(self) -> float:
        return self._number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint()) / 1e3

    def begin(self) -> "PowerSeries":
        return PowerSeries(self)

    def joules(self) -> float:
        return self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3

    def mhz(self) -> int:
        return self._number("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM_CLOCK)

    def _number(self, function: str, into: Any, *arguments: int) -> int:
        self._call(function, self._gpu, *arguments, ctypes.byref(into))
        return into.value

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._nvml, function)(*arguments):
            raise OSError(f"{function}: NVML error {status}")


class PowerSeries:
    """From its construction until end()."""

    def __init__(self, power: GpuPower):
        self._power, self._clocks, self._ended = power, [power.mhz()], threading.Event()
        self._start, self._joules = time.perf_counter(), power.joules()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> PowerUse:
        joules, seconds = self._power.joules() - self._joules, time.perf_counter() - self._start
        self._ended.set()
        self._thread.join()
        return PowerUse(seconds, joules, sum(self._clocks) / len(self._clocks))

    def _watch(self) -> None:
        while not self._ended.wait(_CLOCK_EVERY_S):
            self._clocks.append(self._power.mhz())
