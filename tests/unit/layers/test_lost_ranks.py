"""Placements without the ranks that were lost."""

import re

import numpy as np
import pytest

from eprt.ep.errors import EPError
from eprt.ep.group.view import View
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.lost_ranks import slot_map_of_view


def test_tokens_go_to_replicas_on_ranks_of_the_view():
    slot_map = SlotMap.from_row(np.array([0, 1, 1, 2, 0, 2]), 3)
    less = slot_map_of_view(slot_map, View(1, (True, True, False)), "here:")
    assert less.expert_of_slot_S.tolist() == [0, 1, 1, 2, -1, -1]
    assert less.slot_LX[:3].tolist() == [[0, -1], [1, 2], [3, -1]]


def test_experts_that_are_gone_are_named():
    slot_map = SlotMap.from_row(np.array([0, 1, 1, 2, 3, 2]), 4)
    with pytest.raises(EPError, match=re.escape("here: experts 0, 3 had no replica outside of rank 0, 2, which")):
        slot_map_of_view(slot_map, View(1, (False, True, False)), "here:")
    with pytest.raises(EPError, match="expert 3 had no replica outside of rank 2,"):
        slot_map_of_view(slot_map, View(1, (True, True, False)), "here:")
