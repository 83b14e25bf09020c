"""Preparing requests: what is far too long or too many is refused by its size, before any work is done for it."""

import json

import pytest

from eprt.engine.request import RequestLimits
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.parsing import parse_chat, parse_completion
from eprt.serve.openai.prepare import Preparer
from tests.unit.engine.tokenizer_cases import save_tokenizer, train_byte_level

LIMITS = RequestLimits(vocab_size=400, max_model_len=64, kv_tokens=10_000)


class _Counting:
    """A tokenizer that counts the texts it was given."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self.num_encoded = tokenizer, 0

    def encode(self, *args, **options):
        self.num_encoded += 1
        return self._tokenizer.encode(*args, **options)

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)


@pytest.fixture
def counting(tmp_path):
    return _Counting(save_tokenizer(train_byte_level(["the quick brown fox"] * 4, 300), tmp_path))


@pytest.fixture
def preparer(counting):
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    return Preparer("m", counting, template, max_sequences=8)


def _refused(prepare, request) -> ApiError:
    with pytest.raises(ApiError) as caught:
        prepare(request, "r", LIMITS)
    return caught.value


def test_what_is_surely_too_long_is_refused_before_it_is_tokenised(preparer, counting):
    text = "word and " * 1000
    error = _refused(preparer.completion, parse_completion(json.dumps({"prompt": text}).encode()))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt") and "at least" in error.message
    error = _refused(preparer.completion, parse_completion(json.dumps({"prompt": ["a", text]}).encode()))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt[1]")
    chat = {"messages": [{"role": "user", "content": text}]}
    error = _refused(preparer.chat, parse_chat(json.dumps(chat).encode()))
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert counting.num_encoded == 1  # the "a"


def test_the_vocabulary_is_looked_through_before_the_first_request(preparer, counting):
    """A third of a second for 128,000 tokens, in which no stream would move."""
    assert "longest_token" in vars(counting._tokenizer)


def test_prompts_beyond_what_the_server_holds_are_refused_before_any_is_tokenised(preparer, counting):
    error = _refused(preparer.completion, parse_completion(json.dumps({"prompt": ["a"] * 9}).encode()))
    assert error.param == "prompt" and "9 prompts" in error.message and "at most 8" in error.message
    error = _refused(preparer.completion, parse_completion(json.dumps({"prompt": ["a"] * 3, "n": 3}).encode()))
    assert error.param == "n" and "3 prompts with n=3" in error.message
    assert counting.num_encoded == 0
    job = preparer.completion(parse_completion(b'{"prompt": ["a", "b"], "n": 4, "max_tokens": 1}'), "r", LIMITS)
    assert len(job.prompts) * job.params.n == 8
