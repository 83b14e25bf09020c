"""EPConfig: what every backend must know before the first token."""

from dataclasses import dataclass

import torch

from eprt import env

MAX_TOP_K = 64  # kMaxTopK of csrc/cpu/ep_exchange.cpp


@dataclass(frozen=True)
class EPConfig:
    """Shapes, types and limits of one exchange. Equal on all ranks. Options of one backend alone are not here."""

    hidden_size: int  # H
    num_slots: int  # S, expert slots of all ranks, a multiple of the number of ranks
    top_k: int  # K
    num_max_tokens_per_rank: int  # largest T of one dispatch_send
    dtype: torch.dtype = torch.bfloat16  # of the tokens and of combine's result: torch.float32 or torch.bfloat16
    payload: str = "same"  # what crosses in dispatch: "same" (dtype) or "fp8" (e4m3, one fp32 scale per 128 values)
    mode: str = "normal"  # "normal" (throughput, compact rows) or "low_latency" (decode, static shapes)
    timeout_s: float = None  # type: ignore[assignment]  # of every wait; default EPRT_TIMEOUT_S or EPRT_GPU_TIMEOUT_S
    num_buffers: int = 2  # handles that may be in flight at once
    device: str = "cpu"  # where the tokens are, "cpu" or "cuda"; backend "auto" goes by it
    # Outputs cross unsummed where a backend would sum a rank's outputs before the wire: the result is exactly the fp32
    # sum over k, for more bytes.
    exact_combine: bool = False

    def __post_init__(self):
        if self.timeout_s is None:
            variable = "EPRT_GPU_TIMEOUT_S" if self.device == "cuda" else "EPRT_TIMEOUT_S"
            object.__setattr__(self, "timeout_s", env.get(variable))
        for name in ("hidden_size", "num_slots", "top_k", "num_max_tokens_per_rank", "num_buffers"):
            if getattr(self, name) < 1:
                raise ValueError(f"EPConfig.{name}={getattr(self, name)}: must be at least 1")
        if self.top_k > MAX_TOP_K:
            raise ValueError(f"EPConfig.top_k={self.top_k}: at most {MAX_TOP_K}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"EPConfig.dtype={self.dtype}: must be torch.float32 or torch.bfloat16")
        if self.payload not in ("same", "fp8"):
            raise ValueError(f"EPConfig.payload={self.payload!r}: must be same or fp8")
        if self.mode not in ("normal", "low_latency"):
            raise ValueError(f"EPConfig.mode={self.mode!r}: must be normal or low_latency")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"EPConfig.device={self.device!r}: must be cpu or cuda")
        if not self.timeout_s > 0:
            raise ValueError(f"EPConfig.timeout_s={self.timeout_s}: must be above 0")
