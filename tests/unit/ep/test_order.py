"""The order of EP calls, checked without any communication."""

import pytest

from eprt.ep.order import CALLS, COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND, CallOrder


def begin(order: CallOrder) -> int:
    epoch = order.next_epoch()
    order.complete(DISPATCH_SEND, epoch)
    return epoch


def go(order: CallOrder, epoch: int, *calls: int) -> None:
    for call in calls:
        order.check(call, epoch)
        order.complete(call, epoch)


def test_handles_follow_one_another():
    order = CallOrder(2, "[rank 0/1]")
    for expected in range(1, 6):
        epoch = begin(order)
        assert epoch == expected
        go(order, epoch, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)


def test_two_overlap_in_the_order_of_two_batch_overlap():
    order = CallOrder(2, "[rank 0/1]")
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
def test_a_call_before_its_turn(done, wrong, waits_for):
    order = CallOrder(2, "[rank 3/4]")
    epoch = begin(order)
    go(order, epoch, *done)
    with pytest.raises(RuntimeError, match=rf"\[rank 3/4\] .*epoch 1 waits for {waits_for}"):
        order.check(wrong, epoch)


def test_too_many_in_flight():
    order = CallOrder(2, "[rank 0/1]")
    begin(order)
    begin(order)
    with pytest.raises(RuntimeError, match=r"2 handles are in flight.*epoch 1, which waits for dispatch_recv"):
        order.next_epoch()


@pytest.mark.parametrize("call", [DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV])
def test_each_call_takes_handles_in_the_order_in_which_they_were_sent(call):
    order = CallOrder(3, "[rank 0/1]")
    a, b, c = (begin(order) for _ in range(3))
    for earlier in range(DISPATCH_RECV, call):
        for epoch in (a, b, c):
            go(order, epoch, earlier)
    go(order, a, call)
    with pytest.raises(RuntimeError, match=rf"{CALLS[call]}: .*epoch 3 is out of order; that of epoch 2 comes first"):
        order.check(call, c)
    go(order, b, call)
    go(order, c, call)


def test_a_completed_handle():
    order = CallOrder(2, "[rank 0/1]")
    epoch = begin(order)
    go(order, epoch, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)
    with pytest.raises(RuntimeError, match="epoch 1 is already completed"):
        order.check(DISPATCH_RECV, epoch)


def test_restart_counts_on_from_elsewhere_once_nothing_is_in_flight():
    order = CallOrder(2, "[rank 0/1]")
    epoch = begin(order)
    assert order.in_flight is not None
    assert "the handle of epoch 1 is in flight and waits for dispatch_recv" in order.in_flight
    go(order, epoch, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV)
    assert order.num_completed == 1 and order.in_flight is None
    order.restart(9)
    assert begin(order) == 10


def start(order: CallOrder, call: int, epoch: int) -> None:
    order.check_launch(call, epoch)
    order.launch(call, epoch)


def test_receives_of_two_handles_are_launched_ahead_of_both_calls():
    """As two-batch overlap does on GPUs."""
    order = CallOrder(2, "[rank 0/1]")
    a, b = begin(order), begin(order)
    for call in (DISPATCH_RECV, COMBINE_RECV):
        for epoch in (a, b):
            start(order, call, epoch)
            assert order.is_launched(call, epoch)
        for epoch in (a, b):
            go(order, epoch, call)
            if call == DISPATCH_RECV:
                go(order, epoch, COMBINE_SEND)
    assert order.in_flight is None and begin(order) == 3
    assert not order.is_launched(DISPATCH_RECV, 3)


def test_launches_keep_the_order_of_sending_too():
    order = CallOrder(2, "[rank 0/1]")
    a, b = begin(order), begin(order)
    with pytest.raises(RuntimeError, match=r"dispatch_recv: .*epoch 2 is out of order; that of epoch 1 comes first"):
        order.check_launch(DISPATCH_RECV, b)
    start(order, DISPATCH_RECV, a)
    with pytest.raises(RuntimeError, match=r"dispatch_recv: that of epoch 1 has been launched already"):
        order.check_launch(DISPATCH_RECV, a)
    start(order, DISPATCH_RECV, b)
    with pytest.raises(RuntimeError, match=r"dispatch_recv: .*epoch 2 is out of order; that of epoch 1 comes first"):
        order.check(DISPATCH_RECV, b)  # launched or not, results are handed out in turn
    with pytest.raises(RuntimeError, match=r"combine_send: the handle of epoch 1 waits for dispatch_recv"):
        order.check(COMBINE_SEND, a)
    with pytest.raises(RuntimeError, match=r"combine_recv: the handle of epoch 1 waits for dispatch_recv"):
        order.check_launch(COMBINE_RECV, a)


def test_a_handle_stays_in_flight_until_its_result_was_handed_out():
    order = CallOrder(1, "[rank 0/1]")
    a = begin(order)
    go(order, a, DISPATCH_RECV, COMBINE_SEND)
    start(order, COMBINE_RECV, a)
    with pytest.raises(
        RuntimeError, match="1 handles are in flight already; finish that of epoch 1, which waits for comb"
    ):
        order.next_epoch()
    go(order, a, COMBINE_RECV)
    assert begin(order) == 2


def test_after_a_failure_only_what_nobody_reads_is_written():
    order = CallOrder(2, "[rank 0/1]")
    assert order.next_safe_epoch == 1
    a = begin(order)
    assert order.next_safe_epoch == a + 2  # failed in dispatch_recv: others may still read what came before
    go(order, a, DISPATCH_RECV)
    assert order.next_safe_epoch == a + 1
    order.restart(a + 1)
    assert begin(order) == a + 2 and order.num_begun == a + 2
    with pytest.raises(RuntimeError, match="already completed"):
        order.check(COMBINE_SEND, a)
