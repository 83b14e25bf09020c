"""What every rank does in test_deep_ep.py: all cases of low latency in which no process dies."""

import time

from eprt.ep.group.group import EPGroup
from tests.gpu.cases_deep_ep_low_latency import bad_input, graph_replay, in_flight, scale_formats, shapes
from tests.gpu.cases_deep_ep_low_latency_lost_ranks import late_rank, rank_returns
from tests.gpu.cases_deep_ep_low_latency_tiles import tiles
from tests.gpu.shared import meaningful


def one_launch(group: EPGroup, seed: int, cases_per_shape: int) -> None:
    """What needs no process to die, in one start of the processes."""
    for case in meaningful((in_flight, graph_replay, scale_formats, late_rank, bad_input, tiles, rank_returns)):
        started = time.monotonic()
        case(group)
        if group.rank == 0:
            print(f"{case.__name__}: {time.monotonic() - started:.1f} s", flush=True)
    shapes(group, seed, cases_per_shape)
