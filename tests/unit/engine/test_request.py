"""RequestLimits and Request: what can never run is refused with its numbers, and when a request ends."""

import re

import numpy as np
import pytest

from eprt.engine.request import Request, RequestLimits
from eprt.engine.sampling_params import SamplingParams

LIMITS = RequestLimits(vocab_size=100, max_model_len=8, kv_tokens=1000)


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], {}, "the prompt is empty: it needs at least one token"),
        ([1, 100], {}, "prompt token 100 is outside the vocabulary 0..99"),
        ([-1], {}, "prompt token -1 is outside the vocabulary 0..99"),
        ([1], {"stop_token_ids": (5, 100)}, "stop_token_ids: token 100 is outside the vocabulary 0..99"),
        ([1], {"logit_bias": {-2: 1.0}}, "logit_bias: token -2 is outside the vocabulary 0..99"),
        ([1] * 8, {}, "the prompt has 8 tokens; with at least 1 generated it exceeds max_model_len 8 (shorten"),
        ([1] * 9, {"max_tokens": 0}, "the prompt has 9 tokens; with at least 0 generated it exceeds max_model_len 8"),
    ],
)
def test_what_can_never_run_is_named(prompt, params, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LIMITS.check(prompt, SamplingParams(**params))


def test_a_cache_that_is_too_small_is_named():
    small = RequestLimits(vocab_size=100, max_model_len=8, kv_tokens=8)
    with pytest.raises(ValueError, match=re.escape("(the KV cache holds 8 tokens; raise --kv-cache-gb)")):
        small.check([1] * 8, SamplingParams())


def test_what_just_fits_may_run():
    LIMITS.check([1] * 7, SamplingParams(max_tokens=1000))
    LIMITS.check([99] * 8, SamplingParams(max_tokens=0))


def new(params: SamplingParams, seed: int = 3) -> Request:
    return Request.new("r", [1, 2, 3], params, sample_idx=1, seed=seed, max_model_len=8, eos_token_ids=(5, 6))


def test_a_request_ends_at_the_smaller_of_its_two_lengths():
    assert new(SamplingParams(max_tokens=2)).max_len == 5 and new(SamplingParams(max_tokens=99)).max_len == 8


def test_eos_ends_a_request_unless_it_is_ignored():
    assert new(SamplingParams(stop_token_ids=(9,))).stop_ids == {5, 6, 9}
    assert new(SamplingParams(stop_token_ids=(9,), ignore_eos=True)).stop_ids == {9}


def test_a_request_begins_with_its_prompt():
    request = new(SamplingParams(prompt_logprobs=True), seed=-1)
    assert request.tokens_L.dtype == np.int32 and request.tokens_L.tolist() == [1, 2, 3]
    assert request.num_prompt == 3 and request.row == -1 and not request.decoding
    assert request.seed == (1 << 64) - 1 and request.prompt_logprobs == []
    assert new(SamplingParams()).prompt_logprobs is None
