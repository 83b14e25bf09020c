"""Expert load from what ranks report: sums over ranks, skew, and nothing until all have reported."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from eprt.serve.ranks.expert_load import LayerLoad, expert_load, total_load

INFO: Any = SimpleNamespace(moe_layers=(1, 4), num_experts=3)


def rank(prefill_LE, decode_LE, slot_tokens) -> Any:
    tokens = np.array([prefill_LE, decode_LE], np.int64).tobytes()
    return SimpleNamespace(expert_tokens=tokens, slot_tokens=slot_tokens)


RANKS = [
    rank([[1, 0, 0], [0, 0, 0]], [[2, 0, 3], [0, 0, 0]], [10, 0]),
    rank([[0, 5, 0], [0, 0, 0]], [[0, 0, 1], [0, 0, 0]], [2, 0]),
]


def test_choices_of_all_ranks_are_added_up():
    total_PLE = total_load([INFO] * 2, RANKS)
    assert total_PLE is not None and total_PLE.shape == (2, 2, 3)
    assert total_PLE[0].tolist() == [[1, 5, 0], [0, 0, 0]] and total_PLE[1, 0].tolist() == [2, 0, 4]


def test_a_layer_has_its_ranks_its_experts_and_its_skew():
    first, idle = expert_load([INFO] * 2, RANKS)
    assert first == LayerLoad(1, [10, 2], [3, 5, 4], [1, 5, 0], skew=10 / 6)
    assert (idle.layer, idle.per_rank, idle.skew) == (4, [0, 0], 1.0)


def test_nothing_is_known_until_every_rank_has_reported_and_without_experts():
    dense: Any = SimpleNamespace(moe_layers=(), num_experts=0)
    for infos, stats in (([], []), ([INFO] * 2, RANKS[:1]), ([dense], RANKS[:1])):
        assert total_load(infos, stats) is None and expert_load(infos, stats) == []
