"""OverlapPolicy: what a step computes during its communication (--overlap). eprt/layers/schedules.py says how.

The choice depends on what the step's header all-gather has told every rank anyway, so all ranks choose alike without
another message: the mode, and the number of tokens of the rank with the most. Steps in low-latency mode all have the
same overlap: they are recorded as CUDA graphs.

--overlap auto takes what the backends advise, and a backend advises what was measured to pay (docs/overlap.md).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from eprt.config import EngineConfig
from eprt.models.model import Model

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OverlapPolicy:
    """Which overlap each step has: the same on all ranks."""

    prefill: str  # of steps in normal mode: "none" or "tbo"
    decode: str  # of steps in low-latency mode: "none", "tbo" or "sbo"
    reason: str  # for the log

    @staticmethod
    def for_model(config: EngineConfig, model: Model) -> "OverlapPolicy":
        """ValueError where the model has no communication to hide, or --overlap-sms no GPU to divide."""
        asked, exchange = config.overlap, model.exchange
        if config.overlap_sms is not None:
            _check_sms(config, model)
        if not exchange:
            if asked in ("tbo", "sbo"):
                raise ValueError(f"--overlap {asked}: the model has no MoE layer, so there is no communication to hide")
            return OverlapPolicy("none", "none", "the model has no MoE layer")
        if asked != "auto":
            return OverlapPolicy("tbo" if asked == "tbo" else "none", asked, f"--overlap {asked}")
        prefill, decode = (exchange[mode].overlap_advice() for mode in ("normal", "low_latency"))
        return OverlapPolicy(prefill.kind, decode.kind, f"auto: {prefill.reason}")

    def for_step(self, num_tokens_N: Sequence[int], mode: str) -> str:
        """num_tokens_N: of every rank."""
        if mode == "low_latency":
            return self.decode
        return self.prefill if max(num_tokens_N) > 1 else "none"  # one token is not two halves

    def log(self) -> None:
        _log.info("overlap: prefill %s, decode %s (%s)", self.prefill, self.decode, self.reason)


def _check_sms(config: EngineConfig, model: Model) -> None:
    flag = f"--overlap-sms {config.overlap_sms}"
    if model.device.type == "cpu":
        raise ValueError(f"{flag}: divides a GPU, of which --device {config.device} found none; leave it out")
    if model.exchange and model.exchange["low_latency"].new_signal(64, 1) is None:
        _log.warning("%s does nothing here: nothing is sent tile by tile within one rank or through host memory", flag)
