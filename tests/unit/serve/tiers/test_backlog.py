"""What waits on which rank, for whom."""

from eprt.serve.tiers.backlog import Backlog


def test_a_sequence_is_behind_those_of_its_tier_and_of_tiers_before():
    backlog = Backlog(2, 3)
    backlog.charge("a", 0, 1, 100)
    backlog.charge("b", 0, 2, 10)
    backlog.charge("c", 1, 0, 7)
    assert [backlog.tokens_ahead(0, tier) for tier in range(3)] == [0, 100, 110]
    assert [backlog.rows_ahead(0, tier) for tier in range(3)] == [0, 1, 2]
    assert backlog.num_tokens == [110, 7] and backlog.tiers_there() == [0, 1, 2]
    first = backlog.compute("b")
    assert first is not None and (first.num_tokens, first.num_ahead) == (10, 110)
    assert backlog.compute("b") is None and backlog.compute("x") is None
    assert backlog.num_tokens == [100, 7] and backlog.rows_ahead(0, 2) == 2, "it still has a row"


def test_whoever_goes_on_elsewhere_or_ends_leaves_nothing():
    backlog = Backlog(2, 1)
    backlog.charge("a", 0, 0, 100)
    backlog.charge("a", 1, 0, 120)
    assert backlog.num_tokens == [0, 120]
    backlog.charge("a", 1, 0, 0)
    assert backlog.compute("a") is None, "its pages came from elsewhere"
    backlog.release("a")
    backlog.release("a")
    assert backlog.num_tokens == [0, 0] and backlog.tiers_there() == []
