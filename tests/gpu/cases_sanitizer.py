"""What every rank does under compute-sanitizer: a little of everything that the exchange's kernels do."""

from eprt.ep.group.group import EPGroup
from tests.gpu import cases_low_latency, cases_low_latency_signals, cases_normal, cases_normal_rows


def small(group: EPGroup) -> None:
    """Low latency, fused and by single calls, with and without signals; normal mode by token and by expert."""
    cases_low_latency.many_epochs(group, num_steps=2)
    for exact in (False, True):
        cases_low_latency_signals.tile_signals(group, exact=exact)
    cases_normal_rows.many_row_epochs(group, num_steps=3)
    cases_normal.many_epochs(group, num_steps=2)
