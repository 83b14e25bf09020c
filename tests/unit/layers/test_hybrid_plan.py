"""HybridPlan: rows, windows and closed entries against loops over tokens; who takes over a bookmark waits for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from eprt.layers.batch import ForwardBatch, TailMove
from eprt.layers.hybrid_plan import HybridPlan

WINDOW = 128


def batch(spans: list[tuple[int, int]], **moves: Any) -> ForwardBatch:
    """spans: (start, end) of each request's new tokens."""
    sizes = [end - start for start, end in spans]
    return ForwardBatch(
        token_id_T=torch.zeros(sum(sizes), dtype=torch.int64),
        position_T=torch.cat([torch.arange(*span) for span in spans]) if spans else torch.zeros(0, dtype=torch.int64),
        kv_slot_T=torch.zeros(sum(sizes), dtype=torch.int64),
        page_table_BP=torch.arange(4 * len(spans), dtype=torch.int32).view(len(spans), 4),
        seq_len_B=torch.tensor([end for _, end in spans], dtype=torch.int32),
        query_start_B1=torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32),
        num_decode=0,
        logits_idx=torch.zeros(0, dtype=torch.int64),
        tail_BF=torch.arange(len(spans), dtype=torch.int32).view(-1, 1),
        **moves,
    )


SPANS = [(0, 5), (130, 131), (3, 140), (255, 257), (7, 7)]


def test_every_token_sees_the_window_before_it():
    plan = HybridPlan(batch(SPANS), WINDOW)
    (group,) = plan.groups
    local: list[Any] = [None] * plan.num_local
    for places in (group.before,):
        for request, position, at in zip(places.request_Y.tolist(), places.position_Y.tolist(), places.at_Y.tolist()):
            local[at] = (request, position)
    rows = [(request, position) for request, (start, end) in enumerate(SPANS) for position in range(start, end)]
    for row, at in zip(rows, plan.local_T.tolist()):
        assert local[at] is None
        local[at] = row
    for t, (request, position) in enumerate(rows):
        seen = local[int(plan.local_begin_T[t]) : int(plan.local_end_T[t])]
        assert seen == [(request, p) for p in range(max(0, position - WINDOW + 1), position + 1)]
    assert plan.request_T.tolist() == [request for request, _ in rows] and plan.longest == 257


@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_are_made_of_tokens_that_tails_keep_and_of_new_ones(ratio):
    plan = HybridPlan(batch(SPANS), WINDOW)
    closed = plan.groups[0].closed(ratio)
    assert closed is not None and closed is plan.groups[0].closed(ratio)
    kept = list(zip(closed.kept.request_Y.tolist(), closed.kept.position_Y.tolist()))
    assert closed.kept.at_Y.tolist() == list(range(len(kept)))
    rows = [(request, position) for request, (start, end) in enumerate(SPANS) for position in range(start, end)]
    source, got = [*kept, *rows], []
    for index, request, entry in zip(closed.index_XR.tolist(), closed.request_X.tolist(), closed.entry_X.tolist()):
        first = entry * ratio - (ratio if ratio == 4 else 0)
        want = [(request, p) if p >= 0 else None for p in range(first, (entry + 1) * ratio)]
        assert [None if i < 0 else source[i] for i in index] == want
        got.append((request, entry))
    entries = [(b, i) for b, (start, end) in enumerate(SPANS) for i in range(start // ratio, end // ratio)]
    assert got == entries
    for request, position in kept:
        assert position < SPANS[request][0] and SPANS[request][0] - position <= (7 if ratio == 4 else 127)


def test_rings_keep_the_latest_rows_of_each_request():
    plan = HybridPlan(batch(SPANS), WINDOW)
    writes = plan.groups[0].writes(8)
    got = list(zip(writes.request_Y.tolist(), writes.position_Y.tolist(), writes.at_Y.tolist()))
    want = [(0, p, p) for p in range(5)] + [(1, 130, 5)] + [(2, p, p + 3) for p in range(132, 140)]
    assert got == [*want, (3, 255, 143), (3, 256, 144)]


def test_bookmarks_are_made_of_windows_and_of_the_tokens_of_the_last_entry():
    spans = [(0, 5), (255, 257), (130, 600)]
    bookmarks = (TailMove(1, 256, (9,)), TailMove(2, 256, (7,)), TailMove(2, 512, (8,)))
    plan = HybridPlan(batch(spans, bookmarks=bookmarks), WINDOW)
    (group,) = plan.groups
    assert group.bookmarks is not None and group.marked_NW is not None and group.takeovers is None
    assert group.bookmarks.bookmark_NG.tolist() == [[9], [7], [8]] and group.bookmarks.end_N.tolist() == [256, 256, 512]
    local: list[Any] = [None] * plan.num_local
    before = group.before
    for request, position, at in zip(before.request_Y.tolist(), before.position_Y.tolist(), before.at_Y.tolist()):
        local[at] = (request, position)
    for at, request, position in zip(plan.local_T.tolist(), plan.request_T.tolist(), plan.position_T.tolist()):
        local[at] = (request, position)
    for at_W, (request, end) in zip(group.marked_NW.tolist(), ((1, 256), (2, 256), (2, 512))):
        assert [local[at] for at in at_W] == [(request, p) for p in range(end - WINDOW, end)]
    closed = group.closed(4)
    assert closed is not None and closed.entry_X[closed.marked_N].tolist() == [63, 63, 127]
    assert closed.request_X[closed.marked_N].tolist() == [1, 2, 2]


def test_drafts_of_a_request_are_put_together():
    spans = [(0, 3), (20, 21), (21, 22), (22, 23), (23, 24)]
    one = batch(spans, bookmarks=(TailMove(2, 22, (9,)),))
    one = replace(one, tail_BF=torch.tensor([[0], [5], [5], [5], [6]]))
    got = [(span.request, span.rows, span.start, span.end) for span in HybridPlan(one, WINDOW).spans]
    assert got == [(0, slice(0, 3), 0, 3), (3, slice(3, 6), 20, 23), (4, slice(6, 7), 23, 24)]
    assert [end for end, _ in HybridPlan(one, WINDOW).spans[1].bookmarks] == [22]


def test_who_begins_with_a_bookmark_of_the_same_batch_is_inserted_later():
    spans = [(200, 300), (256, 260), (0, 3), (256, 270)]
    moves = {
        "bookmarks": (TailMove(0, 256, (9, 8)),),
        "takeovers": (TailMove(1, 256, (5, 6)), TailMove(3, 256, (9, 8))),
    }
    groups = HybridPlan(batch(spans, **moves), WINDOW).groups
    assert [[span.request for span in group.spans] for group in groups] == [[0, 1, 2], [3]]
    assert HybridPlan(batch([]), WINDOW).num_local == 0
