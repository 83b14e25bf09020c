"""Router: balance, prefix affinity, limits, and determinism."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.engine.request import QueueFullError
from eprt.engine.router import Router


def test_requests_spread_by_tokens():
    router = Router(3, 100)
    assert [router.assign(str(i), [i] * length) for i, length in enumerate((100, 50, 20, 20, 20))] == [0, 1, 2, 2, 2]
    assert router.num_tokens == [100, 50, 60]


def test_generated_tokens_count_until_the_request_ends():
    router = Router(2, 100)
    assert router.assign("a", [1] * 10) == 0 and router.assign("b", [2] * 10) == 1
    for _ in range(5):
        router.add_token("a")
    assert router.num_tokens == [15, 10] and router.assign("c", [3]) == 1
    router.release("a")
    router.release("a")
    assert router.num_tokens == [0, 11] and router.num_requests == [0, 2]
    assert router.assign("a", [4]) == 0, "an id that was released may come again"


def test_a_known_prefix_outweighs_a_smaller_difference_in_load():
    router = Router(2, 100, page_size=4)
    prefix = list(range(40))
    assert router.assign("a", prefix) == 0
    router.release("a")
    assert router.assign("other", [99] * 30) == 0
    # Rank 0 is 30 tokens busier, but has 40 of the 44 prompt tokens in its cache.
    assert router.assign("b", [*prefix, 1, 2, 3, 4]) == 0
    # Now it is 74 tokens busier: worth recomputing the prefix on rank 1, which is remembered from now on.
    assert router.assign("c", [*prefix, 5, 6, 7, 8]) == 1


def test_full_ranks_are_passed_over_and_all_full_is_an_error():
    router = Router(2, 1)
    assert [router.assign("a", [1]), router.assign("b", [2] * 50)] == [0, 1]
    with pytest.raises(QueueFullError, match="all 2 ranks have 1 requests each"):
        router.assign("c", [3])
    router.release("b")
    assert router.assign("c", [3]) == 1
    with pytest.raises(ValueError, match="'c' is already assigned to rank 1"):
        router.assign("c", [3])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.booleans()), max_size=40))
def test_two_routers_agree_and_charges_return_to_zero(calls):
    routers = [Router(3, 1000, page_size=4) for _ in range(2)]
    for i, (prompt, ends) in enumerate(calls):
        ranks = [router.assign(str(i), prompt) for router in routers]
        assert ranks[0] == ranks[1]
        for router in routers:
            router.add_token(str(i))
            if ends:
                router.release(str(i))
    for i in range(len(calls)):
        routers[0].release(str(i))
    assert routers[0].num_tokens == routers[0].num_requests == [0, 0, 0]


def test_it_imports_without_torch():
    modules = "eprt.engine.router, eprt.engine.request, eprt.engine.outputs"
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules['torch'] = None; import {modules}"], check=True)


def test_a_closed_rank_gets_nothing_and_its_prefixes_are_forgotten():
    router = Router(2, 1, page_size=4)
    prefix = list(range(9))
    assert router.assign("a", prefix) == 0
    router.close_rank(0)
    assert router.assign("b", [7]) == 1
    with pytest.raises(QueueFullError, match="all 1 ranks have 1 requests each"):
        router.assign("c", [7])
    assert router.reassign("a", [*prefix, 5]) == 1, "however many the others have"
    assert router.num_tokens == [0, 11] and router.num_requests == [0, 2]
    router.release("a"), router.release("b")
    router.open_rank(0)
    assert router.assign("d", [1] * 3) == 0 and router.assign("e", [1] * 4) == 1
    router.release("d"), router.release("e")
    assert router.assign("f", prefix) == 1, "the rank that computed it last"


def test_requests_with_one_cache_key_go_to_one_rank_unless_it_has_much_more_to_do():
    router = Router(3, 100, page_size=4)
    assert router.assign("a", [1] * 10) == 0
    assert router.assign("b", [2] * 3, cache_key="k") == 1, "shorter than a page: no prefix is known"
    assert router.assign("c", [3] * 3) == 2
    assert router.assign("d", [4] * 3, cache_key="k") == 1
    assert router.assign("e", [5] * 3, cache_key="other") == 2
    assert router.assign("f", [6] * 2, cache_key="k") == 1, "4 more tokens than rank 2 is too much, but not for 2"


def test_a_choice_is_predicted_without_being_made():
    router = Router(2, 10, page_size=4)
    prompt = list(range(10))
    assert router.predict(prompt) == (0, 0, 10)
    assert router.assign("a", prompt) == 0
    assert router.predict(prompt) == (1, 0, 10), "10 tokens charged are more than 8 saved"
    router.release("a")
    assert router.predict([*prompt, 99, 98]) == (0, 0, 4) and router.num_tokens == [0, 0]
    router.assign("b", [7] * 3, cache_key="k")
    assert router.predict([8] * 6, "k")[2] == 0, "a client's word"
    router.close_rank(0), router.close_rank(1)
    assert router.predict(prompt) == (-1, 0, 10)


def test_a_tier_waits_for_its_own_and_those_before_it_alone():
    """Rank 0 has a long request of the last tier, rank 1 a short one of the first."""
    router = Router(2, 100, num_tiers=3)
    assert router.assign("base", [1] * 500, tier=2) == 0 and router.assign("max", [2] * 50, tier=0) == 1
    assert router.predict([3] * 10, tier=0) == (0, 0, 10), "the 500 tokens give way"
    assert router.predict([3] * 10, tier=1) == (0, 0, 10)
    assert router.predict([3] * 10, tier=2) == (1, 50, 10)
    assert router.assign("max 2", [3] * 10, tier=0) == 0
    router.add_token("max 2")
    assert [router.tokens_ahead(0, tier) for tier in range(3)] == [11, 11, 511]
    assert [router.tokens_ahead(1, tier) for tier in range(3)] == [50, 50, 50] and router.num_tokens == [511, 50]
    router.close_rank(0)
    assert router.reassign("max 2", [3] * 11, tier=0) == 1 and router.tokens_ahead(1, 0) == 61
    for request in ("base", "max", "max 2"):
        router.release(request)
    assert [router.tokens_ahead(rank, 2) for rank in range(2)] == router.num_tokens == [0, 0]


def test_among_ranks_that_are_alike_for_a_tier_the_one_with_less_behind_is_taken():
    router = Router(3, 100, num_tiers=2)
    for rank, length in enumerate((90, 30, 60)):
        assert router.assign(f"base {rank}", [rank] * length, tier=1) == rank
    assert router.assign("max", [7] * 5, tier=0) == 1
