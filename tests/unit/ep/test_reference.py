"""The oracle itself, against results worked out by hand."""

import pytest
import torch

from eprt.ep import reference
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend

CONFIG = EPConfig(hidden_size=2, num_slots=4, top_k=2, num_max_tokens_per_rank=4, dtype=torch.float32)


def tokens(
    rows: list[list[float]], slots: list[list[int]], weights: list[list[float]], num_rounds: int = 1
) -> SentTokens:
    shape = (len(rows), 2)
    return SentTokens(
        torch.tensor(rows, dtype=torch.float32).view(shape),
        torch.tensor(slots, dtype=torch.int64).view(shape),
        torch.tensor(weights).view(shape),
        num_rounds,
    )


# Two ranks of two slots each. Rank 0 has two tokens, rank 1 has one.
SENT = [
    tokens([[1, 2], [3, 4]], [[3, 0], [2, -1]], [[0.5, 0.25], [2.0, 9.0]]),
    tokens([[5, 6]], [[3, 2]], [[1.0, 10.0]], num_rounds=3),
]


def test_rows_come_by_slot_then_source_then_token():
    at_0, at_1 = (reference.received(rank, CONFIG, SENT) for rank in range(2))
    assert at_0.x_RH.tolist() == [[1, 2]] and at_0.recv_count_E.tolist() == [1, 0]
    assert at_1.x_RH.tolist() == [[3, 4], [5, 6], [1, 2], [5, 6]] and at_1.recv_count_E.tolist() == [2, 2]
    assert at_0.num_rounds == at_1.num_rounds == 3
    assert reference.routes_to(1, CONFIG, SENT) == [(0, 0, 1, 0), (0, 1, 0, 1), (1, 0, 0, 0), (1, 1, 0, 0)]


@pytest.mark.parametrize("node_of_rank", [(0, 0), (0, 1)])
def test_combine_weighs_and_sums(node_of_rank):
    outputs = [torch.tensor([[100.0, 200.0]]), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])]
    at_0, at_1 = (reference.combined(rank, CONFIG, node_of_rank, SENT, outputs) for rank in range(2))
    assert at_0.tolist() == [[0.5 * 3 + 0.25 * 100, 0.5 * 3 + 0.25 * 200], [2.0, 2.0]]
    assert at_1.tolist() == [[4.0 + 10 * 2.0] * 2]


@pytest.mark.parametrize("node_of_rank, expected", [((0, 0), 1 + 2.0**-7), ((0, 1), 1.0)])
def test_sums_of_another_node_are_rounded_for_the_way_back(node_of_rank, expected):
    """In bf16 1 + 2^-8 is a tie that rounds to 1: on the way back from node 1, and again at the end."""
    config = EPConfig(hidden_size=1, num_slots=4, top_k=3, num_max_tokens_per_rank=1, dtype=torch.bfloat16)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    sent = [
        SentTokens(one, torch.tensor([[2, 3, 0]]), torch.tensor([[1.0, 2.0**-8, 2.0**-8]])),
        SentTokens(one[:0], torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)),
    ]
    assert reference.combined(0, config, node_of_rank, sent, [one, one.repeat(2, 1)]).tolist() == [[expected]]


def test_quantize_by_groups_of_128():
    x_TH = torch.zeros(1, 130)
    x_TH[0, 0], x_TH[0, 1], x_TH[0, 129] = 448.0, -1.0, 7.0
    values, scales = reference.quantize(x_TH)
    assert scales.shape == (1, 2) and scales[0].tolist() == [1.0, 7.0 / 448.0]
    assert values[0, [0, 1, 129]].float().tolist() == [448.0, -1.0, 448.0]
    torch.testing.assert_close(reference.dequantize(values, scales), x_TH)


def test_backend_in_one_process_is_the_functions():
    backend = make_backend("reference", CONFIG, EPGroup.single())
    sent = SENT[0]
    handle = backend.dispatch_send(sent.x_TH, sent.slot_idx_TK, sent.topk_weights_TK)
    got = backend.dispatch_recv(handle)
    assert got.x_RH.tolist() == [[1, 2], [3, 4], [1, 2]] and got.recv_count_E.tolist() == [1, 0, 1, 1]
    backend.combine_send(got.x_RH * 2, handle)
    assert backend.combine_recv(handle).tolist() == [[1.5, 3.0], [12.0, 16.0]]
    with pytest.raises(ValueError, match=r"slot_idx_TK\[0, 1\] = 4 is not in -1..3"):
        backend.dispatch_send(sent.x_TH[:1], torch.tensor([[0, 4]]), sent.topk_weights_TK[:1])
