"""A GPU's clock and why it was lowered, from a driver library that is made up here."""

import ctypes
from typing import Any

import pytest

from eprt.gpu import clock_meter
from eprt.gpu.clock_meter import ClockMeter


class Nvml:
    """One GPU."""

    def __init__(self):
        self.mhz, self.reasons, self.works = 1980, 0, True

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-7" else 6

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, mhz: Any) -> int:
        assert kind == 1
        ctypes.cast(mhz, ctypes.POINTER(ctypes.c_uint))[0] = self.mhz
        return 0 if self.works else 15

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> int:
        ctypes.cast(reasons, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.reasons
        return 0


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(clock_meter.time, "monotonic", lambda: now[0])
    return now


def test_samples_add_up_to_cycles_and_times(clock):
    nvml = Nvml()
    meter = ClockMeter("GPU-7", nvml)
    clock[0] += 0.5
    meter.sample()
    assert meter.totals() == {"gpu_mcycles": 990.0, "gpu_thermal_us": 0.0, "gpu_power_us": 0.0}
    nvml.mhz, nvml.reasons = 1000, 0x40 | 0x04
    clock[0] += 1.0
    meter.sample()
    assert meter.totals() == {"gpu_mcycles": 1990.0, "gpu_thermal_us": 1e6, "gpu_power_us": 1e6}
    nvml.reasons = 0x01  # idle is no reason to worry
    clock[0] += 1.0
    meter.sample()
    assert meter.totals()["gpu_thermal_us"] == meter.totals()["gpu_power_us"] == 1e6


@pytest.mark.parametrize("nvml", [None, Nvml()])
def test_without_the_library_or_the_gpu_nothing_is_told(nvml, clock):
    meter = ClockMeter("GPU-8", nvml)
    meter.sample()
    assert meter.totals() == {}


def test_a_gpu_that_does_not_tell_is_not_asked_again(clock):
    nvml = Nvml()
    nvml.works = False
    meter = ClockMeter("GPU-7", nvml)
    meter.sample()
    nvml.works = True
    meter.sample()
    assert meter.totals() == {}
