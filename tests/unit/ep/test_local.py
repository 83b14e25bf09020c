"""The backend of one rank: against the oracle, and what it refuses."""

import random

import pytest
import torch

from eprt import EPGroup
from eprt.ep.config import EPConfig
from eprt.ep.registry import make_backend
from tests.ranks import cases_ep

LOCAL = EPConfig(16, 4, 2, 4, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skew", cases_ep.SKEWS)
def test_local_backend_equals_the_oracle(dtype, skew):
    config = EPConfig(hidden_size=16, num_slots=5, top_k=3, num_max_tokens_per_rank=9, dtype=dtype, mode="low_latency")
    backend = make_backend("local", config, EPGroup.single())
    for seed in range(5):
        tokens = cases_ep.make_tokens(random.Random(seed), config, 1, skew)
        cases_ep.round_trip(backend, tokens, zero_copy=True)  # or y_RH would lack the rows of masked entries


def test_local_backend_refuses_what_it_cannot_do():
    backend = make_backend("local", LOCAL, EPGroup.single())
    with pytest.raises(ValueError, match="num_max_tokens_per_rank=4"):
        backend.dispatch_send(torch.zeros(5, 16), torch.zeros(5, 2, dtype=torch.int64), torch.zeros(5, 2))
    handle = backend.dispatch_send(torch.zeros(1, 16), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="combine_recv"):
        backend.combine_recv(handle)
