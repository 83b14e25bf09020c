"""LowLatencyMode where no GPU is needed: the order of hooks."""

import pytest

from eprt.compat.deep_ep.low_latency import PendingHooks


def test_two_hooks_may_be_outstanding_and_each_is_called_once():
    pending = PendingHooks("low_latency_dispatch")
    first, second = pending.begin_call(True), pending.begin_call(True)
    with pytest.raises(RuntimeError, match="the hook of low_latency_dispatch number 1 has not been called"):
        pending.begin_call(False)
    pending.end_call(first)
    with pytest.raises(RuntimeError, match="number 1 has been called already"):
        pending.end_call(first)
    assert pending.is_pending(second) and pending.begin_call(False) == 3
    with pytest.raises(RuntimeError, match="number 2 has not been called"):
        pending.begin_call(True)
