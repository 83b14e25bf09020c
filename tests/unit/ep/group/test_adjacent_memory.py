"""Memory of all ranks in a row, here of one; tests/ranks/test_prompt_ranks.py has it of several."""

import os

import pytest

from eprt.ep.group.group import EPGroup


def test_fresh_memory_is_zero_and_outlives_its_file():
    memory = EPGroup.single().adjacent_memory(8192)
    assert memory.bytes_RB.shape == (1, 8192) and not memory.bytes_RB.any()
    memory.bytes_RB[0, 7] = 9
    assert os.pread(memory.fd, 1, memory.offset + 7) == b"\x09"
    memory.close_file()
    assert memory.bytes_RB[0, 7] == 9


def test_parts_begin_where_pages_do():
    with pytest.raises(ValueError, match=r"\[rank 0/1\] 100 bytes of adjacent memory: must be a multiple of 4096"):
        EPGroup.single().adjacent_memory(100)
