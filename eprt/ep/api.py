"""The one communication interface, and the registry of its implementations.

Shape suffixes, used throughout the package:
    T  tokens of this rank          H  hidden size            K  experts per token (top-k)
    R  rows received by this rank   E  expert slots of this rank
    S  expert slots of all ranks    N  ranks

The four verbs, in order: dispatch_send, dispatch_recv, combine_send, combine_recv. Every rank calls all four for every
layer, also with zero tokens. Between the first two the caller may compute what needs no remote token (the shared
expert); two handles may be in flight at once (two-batch overlap), each verb taking them in the order they were sent.

Slots: slot s lives on rank s // (S / N). slot_idx -1 masks an entry: it is sent nowhere and adds nothing.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from eprt import env
from eprt.ep.group.group import EPGroup

MAX_TOP_K = 64  # kMaxTopK of csrc/cpu/ep_exchange.cpp


@dataclass(frozen=True)
class EPConfig:
    """What a backend must know before the first token. Equal on all ranks.

    hidden_size: H. num_slots: S, a multiple of the number of ranks. top_k: K.
    num_max_tokens_per_rank: largest T of one dispatch_send.
    dtype: of the tokens and of combine's result: torch.float32 or torch.bfloat16.
    payload: what crosses in dispatch: "same" (dtype itself) or "fp8" (e4m3, one fp32 scale per 128 values).
    mode: "normal" (throughput, compact rows), "low_latency" (decode, static shapes).
    timeout_s: deadline of every wait, default EPRT_TIMEOUT_S, or EPRT_GPU_TIMEOUT_S on GPUs.
    num_buffers: handles that may be in flight at once.
    device: where the tokens are, "cpu" or "cuda"; backend "auto" goes by it.
    exact_combine: outputs cross unsummed where a backend would sum a rank's outputs before the wire (nvlink): exactly
        the fp32 sum over k, for more bytes. num_sms: GPU thread blocks of a call; default: the backend's choice.
    expert_alignment: each slot's first row is a multiple of it, the rows between are undefined (nvlink, normal mode).
    max_recv_rows: static bound of the rows one dispatch brings a rank (nvlink, normal mode): the host never waits, and
        x_RH has so many rows; more are an error. Default: the worst case, and x_RH has the rows that came.
    """

    hidden_size: int
    num_slots: int
    top_k: int
    num_max_tokens_per_rank: int
    dtype: torch.dtype = torch.bfloat16
    payload: str = "same"
    mode: str = "normal"
    timeout_s: float = None  # type: ignore[assignment]  # None: the default, filled in below
    num_buffers: int = 2
    device: str = "cpu"
    exact_combine: bool = False
    num_sms: int | None = None
    expert_alignment: int = 1
    max_recv_rows: int | None = None

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
        if self.expert_alignment < 1:
            raise ValueError(f"EPConfig.expert_alignment={self.expert_alignment}: must be at least 1")
        if self.max_recv_rows is not None and self.max_recv_rows < 1:
            raise ValueError(f"EPConfig.max_recv_rows={self.max_recv_rows}: must be at least 1")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"EPConfig.device={self.device!r}: must be cpu or cuda")
        if self.num_sms is not None and self.num_sms < 1:
            raise ValueError(f"EPConfig.num_sms={self.num_sms}: must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"EPConfig.timeout_s={self.timeout_s}: must be above 0")


@dataclass(frozen=True)
class DispatchHandle:
    """One dispatch under way: what combine needs to find its way back. Opaque to callers except for its shapes.

    num_tokens: T of this rank. epoch: counts this backend's dispatches, equal on all ranks.
    topk_weights_TK: fp32 gate weights, kept so that a backend may apply them on either side of the wire.
    backend: whose it is. state: what the backend keeps of this dispatch, a frozen dataclass of its own.
    """

    num_tokens: int
    epoch: int
    topk_weights_TK: Tensor
    backend: Any
    state: Any = None


@dataclass(frozen=True)
class Received:
    """Tokens for this rank's experts.

    x_RH: rows grouped by local slot, inside a slot ordered by (source rank, token): deterministic.
        dtype EPConfig.dtype, or float8_e4m3fn with scale_RG for an fp8 payload.
    recv_count_E: int32 [E], rows per local slot; rows of slot e start at sum(recv_count_E[:e]), each count of it
        rounded up to EPConfig.expert_alignment.
    scale_RG: fp32 [R, ceil(H/128)] or None.
    num_rounds: largest number of dispatch rounds any rank announced (see dispatch_send); 1 in most calls.
    counts: recv_count_E, where the host knows it without waiting for the GPU once more.
    """

    x_RH: Tensor
    recv_count_E: Tensor
    scale_RG: Tensor | None = None
    num_rounds: int = 1
    counts: tuple[int, ...] | None = None


class EPBackend(Protocol):
    """Implementations: reference (oracle, one process), cpu (shared memory + MPI), nvlink, local (one rank), staged
    (GPUs through host memory)."""

    config: EPConfig
    group: EPGroup
    can_be_recorded: bool  # whether all verbs may be captured in a CUDA graph
    launches: bool  # whether verbs only launch work on the current CUDA stream; only then has it the two *_start
    takes_signals: bool  # whether combine_send takes one; only then has it dispatch and combine

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        """Starts sending tokens to the ranks of their slots. Returns without waiting for anyone.

        x_TH: [T, H] of config.dtype, T in 0..num_max_tokens_per_rank. slot_idx_TK: int32/int64 in -1..S-1.
        topk_weights_TK: fp32. num_rounds: how many dispatches this rank still needs for its tokens, this one included
        (a caller with more than num_max_tokens_per_rank tokens splits them; all ranks learn the largest number).
        Raises ValueError naming the value, the rank and the remedy.
        """
        ...

    def dispatch_start(self, handle: DispatchHandle) -> None:
        """Launches the receive on the current stream, ahead of dispatch_recv, which then launches nothing. What that
        returns is valid once this stream has got here."""
        ...

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        """Waits for every rank's tokens of this epoch. Raises EPTimeoutError naming waiter, peer and phase."""
        ...

    def combine_buffer(self, handle: DispatchHandle) -> Tensor:
        """Memory for y_RH ([R, H] of config.dtype, rows as in Received.x_RH) from which combine_send need not copy.

        Asked for between dispatch_recv and combine_send, passed to combine_send whole, not touched after that.
        """
        ...

    def new_signal(self, block_m: int, num_sms: int) -> Any:
        """For combine_send, where it takes one: counters of columns for each block_m rows of a slot, all zero. num_sms:
        thread blocks to send with."""
        ...

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        """Offers the experts' outputs, rows as in Received.x_RH, config.dtype. signal: single-batch overlap."""
        ...

    def combine_start(self, handle: DispatchHandle) -> None:
        """As dispatch_start, ahead of combine_recv. In the same order as combine_recv; the handle is then completed."""
        ...

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        """y_TH [T, H] of config.dtype: for each token the fp32 sum over k of weight * output, in order of k."""
        ...

    def dispatch(self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor) -> tuple[DispatchHandle, Received]:
        """dispatch_send and dispatch_recv in one launch, where nothing is to be computed in between."""
        ...

    def combine(self, y_RH: Tensor, handle: DispatchHandle) -> Tensor:
        """combine_send and combine_recv in one launch."""
        ...

    def check(self) -> None:
        """Raises what has failed since the last verb, as in a replayed CUDA graph, whose verbs nobody calls."""
        ...

    def close(self) -> None: ...


class EPError(RuntimeError):
    """Communication failed; the message says between whom, in which phase, and what was seen."""


class EPTimeoutError(EPError):
    """A wait passed its deadline. Attributes: rank (waiter), peer, phase, seen, expected."""

    def __init__(self, rank: int, num_ranks: int, peer: int, phase: str, seen: int, expected: int, waited_s: float):
        self.rank, self.peer, self.phase, self.seen, self.expected = rank, peer, phase, seen, expected
        super().__init__(
            f"[rank {rank}/{num_ranks}] waited {waited_s:.1f} s for rank {peer} in {phase}: epoch seen {seen}, "
            f"expected {expected}; is rank {peer} alive? The deadline is EPConfig.timeout_s, else "
            "EPRT_TIMEOUT_S (EPRT_GPU_TIMEOUT_S in GPU kernels)"
        )


class RankLostError(EPError):
    """A peer process has died. Attributes: rank (who noticed), lost (the dead rank)."""

    def __init__(self, rank: int, num_ranks: int, lost: int, phase: str):
        self.rank, self.lost = rank, lost
        super().__init__(f"[rank {rank}/{num_ranks}] rank {lost} died during {phase}; restart the job")


# Name -> "module:callable". Imported on first use, so that a CPU-only machine never imports GPU code.
_BACKENDS = {
    "reference": "eprt.ep.reference:ReferenceBackend",
    "cpu": "eprt.ep.cpu.backend:CpuBackend",
    "nvlink": "eprt.ep.nvlink.backend:make_nvlink",
    "local": "eprt.ep.local:LocalBackend",
    "staged": "eprt.ep.staged:StagedBackend",
}


def _fitting(config: EPConfig, group: EPGroup) -> str:
    """On GPUs: nothing is sent by one rank alone; NVLink moves bfloat16, host memory anything."""
    if config.device == "cpu":
        return "cpu"
    if group.size == 1:
        return "local"
    return "nvlink" if config.dtype == torch.bfloat16 else "staged"


def make_backend(name: str, config: EPConfig, group: EPGroup) -> EPBackend:
    """Builds backend `name` ("auto": _fitting). Collective over the group."""
    name = _fitting(config, group) if name == "auto" else name
    if name not in _BACKENDS:
        raise ValueError(
            f"[rank {group.rank}/{group.size}] no backend {name!r}; there are: auto, {', '.join(_BACKENDS)}"
        )
    module, make = _BACKENDS[name].split(":")
    return getattr(import_module(module), make)(config, group)
