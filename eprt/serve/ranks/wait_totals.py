"""wait_totals: what a rank's backends and its engine have counted, as the frontend is told. Knows no windows."""

from typing import Any

from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.usage_meter import UsageMeter


def wait_totals(engine: Any, usage: UsageMeter | None = None) -> msg.WaitTotals | None:
    """None where no rank waits for another: one rank, or a model without experts."""
    model, migrator, steps = engine.model, engine.migrator, engine.step_waits
    counted = model.exchange.recent_stats()
    if counted is None:
        return None
    return msg.WaitTotals(
        num_calls=counted.num_calls,
        dispatch_wait_us=(steps.wait_us_N + counted.dispatch_wait_us_N).tolist(),  # late to a step: to its dispatch
        combine_wait_us=counted.combine_wait_us_N.tolist(),
        recv_tokens=counted.recv_tokens_N.tolist(),
        sent_tokens=counted.sent_tokens_N.tolist(),
        compute_us=counted.compute_us,
        slots=msg.SlotTotals(
            epoch=migrator.epoch if migrator is not None else 0,
            expert_of_slot=[list(layer.expert_of_slot) for layer in model.moe_layers()],
            rows=model.expert_load(),
        ),
        blocked_us=None if counted.blocked_us is None else steps.blocked_us + counted.blocked_us,
        usage=None if usage is None else usage.totals(),
    )
