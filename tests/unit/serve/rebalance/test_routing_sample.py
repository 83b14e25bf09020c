"""A routing sample: the ranks' replies side by side, each token with its rank and its step."""

import numpy as np

from eprt.serve.ranks.messages import RoutingReply
from eprt.serve.rebalance.routing_sample import RoutingSample


def reply(topk_LAK, steps: list[int], kind: type) -> RoutingReply:
    array = np.array(topk_LAK, kind)
    return RoutingReply(array.shape, array.itemsize, array.tobytes(), np.array(steps, np.int64).tobytes())


REPLIES = [
    reply([[[0, 1]], [[2, 3]]], [5], np.int8),
    reply([[[300, -1], [7, 8]], [[9, 10], [11, 12]]], [6, 8], np.int16),
]


def test_tokens_keep_their_choices_rank_and_step():
    sample = RoutingSample.from_replies(REPLIES)
    assert sample.topk_idx.dtype == np.int16
    assert sample.topk_idx.tolist() == [[[0, 1], [300, -1], [7, 8]], [[2, 3], [9, 10], [11, 12]]]
    assert sample.source_gpu.tolist() == [[0, 1, 1]] * 2 and sample.topk_step.tolist() == [[5, 6, 8]] * 2


def test_a_rank_without_tokens_adds_none():
    empty = RoutingReply((2, 0, 2), 1, b"", b"")
    sample = RoutingSample.from_replies([empty, *REPLIES])
    assert sample.source_gpu.tolist() == [[1, 2, 2]] * 2


def test_a_plan_looks_at_no_more_tokens_than_it_asks_for():
    trace = RoutingSample.from_replies(REPLIES).trace(2)
    assert [topk_TK.shape for topk_TK in trace.topk_idx] == [(2, 2)] * 2
