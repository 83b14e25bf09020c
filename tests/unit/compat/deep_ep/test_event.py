"""EventOverlap without a GPU."""

import pytest

from eprt.compat import deep_ep


def test_an_event_that_is_none_is_not_waited_for_silently():
    with deep_ep.EventOverlap():
        pass
    with pytest.raises(ValueError, match="async_finish"):
        deep_ep.EventOverlap().current_stream_wait()
