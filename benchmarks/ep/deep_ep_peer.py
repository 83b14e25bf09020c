"""The peer of bench_ep: DeepEP V1 (github.com/deepseek-ai/DeepEP) where it is installed, called as in its tests."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.ep.permute import GroupedRows, group_rows, ungroup_rows


def deep_ep() -> Any | None:
    """The module, or None."""
    return importlib.import_module("deep_ep") if importlib.util.find_spec("deep_ep") else None


class LowLatencyPeer:
    """Low-latency mode of a module, with one Buffer for all batches.

    module: deep_ep, or another with its interface
    comm: mpi4py communicator
    max_tokens: of a rank in one call
    hidden, num_experts: of the model
    """

    def __init__(self, module: Any, comm: Any, max_tokens: int, hidden: int, num_experts: int):
        self._module, self._num_ranks, self._hidden, self._num_experts = module, comm.size, hidden, num_experts
        self._buffer = module.Buffer(
            None,
            num_rdma_bytes=self.buffer_bytes(max_tokens),
            low_latency_mode=True,
            num_qps_per_rank=num_experts // comm.size,
            explicitly_destroy=True,
            comm=comm,
        )
        self.num_sms = torch.cuda.get_device_properties().multi_processor_count
        self._handle: Any = None

    def buffer_bytes(self, max_tokens: int) -> int:
        hint = self._module.Buffer.get_low_latency_rdma_size_hint
        return hint(max_tokens, self._hidden, self._num_ranks, self._num_experts)

    def load_batch(self, x: Tensor, topk_idx: Tensor, weights: Tensor, max_tokens: int) -> None:
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


class NormalPeer:
    """Normal mode of a module, with one Buffer for all batches.

    module: deep_ep, or another with its interface
    comm: mpi4py communicator
    num_bytes: of the Buffer
    num_sms: that send and receive
    """

    def __init__(self, module: Any, comm: Any, num_bytes: int, num_sms: int):
        self._module, self.num_bytes, self.num_sms = module, num_bytes, num_sms
        module.Buffer.set_num_sms(num_sms)
        self._buffer = module.Buffer(None, num_bytes, explicitly_destroy=True, comm=comm)
        self._dispatch_config = module.Buffer.get_dispatch_config(comm.size)
        self._combine_config = module.Buffer.get_combine_config(comm.size)

    def load_batch(
        self, x: Tensor, fp8: tuple[Tensor, Tensor], y: Tensor, topk_idx: Tensor, weights: Tensor, num_experts: int
    ) -> None:
        """The batch from now on: bf16 [T, H], the same in fp8 with scales, bf16 outputs of received rows, routing."""
        self._x, self._fp8, self._y, self._idx, self._weights = x, fp8, y, topk_idx, weights
        self._num_experts = num_experts
        self._handle = self.bf16_whole()[4]

    def tune(self, us: Callable[[Callable[[], object]], float]) -> None:
        """The chunk sizes of DeepEP's own sweep that take least; us: time of a call, equal on all ranks."""
        config = self._module.Config

        def best(call: Callable[[], object], field: str, chunks: range) -> None:
            times = {}
            for chunk in chunks:
                setattr(self, field, config(self.num_sms, chunk, 256))
                times[chunk] = us(call)
            setattr(self, field, config(self.num_sms, min(times, key=times.__getitem__), 256))

        best(self.fp8_again, "_dispatch_config", range(4, 33, 4))
        best(self.combine, "_combine_config", range(1, 17, 2))

    def fp8_again(self) -> object:
        return self._buffer.dispatch(self._fp8, handle=self._handle, config=self._dispatch_config)

    def bf16_again(self) -> object:
        return self._buffer.dispatch(self._x, handle=self._handle, config=self._dispatch_config)

    def fp8_whole(self) -> Any:
        return self._whole(self._fp8)

    def bf16_whole(self) -> Any:
        return self._whole(self._x)

    def combine(self) -> object:
        return self._buffer.combine(self._y, self._handle, config=self._combine_config)

    def receive(self, x: Any) -> None:
        """A whole dispatch whose rows group() finds. x: bf16 [T, H], or e4m3 with its scales."""
        got, self._row_idx, self._row_weights, self._row_counts, self._row_handle, _ = self._whole(x)
        self._row_x, self._row_scale = got if isinstance(got, tuple) else (got, None)

    def group(self) -> GroupedRows:
        """The received rows by expert."""
        return group_rows(self._row_x, self._row_scale, self._row_idx, self._row_counts)

    def ungroup(self, y_GH: Tensor, rows: GroupedRows) -> Tensor:
        """The outputs of the grouped rows, summed for each received row."""
        return ungroup_rows(y_GH, rows, self._row_weights)

    def send_back(self, y_RH: Tensor) -> Tensor:
        """[T, H] of the sums of received rows."""
        return self._buffer.combine(y_RH, self._row_handle, config=self._combine_config)[0]

    def close(self) -> None:
        self._buffer.destroy()

    def _whole(self, x: Any) -> Any:
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._idx, self._num_experts)
        return self._buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self._idx,
            topk_weights=self._weights,
            config=self._dispatch_config,
        )
