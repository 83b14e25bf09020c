"""LayerPages: rings by position, entries by page, and what a bookmark carries from one tail to another."""

import torch

from eprt.layers.hybrid_cache import LayerPages, Ring
from eprt.layers.hybrid_plan import ClosedEntries, Places
from eprt.ops.entry_format import EntryFormat


def ring(num_slots: int, width: int, page: int = 0, num_pages: int = 4) -> Ring:
    return Ring(page, torch.full((num_pages, num_slots, width), float("nan")))


def layer(num_slots: int = 132) -> LayerPages:
    tail = {"window": ring(num_slots, 3), "state": ring(12, 4, page=1)}
    bookmark = {"window": ring(128, 3), "state": ring(4, 2)}
    context = {"entries": torch.full((4, 64, 3), float("nan"))}
    entry = EntryFormat(3, 1, torch.float32)
    return LayerPages(4, 4, tail, bookmark, context, {"entries": entry, "window": entry})


def rows(first: int, end: int, width: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.float32)[:, None].repeat(1, width)


def test_a_ring_holds_the_latest_positions_of_each_request():
    one, pages = ring(8, 2, page=1), torch.tensor([0, 3])
    one.write(pages, 20, rows(0, 20, 2))
    assert torch.equal(one.read(pages, 12, 20), rows(12, 20, 2))
    one.write(pages, 23, rows(20, 23, 2))
    assert torch.equal(one.read(pages, 15, 23), rows(15, 23, 2))
    assert one.slots_PSD[:3].isnan().all(), "no other page is touched"


def test_a_bookmark_carries_the_window_and_the_first_channels_of_open_windows():
    pages = layer()
    mine, bookmark, other = torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3, 3])
    pages.tail["window"].write(mine, 256, rows(0, 256, 3))
    pages.tail["state"].write(mine, 256, rows(244, 256, 4))
    pages.leave_bookmark(mine, bookmark, 256)
    pages.tail["window"].write(mine, 300, rows(256, 300, 3) * 0)
    pages.take_over(other, bookmark, 256)
    assert torch.equal(pages.tail["window"].read(other, 128, 256), rows(128, 256, 3))
    state = pages.tail["state"].read(other, 252, 256)
    assert torch.equal(state[:, :2], rows(252, 256, 2)) and not state[:, 2:].any()


def test_places_of_several_requests_at_once():
    one, tails = ring(8, 2, page=1), torch.tensor([[0, 3], [1, 2]])
    places = Places(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 8, 30, 31]), torch.arange(4))
    slots = places.slots(tails, one)
    one.scatter(slots, rows(0, 4, 2), places.at_Y)
    assert torch.equal(one.read(tails[0], 7, 9), rows(0, 2, 2)) and torch.equal(
        one.read(tails[1], 30, 32), rows(2, 4, 2)
    )
    for dtype in (torch.float32, torch.bfloat16):
        read = torch.zeros(6, 2, dtype=dtype)
        one.gather(slots, read, torch.tensor([5, 4, 3, 2]))
        assert torch.equal(read[2:], rows(0, 4, 2).flip(0).to(dtype)) and not read[:2].any()
        one.gather(slots, read)
        assert torch.equal(read[:4], rows(0, 4, 2).to(dtype))
    assert one.slots_PSD[:2].isnan().all(), "no other page is touched"


def test_entries_lie_in_the_pages_of_their_positions():
    pages, tables = layer(), torch.tensor([[3, 1], [0, 2]])
    none, index = Places.join([]), torch.zeros(11, 4, dtype=torch.int64)
    closed = ClosedEntries(none, index, torch.tensor([0] * 10 + [1]), torch.tensor([*range(60, 70), 65]))
    pages.insert("entries", closed.slots(tables, 64), torch.cat((rows(60, 70, 3), rows(7, 8, 3))))
    assert torch.equal(pages.context["entries"][3, 60:], rows(60, 64, 3))
    assert torch.equal(pages.context["entries"][1, :6], rows(64, 70, 3))
    assert torch.equal(pages.context["entries"][2, 1:2], rows(7, 8, 3))
