"""CheckedBackend: what backends have in common: argument checks, the order of calls, and being closed."""

from typing import Any

from eprt.ep.api import Backend, DispatchHandle
from eprt.ep.checks import CallChecks
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.order import CALLS, CallOrder


class CheckedBackend(Backend):
    """Construction is collective: all ranks must have equal configurations and options. Arguments as CallChecks."""

    def __init__(self, config: EPConfig, group: EPGroup, options: Any = None, max_rows: int | None = None):
        self.config, self.group = config, group
        self._checks = CallChecks(config, group, options, max_rows)
        self._order = CallOrder(config.num_buffers, self._checks.where)
        self._slots_per_rank = config.num_slots // group.size
        self._closed = False

    @property
    def epoch(self) -> int:
        return self._order.num_begun

    def _enter(self, call: int, handle: DispatchHandle) -> int:
        """Checks that it is this handle's turn for this call; returns its buffer set."""
        if self._closed or handle.backend is not self:
            self._check_open(CALLS[call])
            self._checks.owner(call, handle, self)
        self.check()
        self._order.check(call, handle.epoch)
        return self._set_of(handle)

    def _set_of(self, handle: DispatchHandle) -> int:
        """Which of the num_buffers sets of buffers the handle uses."""
        return handle.epoch % self.config.num_buffers

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise RuntimeError(f"{self._checks.where} {what}: this backend is closed")
