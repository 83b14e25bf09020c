"""Exchange: the communication of one model: a backend for each mode, shared by all its layers."""

from collections import UserDict
from collections.abc import Callable, Mapping

from eprt.config import MoEConfig
from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.registry import make_backend
from eprt.ep.stats import EPStats


class Exchange(UserDict[str, Backend]):
    """Backends by mode, "normal" and "low_latency"; empty for a model without MoE layers."""

    def check(self) -> None:
        """Raises what kernels have reported since the last call."""
        for backend in self.values():
            backend.check()

    def recent_stats(self) -> EPStats | None:
        """Of all modes together, without waiting for a GPU; None where no rank waits for another."""
        counted = [stats for backend in self.values() if (stats := backend.recent_stats()) is not None]
        return EPStats.total(counted) if counted else None

    def reset_stats(self) -> None:
        for backend in self.values():
            backend.stats(reset=True)

    def require_recordable(self) -> None:
        """Raises ValueError, saying why, unless decoding steps may be captured in a CUDA graph."""
        if "low_latency" in self:
            self["low_latency"].require_recordable()

    def wrap(self, wrapped: Callable[[Backend], Backend]) -> None:
        """Puts something between the layers and their backends, in all layers at once: a fault, a recorder."""
        self.data = {mode: wrapped(backend) for mode, backend in self.items()}

    def close(self) -> None:
        """Frees the communication windows. Collective."""
        for backend in self.values():
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
    backends = {}
    for mode, max_tokens in (modes or {"normal": None}).items():
        sizes = config.hidden_size, num_slots, config.top_k, max_tokens or config.num_max_tokens_per_rank
        types = config.dtype, config.payload
        ep_config = EPConfig(*sizes, *types, mode, device=device, exact_combine=exact_combine)
        backends[mode] = make_backend(backend, ep_config, group)
    return Exchange(backends)
