"""LayerPages: rings by position, entries by page, and what a bookmark carries from one tail to another."""

import torch

from eprt.layers.hybrid_cache import LayerPages, MovePlaces, Ring
from eprt.layers.hybrid_plan import ClosedEntries, Places
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat
from eprt.ops.paged_rows import copy_rows


def ring(num_slots: int, width: int, page: int = 0, num_pages: int = 8) -> Ring:
    return Ring(page, torch.full((num_pages, num_slots, width), float("nan")))


def layer(num_slots: int = 132) -> LayerPages:
    tail = {"window": ring(num_slots, 3), "state": ring(12, 4, page=1)}
    bookmark = {"window": ring(128, 3), "state": ring(4, 2)}
    context = {"entries": torch.full((8, 64, 3), float("nan"))}
    entry = EntryFormat(3, 1, torch.float32)
    return LayerPages(8, 4, tail, bookmark, context, entry, IndexFormat(2, torch.float32))


def rows(first: int, end: int, width: int) -> torch.Tensor:
    return torch.arange(first, end, dtype=torch.float32)[:, None].repeat(1, width)


def places(one: Ring, page: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(page), torch.arange(first, end) % one.size


def test_a_ring_holds_the_latest_positions_of_each_request():
    one = ring(8, 2, page=1)
    one.write(places(one, 3, 12, 20), rows(12, 20, 2))
    assert torch.equal(one.read(places(one, 3, 12, 20)), rows(12, 20, 2))
    one.write(places(one, 3, 20, 23), rows(20, 23, 2))
    assert torch.equal(one.read(places(one, 3, 15, 23)), rows(15, 23, 2))
    assert one.slots_PSD[:3].isnan().all(), "no other page is touched"


def test_a_bookmark_carries_the_window_and_the_first_channels_of_open_windows():
    """Of two requests at once; behind the ends a few more positions were written, as by drafts."""
    pages = layer()
    moves = MovePlaces.upload([([0, 1], [4], 256), ([5, 6], [7], 512)], torch.device("cpu"))
    others = MovePlaces.upload([([3, 3], [4], 256), ([2, 2], [7], 512)], torch.device("cpu"))
    window, state = pages.tail["window"], pages.tail["state"]
    for (tail, _, end), sign in ((([0, 1], [4], 256), 1), (([5, 6], [7], 512), -1)):
        window.write(places(window, tail[0], end - 130, end + 2), sign * rows(end - 130, end + 2, 3))
        state.write(places(state, tail[1], end - 10, end + 2), sign * rows(end - 10, end + 2, 4))
    pages.leave_bookmarks(moves)
    for page in (0, 5):
        window.slots_PSD[page] = state.slots_PSD[page + 1] = float("nan")
    pages.take_over(others)
    for page, end, sign in ((3, 256, 1), (2, 512, -1)):
        assert torch.equal(window.read(places(window, page, end - 128, end)), sign * rows(end - 128, end, 3))
        taken = state.read(places(state, page, end - 4, end))
        assert torch.equal(taken[:, :2], sign * rows(end - 4, end, 2)) and taken[:, 2:].isnan().all()


def test_places_of_several_requests_at_once():
    one, tails = ring(8, 2, page=1), torch.tensor([[0, 3], [1, 2]])
    of_both = Places(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 8, 30, 31]), torch.arange(4))
    slots = of_both.slots(tails, one)
    one.scatter(slots, rows(0, 4, 2), of_both.at_Y)
    assert torch.equal(one.read(places(one, 3, 7, 9)), rows(0, 2, 2))
    assert torch.equal(one.read(places(one, 2, 30, 32)), rows(2, 4, 2))
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
    entries = torch.tensor([0] * 10 + [1]), torch.tensor([*range(60, 70), 65]), torch.zeros(0, dtype=torch.int64)
    closed = ClosedEntries(none, index, *entries)
    copy_rows(pages.context["entries"], closed.slots(tables, 64), torch.cat((rows(60, 70, 3), rows(7, 8, 3))), None)
    assert torch.equal(pages.context["entries"][3, 60:], rows(60, 64, 3))
    assert torch.equal(pages.context["entries"][1, :6], rows(64, 70, 3))
    assert torch.equal(pages.context["entries"][2, 1:2], rows(7, 8, 3))
