"""The order of verbs, checked without any communication."""

import pytest

from eprt.ep.order import COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND, VERBS, VerbOrder


def begin(order: VerbOrder) -> int:
    epoch = order.next_epoch()
    order.done(DISPATCH_SEND, epoch)
    return epoch


def go(order: VerbOrder, epoch: int, *verbs: int) -> None:
    for verb in verbs:
        order.check(verb, epoch)
        order.done(verb, epoch)


def test_handles_follow_one_another():
    order = VerbOrder(2, "[rank 0/1]")
    for expected in range(1, 6):
        epoch = begin(order)
        assert epoch == expected
        go(order, epoch, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)


def test_two_overlap_in_the_order_of_two_batch_overlap():
    order = VerbOrder(2, "[rank 0/1]")
    a, b = begin(order), begin(order)
    go(order, a, DISPATCH_RECV, COMBINE_SEND)
    go(order, b, DISPATCH_RECV)
    go(order, a, COMBINE_RECV)
    c = begin(order)
    go(order, b, COMBINE_SEND, COMBINE_RECV)
    go(order, c, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)


@pytest.mark.parametrize(
    "done, wrong, waits_for",
    [
        ((), COMBINE_SEND, "dispatch_recv"),
        ((), COMBINE_RECV, "dispatch_recv"),
        ((DISPATCH_RECV,), DISPATCH_RECV, "combine_send"),
        ((DISPATCH_RECV,), COMBINE_RECV, "combine_send"),
        ((DISPATCH_RECV, COMBINE_SEND), COMBINE_SEND, "combine_recv"),
    ],
)
def test_a_verb_before_its_turn(done, wrong, waits_for):
    order = VerbOrder(2, "[rank 3/4]")
    epoch = begin(order)
    go(order, epoch, *done)
    with pytest.raises(RuntimeError, match=rf"\[rank 3/4\] .*epoch 1 waits for {waits_for}"):
        order.check(wrong, epoch)


def test_too_many_in_flight():
    order = VerbOrder(2, "[rank 0/1]")
    begin(order)
    begin(order)
    with pytest.raises(RuntimeError, match=r"2 handles are in flight.*epoch 1, which waits for dispatch_recv"):
        order.next_epoch()


@pytest.mark.parametrize("verb", [DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV])
def test_each_verb_takes_handles_in_the_order_in_which_they_were_sent(verb):
    order = VerbOrder(3, "[rank 0/1]")
    a, b, c = (begin(order) for _ in range(3))
    for earlier in range(DISPATCH_RECV, verb):
        for epoch in (a, b, c):
            go(order, epoch, earlier)
    go(order, a, verb)
    with pytest.raises(RuntimeError, match=rf"{VERBS[verb]}: .*epoch 3 is out of order; that of epoch 2 comes first"):
        order.check(verb, c)
    go(order, b, verb)
    go(order, c, verb)


def test_a_completed_handle():
    order = VerbOrder(2, "[rank 0/1]")
    epoch = begin(order)
    go(order, epoch, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)
    with pytest.raises(RuntimeError, match="epoch 1 is already completed"):
        order.check(DISPATCH_RECV, epoch)


def test_restart_counts_on_from_elsewhere_once_nothing_is_in_flight():
    order = VerbOrder(2, "[rank 0/1]")
    epoch = begin(order)
    assert order.in_flight is not None
    assert "the handle of epoch 1 is in flight and waits for dispatch_recv" in order.in_flight
    go(order, epoch, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)
    assert order.num_completed == 1 and order.in_flight is None
    order.restart(9)
    assert begin(order) == 10
