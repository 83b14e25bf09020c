"""Ranks over a wire: who is named when one dies or hangs, be it the first one."""

import pytest

from benchmarks.ep.wire_ranks import WireRanks

RANKS = WireRanks("tests.unit.benchmarks.ep.wire_case", 2, 1, ["tcp:silence_s=3"], timeout_s=60.0, patience_s=2.0)


@pytest.mark.parametrize(
    "culprit, signal, told", [(1, "SIGKILL", "rank 1 ended: killed by signal 9; "), (0, "SIGSTOP", "rank 0 hung: ")]
)
def test_a_rank_that_dies_or_hangs_is_named(culprit, signal, told):
    said = RANKS.run({"culprit": culprit, "signal": signal})
    assert isinstance(said, str) and said.startswith(told), said
    # The wait that it ended, of the other rank.
    assert f"[rank {1 - culprit}/2]" in said and f"rank {culprit} " in said.partition("]")[2], said
