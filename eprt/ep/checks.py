"""Checks of what callers pass to a backend. Every error names the value, the rank and the remedy."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.group.view import View
from eprt.ep.order import CALLS


class CallChecks:
    """What one backend refuses on one rank. Construction compares all ranks' configurations; collective.

    options: the backend's own, a frozen dataclass, equal on all ranks too; None where it has none.
    max_rows: rows of y_RH that are fine besides the exact number (static shapes).
    """

    def __init__(self, config: EPConfig, group: EPGroup, options: Any = None, max_rows: int | None = None):
        self.config, self.max_rows = config, max_rows
        self.where = f"[rank {group.rank}/{group.size}]"
        if config.num_slots % group.size:
            self.fail(
                f"num_slots={config.num_slots} is not a multiple of the {group.size} ranks; "
                f"add {-config.num_slots % group.size} empty or redundant slots"
            )
        configs, all_options = zip(*group.allgather((config, options)))
        self._require_equal(configs)
        if options is not None:
            self._require_equal(all_options)

    def _require_equal(self, values_by_rank: Sequence[Any]) -> None:
        own = values_by_rank[0]
        for field in fields(own):
            values = [getattr(value, field.name) for value in values_by_rank]
            if len(set(values)) > 1:
                self.fail(f"{type(own).__name__}.{field.name} must be equal on all ranks, but by rank it is {values}")

    def tokens(self, x_TH: Tensor, slot_idx_TK: Tensor, weights_TK: Tensor, num_rounds: int) -> None:
        """dispatch_send's arguments, apart from the values of slot_idx_TK."""
        config, T = self.config, x_TH.shape[0]
        if x_TH.dtype != config.dtype or x_TH.dim() != 2 or x_TH.shape[1] != config.hidden_size:
            self._fail_shape("dispatch_send: x_TH", x_TH, config.dtype, f"(T, {config.hidden_size})")
        if config.num_max_tokens_per_rank < T:
            self.fail(
                f"dispatch_send: {T} tokens, but num_max_tokens_per_rank={config.num_max_tokens_per_rank}; split them "
                "into rounds and announce how many are left as num_rounds"
            )
        want = torch.Size((T, config.top_k))
        if slot_idx_TK.dtype not in (torch.int32, torch.int64) or slot_idx_TK.shape != want:
            self._fail_shape("dispatch_send: slot_idx_TK", slot_idx_TK, "torch.int32 or torch.int64", tuple(want))
        if weights_TK.dtype != torch.float32 or weights_TK.shape != want:
            self._fail_shape("dispatch_send: topk_weights_TK", weights_TK, torch.float32, tuple(want))
        if num_rounds < 1:
            self.fail(f"dispatch_send: num_rounds={num_rounds}: it counts this dispatch too, so it is at least 1")

    def outputs(self, y_RH: Tensor, num_rows: int) -> None:
        """combine_send's y_RH."""
        config, shape = self.config, tuple(y_RH.shape)
        fits = shape == (num_rows, config.hidden_size) or shape == (self.max_rows, config.hidden_size)
        if y_RH.dtype != config.dtype or not fits:
            want = f"({num_rows}, {config.hidden_size}), one row for each received"
            self._fail_shape("combine_send: y_RH", y_RH, config.dtype, want)

    def no_signal(self, signal: Any, reason: str) -> None:
        """combine_send's signal, for a backend that takes none."""
        if signal is not None:
            self.fail(f"combine_send: {reason}")

    def owner(self, call: int, handle: DispatchHandle, backend: object) -> None:
        """The handle is this backend's."""
        if handle.backend is not backend:
            self.fail(f"{CALLS[call]}: this handle comes from another backend; each handle goes back to its own")

    def aligned(self, what: str, tensor: Tensor) -> None:
        """For kernels that move 16 bytes at a time; anywhere else a GPU stops with an error that nobody can catch."""
        if tensor.data_ptr() % 16:
            self.fail(not_aligned(f"{what} begins", tensor))

    def fail_slot(self, slot_idx_TK: Tensor, flat: int, view: View | None = None) -> NoReturn:
        """For the slot at position flat of slot_idx_TK."""
        token, k = divmod(flat, self.config.top_k)
        slot = int(slot_idx_TK.flatten()[flat])
        if view is not None and 0 <= slot < self.config.num_slots:
            rank = slot * len(view.alive) // self.config.num_slots
            self.fail(
                f"dispatch_send: slot_idx_TK[{token}, {k}] = {slot} is a slot of rank {rank}, which takes no part in "
                f"view {view.number}; send these tokens to another replica of its expert"
            )
        self.fail(
            f"dispatch_send: slot_idx_TK[{token}, {k}] = {slot} is not in "
            f"-1..{self.config.num_slots - 1}; use -1 to mask an entry"
        )

    def _fail_shape(self, name: str, tensor: Tensor, dtype: object, shape: object) -> NoReturn:
        self.fail(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")

    def fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self.where} {message}")


def not_aligned(what: str, tensor: Tensor) -> str:
    """what: with the verb "begin"."""
    return f"{what} at address {tensor.data_ptr():#x}, which is not a multiple of 16; pass a copy (clone())"
