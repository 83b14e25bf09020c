"""ClockMeter: a GPU's clock and why it was lowered, from the driver's management library (NVML).

NVML comes with the driver. Where it is not there, or the GPU does not tell, nothing is measured. Knows nothing of
what the GPU computes.
"""

import ctypes
import time
from typing import Any

_SM_CLOCK = 1  # NVML_CLOCK_SM
# nvmlClocksThrottleReasons
_POWER = 0x04 | 0x80  # software power cap, hardware power brake
_THERMAL = 0x20 | 0x40  # software and hardware thermal slowdown


def load_nvml() -> Any:
    """The library, initialised; None where it cannot be had."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return nvml if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


class ClockMeter:
    """Adds up samples. sample() and totals() may be called from different threads.

    Args:
        uuid: of the GPU, as "GPU-...".
        nvml: the library; None: nothing is measured.
    """

    def __init__(self, uuid: str, nvml: Any):
        self._nvml, self._device = nvml, ctypes.c_void_p()
        if nvml is not None and nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)):
            self._nvml = None
        self._sampled_s = time.monotonic()
        self._totals = {"gpu_mcycles": 0.0, "gpu_thermal_us": 0.0, "gpu_power_us": 0.0}

    def sample(self) -> None:
        """What the GPU says now counts for the time since the last sample."""
        nvml, now_s = self._nvml, time.monotonic()
        passed_s, self._sampled_s = now_s - self._sampled_s, now_s
        if nvml is None:
            return
        mhz, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(mhz)):
            self._nvml = None
            return
        before = self._totals
        self._totals = {**before, "gpu_mcycles": before["gpu_mcycles"] + mhz.value * passed_s}
        if nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._device, ctypes.byref(reasons)) == 0:
            for name, bits in (("gpu_thermal_us", _THERMAL), ("gpu_power_us", _POWER)):
                self._totals[name] += 1e6 * passed_s * bool(reasons.value & bits)

    def totals(self) -> dict[str, float]:
        """Since the start, as in diagnostics' USAGE; empty where nothing is measured."""
        return {} if self._nvml is None else dict(self._totals)
