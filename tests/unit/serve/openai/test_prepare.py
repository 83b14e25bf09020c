"""What a long request costs everybody else: it is refused by its size, or its work lets the server's loop run."""

import json
import threading
import time

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from eprt.engine.request import RequestLimits
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.parsing import parse_chat, parse_completion
from eprt.serve.openai.prepare import Preparer

LIMITS = RequestLimits(vocab_size=400, max_model_len=64, kv_tokens=10_000)


def _byte_level() -> HfTokenizer:
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the quick brown fox"] * 4, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    return tokenizer


def _save(tokenizer: HfTokenizer, folder) -> Tokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


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
    return _Counting(_save(_byte_level(), tmp_path))


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


def test_no_text_has_fewer_tokens_than_its_length_says(tmp_path):
    tokenizer = _save(_byte_level(), tmp_path)
    assert tokenizer.longest_token is not None
    for text in ("the quick brown fox", "quick" * 50, "漢字🎉" * 20, " \n\t" * 30):
        assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text.encode())


@pytest.mark.parametrize("swallower", ["lstrip", "normalizer", "whitespace", "removed"])
def test_a_tokenizer_that_swallows_text_has_no_longest_token(tmp_path, swallower):
    tokenizer = _byte_level()
    if swallower == "lstrip":
        tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    elif swallower == "normalizer":
        tokenizer.normalizer = normalizers.Strip()
    else:
        pieces = {
            "whitespace": pre_tokenizers.Whitespace(),
            "removed": pre_tokenizers.Split(" ", behavior="removed"),
        }
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces[swallower], pre_tokenizers.ByteLevel()])
    assert _save(tokenizer, tmp_path).longest_token is None


def test_truncation_and_padding_left_in_the_file_are_not_heeded(tmp_path):
    plain = _byte_level()
    text = "the quick brown fox " * 10
    wanted = plain.encode(text).ids
    plain.enable_truncation(max_length=4)
    plain.enable_padding(length=500)
    assert _save(plain, tmp_path).encode(text) == wanted


def test_a_long_text_is_tokenised_while_others_run(tmp_path):
    tokenizer = _save(_byte_level(), tmp_path)
    text = "the quick brown fox " * 50_000
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 10  # a call that held the interpreter would leave one or two
    assert tokenizer.decode(ids) == text
