"""Readers by name."""

import pytest

from eprt.kv.reader import PageSource, open_reader


def test_an_unknown_reader_is_refused_by_name():
    with pytest.raises(ValueError, match="no reader is called 'carrier'; there are memory, nixl, peer, tcp"):
        open_reader(PageSource("carrier", "a", 1, ()))
