"""The oracle for large GPU cases says what the slow one says, bit for bit."""

import random

import pytest
import torch

from eprt.ep import reference
from eprt.ep.config import EPConfig
from tests.gpu import fast_oracle
from tests.ranks.cases_ep import SKEWS, assert_same_bits, expert_output, make_tokens


@pytest.mark.parametrize("payload", ["same", "fp8"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_it_agrees_with_the_slow_one(num_ranks, payload):
    rng = random.Random(num_ranks)
    for skew in SKEWS:
        config = EPConfig(144, 3 * num_ranks, 4, 9, torch.bfloat16, payload, exact_combine=True)
        tokens = make_tokens(rng, config, num_ranks, skew)
        outputs = []
        for rank in range(num_ranks):
            want, got = reference.received(rank, config, tokens), fast_oracle.received(rank, config, tokens)
            assert_same_bits(got.count, want.recv_count_E, "count")
            assert_same_bits(got.x.view(torch.uint8), want.x_RH.view(torch.uint8), "x")
            if want.scale_RG is not None:
                assert got.scale is not None
                assert_same_bits(got.scale, want.scale_RG, "scale")
            outputs.append(expert_output(config, rank, want))
            assert_same_bits(fast_oracle.outputs(rank, config, got), outputs[-1], "outputs")
        for rank in range(num_ranks):
            want_TH = reference.combined(rank, config, (0,) * num_ranks, tokens, outputs)
            assert_same_bits(fast_oracle.combined(rank, config, tokens), want_TH, "combined")


def test_aligned_slots_begin_at_multiples():
    config = EPConfig(16, 6, 2, 40, torch.bfloat16)
    tokens = make_tokens(random.Random(0), config, 2, "uniform")
    rows = fast_oracle.received(0, config, tokens, alignment=8)
    assert rows.num_rows == int((-(-rows.count // 8) * 8).sum())
    plain = fast_oracle.received(0, config, tokens)
    assert torch.equal(rows.x[rows.row], plain.x[plain.row])
