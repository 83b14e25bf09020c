"""How the SMs of a GPU are divided between sending and the experts."""

from itertools import product

import pytest

from eprt.config import MoEConfig
from eprt.layers.sm_split import MOST_SMS, send_sms, tile_rows

V3 = MoEConfig(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, weight_format="fp8")
HIDDEN, WIDTH, EXPERTS, TOP_K = (
    (1024, 2048, 4096, 7168, 8192),
    (768, 1536, 2048, 4096, 14336),
    (8, 64, 256),
    (2, 8),
)
RANKS, TOKENS = (2, 4, 8), (1, 8, 32, 128, 512, 1024, 4096)


@pytest.mark.parametrize("weight_format", ["fp8", "same", "int8", "fp4"])
def test_between_gpus_of_one_nvlink_host_no_shape_pays(weight_format):
    """Few tokens or many, narrow or wide: sending tile by tile gains nothing there, as the documentation says."""
    for hidden, width, experts, top_k in product(HIDDEN, WIDTH, EXPERTS, TOP_K):
        config = MoEConfig(hidden, width, experts, top_k, weight_format=weight_format)
        for ranks, tokens in product(RANKS, TOKENS):
            assert send_sms(config, tokens, ranks, experts // ranks, sms=132) == 0, (config, ranks, tokens)


def test_over_a_slow_link_more_tokens_get_more_sms():
    for tokens in (1, 16, 64, 128, 512):
        assert send_sms(V3, tokens, 8, 32, sms=132, link_gb_s=1e9) == 0
    slow = [send_sms(V3, tokens, 8, 32, sms=132, link_gb_s=25.0) for tokens in (16, 64, 128, 512)]
    assert 0 < slow[1] <= slow[2] <= slow[3] <= MOST_SMS, "over a network of 200 Gb/s it pays"


@pytest.mark.parametrize(
    "ranks, tokens, pays_below", [(8, 16, 25), (8, 64, 65), (8, 128, 100), (8, 512, 165), (2, 128, 10)]
)
def test_the_link_from_which_on_nothing_is_sent_early(ranks, tokens, pays_below):
    """GB/s that leave a GPU, for experts of DeepSeek-V3: what docs/overlap.md says."""
    paying = [speed for speed in range(5, 400, 5) if send_sms(V3, tokens, ranks, 256 // ranks, 132, speed)]
    assert max(paying) == pays_below and paying == list(range(5, pays_below + 1, 5)), "every slower link pays"


def test_a_tile_has_about_the_rows_of_a_slot():
    assert [tile_rows(V3, tokens, 8, 256) for tokens in (1, 64, 80, 128, 4096)] == [16, 16, 32, 32, 64]
