"""OverlapPolicy: what a step computes beside its communication (--overlap). eprt/layers/overlap.py says how.

The choice goes by what the step's header exchange has shown to every rank anyway, so all ranks choose alike without
another word: the mode, and the number of tokens of the rank with the most. Steps in low-latency mode all have the same
overlap: they are recorded as CUDA graphs.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from eprt.config import EngineConfig
from eprt.ops.known_rows import LEAST_ROWS

# Halves pay where they hide more than they cost: from so many tokens on the busiest rank on, and only if an expert's
# rows are still many enough in a half for the fast products. Between two GPUs the exchange is a tenth of a layer, and
# products that run beside it lose about as much.
AUTO_LEAST_TOKENS = 8192
AUTO_LEAST_RANKS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OverlapPolicy:
    """prefill: of steps in normal mode ("none" or "tbo"), with at least least_tokens on some rank. decode: of steps in
    low-latency mode ("none", "tbo" or "sbo"). why: for the log."""

    prefill: str
    decode: str
    least_tokens: int
    why: str

    @staticmethod
    def of(config: EngineConfig, model, num_ranks: int) -> "OverlapPolicy":
        """ValueError where the model has nothing to overlap, or --overlap-sms no GPU to divide."""
        asked, backends = config.overlap, getattr(model, "ep", {})
        if config.overlap_sms is not None:
            _check_sms(config, model, backends)
        if not backends:
            if asked in ("tbo", "sbo"):
                raise ValueError(f"--overlap {asked}: the model has no MoE layer, so there is no communication to hide")
            return OverlapPolicy("none", "none", 0, "the model has no MoE layer")
        if asked != "auto":
            return OverlapPolicy("tbo" if asked == "tbo" else "none", asked, 2, f"--overlap {asked}")
        if not all(backend.launches for backend in backends.values()):
            why = "one rank sends nothing" if num_ranks == 1 else "this exchange leaves no time to compute in"
            return OverlapPolicy("none", "none", 0, f"auto: {why}")
        if num_ranks < AUTO_LEAST_RANKS:
            return OverlapPolicy("none", "sbo", 0, f"auto: between {num_ranks} ranks prompts have too little to hide")
        moe = model.config.moe
        for_fast_products = -(-2 * LEAST_ROWS * moe.num_experts // (num_ranks * moe.top_k))
        return OverlapPolicy("tbo", "sbo", max(AUTO_LEAST_TOKENS, for_fast_products), "auto")

    def of_step(self, num_tokens_N: Sequence[int], mode: str) -> str:
        """num_tokens_N: of every rank."""
        if mode == "low_latency":
            return self.decode
        return self.prefill if max(num_tokens_N) >= self.least_tokens else "none"

    def log(self) -> None:
        since = f" from {self.least_tokens} tokens per rank on" if self.prefill != "none" else ""
        _log.info("overlap: prefill %s%s, decode %s (%s)", self.prefill, since, self.decode, self.why)


def _check_sms(config: EngineConfig, model, backends: dict) -> None:
    flag = f"--overlap-sms {config.overlap_sms}"
    if getattr(getattr(model, "device", None), "type", "cpu") == "cpu":
        raise ValueError(f"{flag}: divides a GPU, of which --device {config.device} found none; leave it out")
    if not all(backend.takes_signals for mode, backend in backends.items() if mode == "low_latency"):
        _log.warning("%s does nothing here: nothing is sent tile by tile within one rank or through host memory", flag)
