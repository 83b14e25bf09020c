"""EngineConfig: values of a wrong type or range are named as the flag that they come from."""

import numpy as np
import pytest

from eprt.config import EngineConfig


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_speculative_tokens": 1.5}, "--num-speculative-tokens 1.5: must be a whole number"),
        ({"chunk_size": "512"}, "--chunk-size '512': must be a whole number"),
        ({"spare_experts": None}, "--spare-experts None: must be a whole number"),
        ({"num_hidden_layers": True, "load_format": "dummy"}, "--num-hidden-layers True: must be a whole number"),
        ({"kv_cache_gb": "1"}, "--kv-cache-gb '1': must be a number"),
        ({"exact_combine": "no"}, "--exact-combine 'no': must be True or False"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
    ],
)
def test_options_of_another_type_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig("somewhere", **options)
    whole = EngineConfig("somewhere", chunk_size=np.int64(64), kv_cache_gb=1, max_model_len=None)
    assert whole.chunk_size == 64


def test_pages_have_the_size_that_the_fastest_attention_takes_wherever_there_may_be_a_gpu():
    sizes = [EngineConfig("somewhere", device=device).page_size for device in ("cpu", "cuda", "auto")]
    assert sizes == [16, 64, 64] and EngineConfig("somewhere", device="auto", page_size=8).page_size == 8


@pytest.mark.parametrize("sizes", [8, (1, 2.5), (True,), "8", None])
def test_graph_sizes_are_whole_numbers(sizes):
    with pytest.raises(ValueError, match=r"--graph-sizes .*: must be whole numbers of at least 1"):
        EngineConfig("somewhere", graph_sizes=sizes)
