"""/tokenize and /detokenize: the ids of the same request elsewhere, whatever its length; what is wrong is named."""

import json
from typing import Any

import pytest

from eprt.engine.request import RequestLimits
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.parsing import parse_chat
from eprt.serve.openai.prepare import Preparer
from eprt.serve.openai.tokenization import Tokenization
from tests.unit.engine.tokenizer_cases import save_tokenizer, train_byte_level

LIMITS = RequestLimits(vocab_size=300, max_model_len=64, kv_tokens=10_000)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if tools %} {{ tools[0].function.name }}{% endif %}{% if add_generation_prompt %} [assistant]{% endif %}"
)
CHAT = {"messages": [{"role": "user", "content": "the quick fox"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_tokenizer(train_byte_level(["the quick brown fox"] * 4, 300), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def preparer(tokenizer) -> Preparer:
    return Preparer("m", tokenizer, ChatTemplate(TEMPLATE, {}), max_sequences=8)


@pytest.fixture(scope="module")
def tokenization(preparer) -> Tokenization:
    return Tokenization(preparer)


def tokenize(tokenization: Tokenization, **body: Any) -> dict[str, Any]:
    return tokenization.tokenize(json.dumps(body).encode(), LIMITS)


def refused(call, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(json.dumps(body).encode(), LIMITS)
    return caught.value


def test_a_prompt_has_the_ids_of_the_tokenizer_and_their_names_where_they_are_asked_for(tokenization, tokenizer):
    answer = tokenize(tokenization, model="m", prompt="the quick", return_token_strs=True)
    token_ids = tokenizer.encode("the quick")
    assert answer == {
        "count": len(token_ids),
        "max_model_len": 64,
        "tokens": token_ids,
        "token_strs": [tokenizer.token_name(token_id) for token_id in token_ids],
    }
    assert "".join(answer["token_strs"]).replace("Ġ", " ") == "the quick"
    assert tokenize(tokenization, prompt="the quick")["token_strs"] is None


@pytest.mark.parametrize("more", [{}, {"add_generation_prompt": False}, {"tools": [{"name": "sum"}]}])
def test_messages_count_as_in_a_chat(tokenization, tokenizer, preparer, more):
    if "tools" in more:
        more = {"tools": [{"type": "function", "function": tool} for tool in more["tools"]]}
    answer = tokenize(tokenization, **CHAT, **more)
    job = preparer.chat(parse_chat(json.dumps({**CHAT, **more}).encode()), "r", LIMITS)
    assert answer["tokens"] == job.prompts[0].token_ids and answer["count"] == len(answer["tokens"])


def test_a_prompt_longer_than_the_model_takes_is_counted(tokenization):
    assert tokenize(tokenization, prompt="the quick fox " * 500)["count"] > LIMITS.max_model_len
    messages = [{"role": "user", "content": "the quick fox " * 500}]
    assert tokenize(tokenization, messages=messages)["count"] > LIMITS.max_model_len


def test_special_tokens_come_with_prompts_by_default_and_with_messages_where_they_are_asked_for():
    class Marking:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [int(add_special_tokens)]

    made: Any = Preparer.__new__(Preparer)
    made.tokenizer, made.check_model, made.render_chat = Marking(), lambda model: None, lambda request: "text"
    tokenization = Tokenization(made)
    for body, default in (({"prompt": "x"}, 1), (CHAT, 0)):
        assert tokenize(tokenization, **body)["tokens"] == [default]
        for asked in (True, False):
            assert tokenize(tokenization, **body, add_special_tokens=asked)["tokens"] == [int(asked)]


def test_text_comes_back(tokenization, tokenizer):
    body = json.dumps({"tokens": tokenizer.encode("the quick brown")}).encode()
    assert tokenization.detokenize(body, LIMITS) == {"prompt": "the quick brown"}
    assert tokenization.detokenize(b'{"tokens": []}', LIMITS) == {"prompt": ""}


def test_what_is_wrong_is_named_with_its_value(tokenization):
    error = refused(tokenization.detokenize, tokens=[1, 300])
    assert error.param == "tokens[1]" and "300 is outside the vocabulary 0..299" in error.message
    assert refused(tokenization.detokenize, tokens=[-1]).param == "tokens[0]"
    assert refused(tokenization.detokenize, tokens="ab").code == "invalid_type"
    assert refused(tokenization.tokenize, prompt=[1]).code == "invalid_type"
    assert refused(tokenization.tokenize).code == "missing_required_parameter"
    assert refused(tokenization.tokenize, prompt="x", **CHAT).param == "prompt"
    assert refused(tokenization.tokenize, prompt="x", shape=3).code == "unsupported_parameter"
    assert refused(tokenization.tokenize, messages=[]).param == "messages"
    for call, field in ((tokenization.tokenize, {"prompt": "x"}), (tokenization.detokenize, {"tokens": [1]})):
        assert refused(call, model="other", **field).code == "model_not_found"


def test_a_server_without_a_tokenizer_says_so():
    tokenization = Tokenization(Preparer("m", None, None, 8))
    error = refused(tokenization.tokenize, prompt="x")
    assert error.code == "unsupported_endpoint" and "--skip-tokenizer-init" in error.message
    assert refused(tokenization.detokenize, tokens=[1]).code == "unsupported_endpoint"


def test_fields_of_generation_that_ask_for_nothing_are_taken_in_either_form(tokenization):
    neutral = {"add_generation_prompt": True, "tools": [], "chat_template": None, "mm_processor_kwargs": {}}
    bare = tokenize(tokenization, prompt="the quick")
    assert tokenize(tokenization, prompt="the quick", messages=None, **neutral) == bare
    assert tokenize(tokenization, **CHAT, prompt=None, **neutral) == tokenize(tokenization, **CHAT)
    error = refused(tokenization.tokenize, prompt="the quick", tools=[{}])
    assert error.param == "tools" and "it is a field of /v1/chat/completions" in error.message
