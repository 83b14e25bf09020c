"""The peer of bench_ep: DeepEP v1, when it is installed (github.com/deepseek-ai/DeepEP), called as its tests do."""

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor


def deep_ep() -> Any | None:
    """The module, or None."""
    return importlib.import_module("deep_ep") if importlib.util.find_spec("deep_ep") else None


class LowLatencyPeer:
    """module: deep_ep, or another with its interface. comm: mpi4py communicator. One Buffer for all batches."""

    def __init__(self, module: Any, comm: Any, max_tokens: int, hidden: int, num_experts: int):
        self._module, self._num_ranks, self._hidden, self._num_experts = module, comm.size, hidden, num_experts
        self._buffer = module.Buffer(
            None, num_rdma_bytes=self.buffer_bytes(max_tokens), low_latency_mode=True,
            num_qps_per_rank=num_experts // comm.size, explicitly_destroy=True, comm=comm,
        )  # fmt: skip
        self.num_sms = torch.cuda.get_device_properties().multi_processor_count
        self._handle: Any = None

    def buffer_bytes(self, max_tokens: int) -> int:
        hint = self._module.Buffer.get_low_latency_rdma_size_hint
        return hint(max_tokens, self._hidden, self._num_ranks, self._num_experts)

    def take(self, x: Tensor, topk_idx: Tensor, weights: Tensor, max_tokens: int) -> None:
        """The batch from now on: bf16 [T, H], int64 [T, K], fp32 [T, K]."""
        self._x, self._idx, self._weights, self._max_tokens = x, topk_idx, weights, max_tokens
        self._buffer.clean_low_latency_buffer(max_tokens, self._hidden, self._num_experts)
        shape = self._num_experts // self._num_ranks, self._num_ranks * max_tokens, self._hidden
        self._y = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def dispatch(self) -> None:
        _, _, self._handle, _, _ = self._buffer.low_latency_dispatch(
            self._x, self._idx, self._max_tokens, self._num_experts, use_fp8=True
        )

    def combine(self) -> None:
        self._buffer.low_latency_combine(self._y, self._idx, self._weights, self._handle)

    def close(self) -> None:
        self._buffer.destroy()
