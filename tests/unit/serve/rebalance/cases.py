"""A rebalancer of ranks that serve a small placement."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from eprt.balancer import Placement
from eprt.balancer.controller import ServerSnapshot

from eprt.serve.flags import parse_options
from eprt.serve.rebalance.rebalancer import Rebalancer
from tests.unit.cases import MODEL

CURRENT = Placement(np.array([[0, 1, 2, 0]]), num_gpus=2)


def snapshot(step: int) -> ServerSnapshot:
    """The counters as they are after so many steps, one a second."""
    return ServerSnapshot("server", float(step), np.full((2, 1, 3), 1000 * step), step, 0.0, 0, 0)


def observe(rebalancer: Rebalancer, step: int) -> None:
    rebalancer.controller.observe(snapshot(step))


def rebalancer_of(
    rows: Sequence[Sequence[int]] = ((0, 1), (2, 0)), node_of_rank=(0, 0), *, ask_routing=None, migrate=None
) -> Rebalancer:
    """Of ranks that serve CURRENT, or hold these experts."""
    shape = {"moe_layers": (0,), "node_of_rank": node_of_rank, "num_experts": 3, "expert_bytes": 1, "spare_experts": 1}
    infos = [SimpleNamespace(expert_of_slot=[row], **shape) for row in rows]
    stats = [
        SimpleNamespace(expert_tokens=np.ones((2, 1, 3), np.int64).tobytes(), num_steps=1, migration=None)
        for _ in infos
    ]
    pool = SimpleNamespace(
        infos=infos,
        stats=stats,
        state="serving",
        num_ranks=len(rows),
        ranks={},
        roster=SimpleNamespace(is_whole=True),
        check_open=lambda: None,
        ask_routing=ask_routing,
        migrate=migrate,
    )
    options = parse_options(["--model", str(MODEL), "--rebalance", "auto"])
    return Rebalancer(options, pool, lambda: np.ones(len(rows)))  # type: ignore[arg-type]
