"""What every rank does in test_low_latency.py: all cases of low latency in which no process dies."""

import functools
import time

from eprt.ep.group.group import EPGroup
from tests.gpu.cases_low_latency import (
    bad_input,
    fp8_power_of_two_scales,
    graph_replay,
    many_epochs,
    random_shapes,
    two_in_flight,
)
from tests.gpu.cases_low_latency_lost_ranks import late_rank, masked_before, rank_returns
from tests.gpu.cases_low_latency_signals import missing_signal, tile_signals
from tests.gpu.shared import meaningful


def one_launch(group: EPGroup, seed: int, cases_per_shape: int, num_steps: int) -> None:
    """What needs no process to die, in one start of the processes."""
    cases = [late_rank, two_in_flight, graph_replay, missing_signal, masked_before, rank_returns, bad_input]
    cases += [functools.partial(tile_signals, exact=exact) for exact in (False, True)]
    cases += [fp8_power_of_two_scales, functools.partial(many_epochs, num_steps=num_steps)]
    cases.append(functools.partial(random_shapes, seed=seed, cases_per_shape=cases_per_shape))
    for case in meaningful(cases):
        started = time.monotonic()
        case(group)
        if group.rank == 0:
            print(f"{getattr(case, '__name__', case)}: {time.monotonic() - started:.1f} s", flush=True)
