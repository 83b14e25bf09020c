"""Power and clock of a GPU, by a stand-in for NVML."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from benchmarks.tools import gpu_power
from benchmarks.tools.gpu_power import GpuPower, PowerUse


class Nvml:
    """Every read of the energy counter finds 500 J more."""

    def __init__(self):
        self.asked, self.millijoules, self.status = b"", 0, 0

    def nvmlInit_v2(self):
        return self.status

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.asked = uuid
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu, into):
        return self._write(into, ctypes.c_uint, 700_000)

    def nvmlDeviceGetClockInfo(self, gpu, kind, into):
        assert kind == 1
        return self._write(into, ctypes.c_uint, 1600)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu, into):
        self.millijoules += 500_000
        return self._write(into, ctypes.c_ulonglong, self.millijoules)

    def _write(self, into, kind, value):
        ctypes.cast(into, ctypes.POINTER(kind))[0] = value
        return 0


@pytest.fixture
def nvml(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(gpu_power.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0a-1b"))
    return nvml


def test_a_series_has_the_energy_between_its_ends(nvml):
    power = GpuPower()
    assert nvml.asked == b"GPU-0a-1b" and power.limit_watts == 700
    use = power.begin().end()
    assert (use.joules, use.mhz) == (500, 1600) and use.seconds > 0
    assert PowerUse(2.0, 1300.0, 1600.0).watts == 650


def test_an_error_of_the_driver_names_the_call(nvml):
    nvml.status = 9
    with pytest.raises(OSError, match="nvmlInit_v2: NVML error 9"):
        GpuPower()
