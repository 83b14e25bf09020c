"""Exchange: the communication of one model: a backend for each mode, shared by all its layers."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from eprt import env
from eprt.config import MoEConfig
from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.errors import EPError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup
from eprt.ep.group.view import View
from eprt.ep.registry import make_backend
from eprt.ep.stats import EPStats


def ep_configs(
    config: MoEConfig, num_slots: int, modes: Mapping[str, int | None], device: str = "cpu", exact_combine: bool = False
) -> dict[str, EPConfig]:
    """Of each mode's backend. modes: as for make_exchange."""
    sizes, types = (config.hidden_size, num_slots, config.top_k), (config.dtype, config.payload)
    options = {"device": device, "exact_combine": exact_combine}
    return {
        mode: EPConfig(*sizes, max_tokens or config.num_max_tokens_per_rank, *types, mode, **options)
        for mode, max_tokens in modes.items()
    }


@dataclass(frozen=True)
class ExchangeRecipe:
    """What make_exchange was asked for."""

    config: MoEConfig
    group: EPGroup
    num_slots: int
    backend: str
    modes: Mapping[str, int | None]
    device: str
    exact_combine: bool

    def make(self) -> "Exchange":
        """A backend per mode. Collective."""
        how = self.modes, self.device, self.exact_combine
        configs = ep_configs(self.config, self.num_slots, *how)
        return Exchange({mode: make_backend(self.backend, each, self.group) for mode, each in configs.items()}, self)


class Exchange(UserDict[str, Backend]):
    """Backends by mode, "normal" and "low_latency"; empty for a model without MoE layers.

    recipe: how it was made; None where somebody put it together.
    """

    def __init__(self, backends: Mapping[str, Backend], recipe: ExchangeRecipe | None = None):
        super().__init__(backends)
        self._recipe = recipe
        self._view_number = 0  # of the view that follow_view() has seen last
        self._relatives: list[Exchange] = [self]  # this one, and those that layers went on with after a move
        self._num_sharers = 0  # layers that have it from share_exchange and have not released it

    def moved_to(self, dtype: torch.dtype, device: str) -> "Exchange":
        """The exchange that layers go on with in another dtype or on another device. Collective.

        All layers that share this one get the same. close() of either frees both. ValueError, before anything is made,
        where there can be none.
        """
        for exchange in self._relatives:
            recipe = exchange._recipe
            if recipe is not None and (recipe.config.dtype, recipe.device) == (dtype, device):
                return exchange
        recipe = self._recipe
        if recipe is None:
            raise ValueError("this exchange was not made by make_exchange, so it cannot be made anew elsewhere")
        backend = recipe.backend if recipe.device == device else "auto"
        recipe = replace(recipe, config=replace(recipe.config, dtype=dtype), device=device, backend=backend)
        moved = recipe.make()
        self._relatives.append(moved)
        moved._relatives = self._relatives
        return moved

    def check(self) -> None:
        """Raises what kernels have reported since the last call."""
        for backend in self.values():
            backend.check()

    def recent_stats(self) -> EPStats | None:
        """Of all modes together, without waiting for a GPU; None where no rank waits for another."""
        counted = [stats for backend in self.values() if (stats := backend.recent_stats()) is not None]
        return EPStats.total(counted) if counted else None

    def current_wait(self) -> CurrentWait | None:
        """As Backend.current_wait, of all modes; of several the longest."""
        waits = [wait for backend in self.values() if (wait := backend.current_wait()) is not None]
        return min(waits, key=lambda wait: wait.since_s, default=None)

    @contextmanager
    def while_setting_up(self) -> Iterator[None]:
        """Waits inside end at EPRT_SET_UP_TIMEOUT_S: one rank may compile for minutes what another finds compiled.
        Collective: all leave it together. The GPU must have done by then what was launched inside."""
        for backend in self.values():
            backend.set_deadline(env.get("EPRT_SET_UP_TIMEOUT_S"), "EPRT_SET_UP_TIMEOUT_S")
        try:
            yield
            for group in {backend.group for backend in self.values()}:
                group.barrier()
        finally:
            for backend in self.values():
                backend.set_deadline(backend.config.timeout_s)

    def reset_stats(self) -> None:
        for backend in self.values():
            backend.stats(reset=True)

    @property
    def epoch(self) -> int:
        """The largest of any backend's latest dispatch; 0 without any."""
        return max((backend.epoch for backend in self.values()), default=0)

    def require_restartable(self) -> None:
        """As Backend.require_restartable, of all modes."""
        for backend in self.values():
            backend.require_restartable()

    def halt(self, error: EPError, view_number: int) -> None:
        """As Backend.halt, of all modes."""
        for backend in self.values():
            backend.halt(error, view_number)

    def restart(self, epoch: int) -> None:
        """As Backend.restart, of all modes."""
        for backend in self.values():
            backend.restart(epoch)

    def follow_view(self, view: View) -> None:
        """Goes on without the ranks that were lost since the last call (Backend.restart_without_lost)."""
        if view.number != self._view_number:
            for backend in self.values():
                backend.restart_without_lost()
            self._view_number = view.number

    def require_recordable(self) -> None:
        """Raises ValueError, saying why, unless decoding steps may be captured in a CUDA graph."""
        if "low_latency" in self:
            self["low_latency"].require_recordable()

    def wrap(self, wrapped: Callable[[Backend], Backend]) -> None:
        """Puts something between the layers and their backends, in all layers at once: a fault, a recorder."""
        self.data = {mode: wrapped(backend) for mode, backend in self.items()}

    def release(self) -> None:
        """A layer that has it from share_exchange needs it no more; the last one's frees it. Collective."""
        first = self._relatives[0]
        first._num_sharers -= 1
        if first._num_sharers == 0:
            first.close()

    @property
    def is_shared(self) -> bool:
        """Whether layers that have it from share_exchange use it."""
        return self._relatives[0]._num_sharers > 0

    def close(self) -> None:
        """Frees the communication windows. Collective."""
        for exchange in self._relatives:
            for backend in exchange.values():
                backend.close()


def make_exchange(
    config: MoEConfig,
    group: EPGroup,
    num_slots: int,
    backend: str = "auto",
    modes: Mapping[str, int | None] | None = None,
    device: str = "cpu",
    exact_combine: bool = False,
) -> Exchange:
    """One backend per mode, to be shared by layers of the same shape. Collective over the group.

    modes: mode -> largest number of tokens of one dispatch (None: config.num_max_tokens_per_rank); default: normal.
    """
    modes = modes or {"normal": None}
    return ExchangeRecipe(config, group, num_slots, backend, modes, device, exact_combine).make()


def share_exchange(
    config: MoEConfig, group: EPGroup, num_slots: int, backend: str, mode: str, device: str = "cpu"
) -> Exchange:
    """As make_exchange, for one mode; layers of the group whose dispatches are of one shape get the same, as every rank
    makes the same layers in the same order. release() gives it back. Collective where it is new."""
    sizes = config.hidden_size, config.top_k, config.num_max_tokens_per_rank, num_slots
    key = ("exchange", *sizes, config.dtype, config.payload, backend, mode, device)
    if key not in group.shared or not group.shared[key].is_shared:
        group.shared[key] = make_exchange(config, group, num_slots, backend, {mode: None}, device)
    exchange: Exchange = group.shared[key]
    exchange._num_sharers += 1
    return exchange
