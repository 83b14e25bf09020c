"""DecodePlan against loops over tokens, at every position; and its insertion against that of whole requests."""

from dataclasses import replace

import pytest
import torch

from eprt.engine.graphs import padding_rows
from eprt.layers.batch import ForwardBatch
from eprt.layers.decode_plan import DecodePlan
from eprt.layers.hybrid_cache import PAGE_TOKENS, Ring

WINDOW, MOST = 128, 1026


def decodes(positions: list[int], tails: list[list[int]], tables: list[list[int]]) -> ForwardBatch:
    """Rows of these positions, of requests of their own."""
    num, position_T = len(positions), torch.tensor(positions)
    return replace(
        padding_rows(num, len(tables[0]), PAGE_TOKENS, 0, torch.device("cpu"), num_tail=len(tails[0])),
        token_id_T=torch.zeros(num, dtype=torch.int64),
        position_T=position_T,
        seq_len_B=(position_T + 1).int(),
        page_table_BP=torch.tensor(tables, dtype=torch.int32),
        tail_BF=torch.tensor(tails, dtype=torch.int32),
    )


def all_positions() -> tuple[DecodePlan, list[list[int]], list[list[int]]]:
    """Every position up to four pages and a bit, each of another request."""
    tails = [[3 * i + 1, 3 * i, 3 * i + 2] for i in range(MOST)]
    tables = [[5 * i + j for j in (2, 0, 4, 1, 3)] for i in range(MOST)]
    return DecodePlan(decodes(list(range(MOST)), tails, tables), WINDOW), tails, tables


def ring(page: int, size: int) -> Ring:
    return Ring(page, torch.zeros(1, size, 1))


def test_every_position_sees_its_window_and_writes_one_slot():
    plan, tails, _ = all_positions()
    for page, size in ((0, 128), (1, 132), (2, 8), (1, 8)):
        assert plan.written(ring(page, size)).tolist() == [tails[p][page] * size + p % size for p in range(MOST)]
        assert plan.page(ring(page, size)).tolist() == [tail[page] for tail in tails]
    assert plan.begin_T.tolist() == [max(0, p - WINDOW + 1) for p in range(MOST)]
    assert plan.end_T.tolist() == [p + 1 for p in range(MOST)] and plan.longest == 5 * PAGE_TOKENS


@pytest.mark.parametrize(("ratio", "size"), [(4, 8), (4, 12), (128, 128), (128, 132)])
def test_every_position_that_completes_an_entry_makes_it_of_its_tokens(ratio, size):
    plan, tails, tables = all_positions()
    page_entries = PAGE_TOKENS // ratio
    slots, tokens = plan.entry_slots(ratio, page_entries).tolist(), plan.tokens(ratio, ring(1, size)).tolist()
    for p in range(MOST):
        entry, before = p // ratio, ratio if ratio == 4 else 0
        if (p + 1) % ratio:
            assert slots[p] == -1 and set(tokens[p]) == {-1}
            continue
        assert slots[p] == tables[p][entry // page_entries] * page_entries + entry % page_entries
        made_of = range(entry * ratio - before, p + 1)
        assert tokens[p] == [-1 if q < 0 else tails[p][1] * size + q % size for q in made_of]


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_rows_of_drafts_find_what_they_read(num_drafts):
    """Rings have room for drafts: rows that are written together, and those of earlier steps that were rejected, leave
    every position that a row reads where it was."""
    generator = torch.Generator().manual_seed(num_drafts)
    sizes = {4: 8 + 2 * num_drafts, 128: 128 + 2 * num_drafts}
    held: dict[int, dict[int, int]] = {size: {} for size in (*sizes.values(), WINDOW + 2 * num_drafts)}
    position = 0
    while position < 700:
        rows = list(range(position, position + 1 + num_drafts))
        plan = DecodePlan(decodes(rows, [[0]] * len(rows), [[0, 1, 2, 3]] * len(rows)), WINDOW)
        for size, slots in held.items():
            slots |= dict(zip(plan.written(ring(0, size)).tolist(), rows))
        for row, p in enumerate(rows):
            size = WINDOW + 2 * num_drafts
            seen = range(int(plan.begin_T[row]), int(plan.end_T[row]))
            assert [held[size][q % size] for q in seen] == list(range(max(0, p - WINDOW + 1), p + 1))
            for ratio in sizes:
                made_of = plan.tokens(ratio, ring(0, sizes[ratio]))[row].tolist()
                if (p + 1) % ratio == 0:
                    first = p + 1 - ratio - (ratio if ratio == 4 else 0)
                    want = [q for q in range(first, p + 1) if q >= 0]
                    assert [held[sizes[ratio]][slot] for slot in made_of if slot >= 0] == want
        position += int(torch.randint(1, 2 + num_drafts, (), generator=generator))


def test_padding_completes_nothing_and_writes_in_its_page_alone():
    padding = padding_rows(4, 8, PAGE_TOKENS, 9, torch.device("cpu"), num_tail=3)
    plan = DecodePlan(padding, WINDOW)
    assert plan.written(ring(2, 132)).tolist() == [9 * 132] * 4
    for ratio in (4, 128):
        assert plan.entry_slots(ratio, PAGE_TOKENS // ratio).tolist() == [-1] * 4
