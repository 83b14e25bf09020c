"""Request schemas: prompts, lengths and sampling parameters, once the fields have the right types."""

import pytest

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.openai.protocol import ChatRequest, CompletionRequest, Message


def test_a_prompt_is_text_or_token_ids_and_there_may_be_many():
    def prompts(prompt):
        return CompletionRequest(prompt=prompt).prompts()

    assert prompts("a") == ["a"] and prompts([1, 2]) == [[1, 2]]
    assert prompts(["a", "b"]) == ["a", "b"] and prompts([[1], [2, 3]]) == [[1], [2, 3]]
    for bad, param in (
        ([], "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", []], "prompt[1]"),
        ([[1, 2.5]], "prompt[0]"),
        ([[10**30]], "prompt[0]"),
        ([True], "prompt[0]"),
    ):
        with pytest.raises(ApiError) as caught:
            prompts(bad)
        assert caught.value.param == param


def test_prompts_are_counted_without_looking_at_each():
    for prompt, count in (("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1], [2]], 2), ([], 0)):
        assert CompletionRequest(prompt=prompt).num_prompts == count


def test_both_names_of_the_length_may_be_given_if_they_agree():
    assert CompletionRequest(prompt="a").max_new_tokens is None
    assert CompletionRequest(prompt="a", max_tokens=0).max_new_tokens == 0
    assert CompletionRequest(prompt="a", max_tokens=3, max_completion_tokens=3).max_new_tokens == 3
    with pytest.raises(ApiError, match="max_tokens=3 and max_completion_tokens=4 differ"):
        _ = CompletionRequest(prompt="a", max_tokens=3, max_completion_tokens=4).max_new_tokens


def test_what_is_not_given_is_the_default():
    assert CompletionRequest(prompt="a").sampling_params(max_tokens=5, logprobs=None) == SamplingParams(max_tokens=5)


def test_what_is_given_reaches_the_sampler():
    request = CompletionRequest(prompt="a", stop="x", top_k=-1, logit_bias={"7": 3}, n=2, seed=9, stop_token_ids=[4])
    params = request.sampling_params(max_tokens=5, logprobs=2, prompt_logprobs=True)
    assert (params.stop, params.top_k, params.logit_bias, params.stop_token_ids) == (("x",), 0, {7: 3.0}, (4,))
    assert (params.n, params.seed, params.logprobs, params.prompt_logprobs) == (2, 9, 2, True)


def test_a_chat_asks_for_logprobs_in_its_own_way():
    chat = {"messages": [Message(role="user", content="hi")]}
    assert ChatRequest(**chat).num_logprobs is None and ChatRequest(**chat, logprobs=False).num_logprobs is None
    assert ChatRequest(**chat, logprobs=True).num_logprobs == 0
    assert ChatRequest(**chat, logprobs=True, top_logprobs=3).num_logprobs == 3
