"""ForwardBatch: where a step is cut in two, and that both halves say of each token what the whole says."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from eprt.layers.batch import Extension, FarRequests, ForwardBatch
from tests.unit.layers.cases import batch_of


def tokens_of(batch: ForwardBatch) -> list[tuple[int, int, int, int, int]]:
    """(token, position, cache slot, page of its request, end of its context) of each token, by its request's fields."""
    result = []
    starts = batch.query_start_B1.tolist()
    assert starts[0] == 0 and starts[-1] == batch.num_tokens and len(starts) == len(batch.seq_len_B) + 1
    for b, (begin, end) in enumerate(pairwise(starts)):
        for t in range(begin, end):
            position = int(batch.seq_len_B[b]) - (end - t)
            assert position == batch.position_T[t], "a token does not stand where its request's length says"
            page = int(batch.page_table_BP[b, 0])
            result.append((int(batch.token_id_T[t]), position, int(batch.kv_slot_T[t]), page, position + 1))
    assert all(starts[b + 1] - starts[b] == 1 for b in range(batch.num_decode))
    return result


def test_halves_are_the_batch_cut_in_the_middle():
    rng = random.Random(0)
    cases = [([], [], 0), ([1], [5], 1), ([1], [0], 0), ([7], [0], 0), ([1, 1], [3, 3], 2), ([1, 6], [3, 2], 1)]
    for _ in range(200):
        num_decode, num_chunks = rng.randrange(6), rng.randrange(4)
        lengths = [1] * num_decode + [rng.randrange(1, 9) for _ in range(num_chunks)]
        cases.append((lengths, [rng.randrange(1, 20) for _ in lengths], num_decode))
    for lengths, contexts, num_decode in cases:
        whole = batch_of(lengths, contexts, num_decode)
        first, second = whole.halves()
        assert first.num_tokens == -(-whole.num_tokens // 2), "the halves are as equal as can be"
        assert tokens_of(first) + tokens_of(second) == tokens_of(whole)
        assert first.num_decode + second.num_decode == num_decode
        assert (first.first_row, second.first_row) == (0, first.num_tokens)
        assert all(half.seq_len_B[half.num_decode :].sum() <= half.num_context for half in (first, second))
        assert len(first.seq_len_B) + len(second.seq_len_B) - len(lengths) in (0, 1), "at most one request is cut"


def test_only_decodes_may_be_cut_without_being_told_where():
    decodes = batch_of([1, 1, 1], [4, 5, 6], 3)
    told = decodes.halves()
    object.__setattr__(decodes, "split", None)
    assert [tokens_of(half) for half in decodes.halves()] == [tokens_of(half) for half in told]
    prompt = batch_of([3, 4], [0, 0], 0)
    object.__setattr__(prompt, "split", None)
    with pytest.raises(ValueError, match="7 tokens, 0 of them decodes, lacks its split"):
        prompt.halves()


def test_requests_behind_the_decodes_are_near_ones_and_far_ones():
    batch = batch_of([1, 1, 3, 2, 4], [5, 6, 7, 0, 20], 2)
    (all_near,) = batch.extensions()
    assert (all_near.requests, all_near.rows, all_near.is_far) == (slice(2, 5), slice(2, 11), False)
    batch = replace(batch, num_context=10 + 2 + 24, far=FarRequests(2, 6, 2 + 24))
    near, far = batch.extensions()
    assert near == Extension(slice(2, 3), slice(2, 5), 10, False)
    assert far == Extension(slice(3, 5), slice(5, 11), 26, True)
    (only_far,) = replace(batch_of([1, 4], [5, 6], 1), num_context=10, far=FarRequests(1, 4, 10)).extensions()
    assert only_far == Extension(slice(1, 2), slice(1, 5), 10, True)
    assert batch_of([1, 1], [5, 6], 2).extensions() == []
