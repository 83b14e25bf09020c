"""KeptTails: a chunk that begins again finds the rings as they were; one that goes on finds what it left."""

from typing import Any

import pytest
import torch

from eprt.layers.batch import ForwardBatch, TailMove
from eprt.layers.hybrid_cache import LayerPages, Ring
from eprt.layers.kept_tails import KeptTails
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat


def batch(*spans: tuple[int, int, int], takeover: bool = False) -> ForwardBatch:
    """spans: (tail page, start, end) of each request."""
    num = [end - start for _, start, end in spans]
    none: Any = torch.zeros(sum(num), dtype=torch.int64)
    return ForwardBatch(
        token_id_T=none,
        position_T=none,
        kv_slot_T=none,
        page_table_BP=torch.zeros(len(spans), 1, dtype=torch.int32),
        seq_len_B=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
        query_start_B1=torch.tensor([0, *torch.tensor(num).cumsum(0).tolist()], dtype=torch.int32),
        num_decode=0,
        logits_idx=none,
        tail_BF=torch.tensor([[page] for page, _, _ in spans], dtype=torch.int32),
        takeovers=(TailMove(0, spans[0][1], (5,)),) if takeover else (),
    )


@pytest.fixture
def layer() -> LayerPages:
    formats = EntryFormat(2, 2, torch.float32), IndexFormat(2, torch.float32)
    return LayerPages(6, 0, {"window": Ring(0, torch.zeros(6, 8, 2))}, {}, {}, *formats)


def write(kept: KeptTails, layer: LayerPages, value: int, *spans: tuple[int, int, int], **options: Any) -> list[float]:
    """What the first request finds in its tail; then all of them write there."""
    kept.begin(batch(*spans, **options), [layer])
    slots = layer.tail["window"].slots_PSD
    found = slots[spans[0][0]].unique().tolist()
    for page, _, _ in spans:
        slots[page] = value
    return found


def test_a_chunk_that_begins_again_finds_what_the_first_found(layer):
    kept = KeptTails(0)
    assert write(kept, layer, 1, (2, 0, 30)) == [0]
    assert write(kept, layer, 2, (2, 30, 60)) == [1]
    assert write(kept, layer, 3, (2, 30, 50)) == [1], "again, and another end"
    assert write(kept, layer, 4, (3, 0, 9)) == [0], "another request"
    assert write(kept, layer, 5, (2, 30, 60), (3, 9, 40)) == [1], "again, behind a step without it"
    assert write(kept, layer, 6, (3, 9, 40)) == [4]
    assert write(kept, layer, 7, (2, 60, 90)) == [5], "the next chunk goes on"


def test_requests_that_decode_or_begin_keep_nothing(layer):
    kept = KeptTails(1)
    write(kept, layer, 1, (2, 30, 60))
    assert write(kept, layer, 2, (2, 60, 62)) == [1]
    assert write(kept, layer, 3, (2, 30, 60)) == [2], "it decoded since: the chunk is another request's"
    assert write(kept, layer, 4, (2, 0, 30)) == [3]
    assert write(kept, layer, 5, (2, 0, 30)) == [4], "nothing is read before the first token"
    write(kept, layer, 6, (2, 30, 60))
    assert write(kept, layer, 7, (2, 30, 60), takeover=True) == [6], "a bookmark brings its own window"
    kept.begin(batch(), [layer])
