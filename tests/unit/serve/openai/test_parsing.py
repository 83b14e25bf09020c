"""Request bodies: every field is honoured, accepted as a no-op, or refused by name; never ignored."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.serve.errors import ApiError
from eprt.serve.openai.parsing import parse_chat, parse_completion

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}


def refuse(parse, body, **changes) -> ApiError:
    """The error that a body is refused with, once its sampling parameters are asked for too."""
    raw = body if isinstance(body, bytes) else json.dumps({**body, **changes}).encode()
    with pytest.raises(ApiError) as caught:
        parse(raw).sampling_params(max_tokens=1, logprobs=None)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "part_of_message"),
    [
        ("max_tokens", "5", '"5"'),
        ("max_tokens", 5.5, "5.5"),
        ("max_tokens", True, "true"),
        ("max_tokens", 10**30, "1000000"),
        ("temperature", "hot", '"hot"'),
        ("temperature", 2.1, "2.1"),
        ("temperature", -1, "-1"),
        ("top_p", 0, "0"),
        ("top_k", -2, "-2"),
        ("min_p", 1.5, "1.5"),
        ("n", 0, "0"),
        ("n", 129, "129"),
        ("stop", [""], "empty string"),
        ("stop", 3, "3"),
        ("stop", ["x"] * 17, "17"),
        ("stop_token_ids", ["a"], '"a"'),
        ("frequency_penalty", 3, "3"),
        ("presence_penalty", -3, "-3"),
        ("repetition_penalty", 0, "0"),
        ("repetition_penalty", 1e-308, "1e-308"),
        ("repetition_penalty", 1e308, "1e+308"),
        ("logit_bias", {"a": 1}, '"a"'),
        ("logit_bias", {"5": 101}, "101"),
        ("logit_bias", {"1" * 5000: 1}, "1111"),
        ("logit_bias", {"05": 1, "5": 2}, '"05"'),
        ("logit_bias", {"7": 1, "5": "much"}, 'token 5 is "much"'),
        ("logit_bias", {"5": True}, "token 5 is true"),
        ("logit_bias", {"5": None}, "token 5 is null"),
        ("logit_bias", {"5": 10**400}, "token 5 is 1000"),
        ("logit_bias", [1], "[1]"),
        ("seed", 1 << 63, str(1 << 63)),
        ("stream", "yes", '"yes"'),
        ("stream_options", {"include_usage": True}, "stream=true"),
        ("ignore_eos", 1, "1"),
    ],
)
@pytest.mark.parametrize(("parse", "body"), [(parse_completion, COMPLETION), (parse_chat, CHAT)], ids=["text", "chat"])
def test_bad_values_are_named(parse, body, field, value, part_of_message):
    error = refuse(parse, body, **{field: value})
    assert error.param is not None and error.param.startswith(field)
    assert field in error.message and part_of_message in error.message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": "x",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]},
            "messages[0].content[0].mood",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": "y"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "y"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].prefix"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_bad_chats_are_named(changes, param):
    if param == "max_tokens":
        with pytest.raises(ApiError) as caught:
            _ = parse_chat(json.dumps({**CHAT, **changes}).encode()).max_new_tokens
        error = caught.value
    else:
        error = refuse(parse_chat, CHAT, **changes)
    assert error.param == param and param.rpartition(".")[2] in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"response_format": {"type": "text"}},
        {"parallel_tool_calls": True},
        {"service_tier": "auto"},
        {"top_logprobs": 0},
        {"tool_choice": "auto"},
        {"stream_interval": 1, "watermarking": False, "thinking_token_budget": -1},
        {"store": False},
        {"modalities": ["text"]},
        {"audio": None},
        {"user": "someone"},
        {"top_k": -1},
        {"stop": None, "n": None, "temperature": None},
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ]
        },
    ],
)
def test_values_that_ask_for_nothing_unusual_are_taken(changes):
    parse_chat(json.dumps({**CHAT, **changes}).encode()).sampling_params(max_tokens=1, logprobs=None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"prompt": ' * 50_000,
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b"\xff\xfe",
        b"null",
        b'"text"',
        b"[]",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a"} trailing',
        b'{"prompt":"a","n":' + b"9" * 6000 + b"}",
    ],
    ids=lambda body: body[:12].decode(errors="replace"),
)
def test_garbage_is_refused_as_json(body):
    assert refuse(parse_completion, body).code == "invalid_json"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = ["prompt", "messages", "n", "stop", "tools", "logit_bias", "stream_options", "seed", "tool_choice", "user"]


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=6), _JSON, max_size=5), st.booleans())
def test_any_json_is_parsed_or_refused(body, chat):
    parse = parse_chat if chat else parse_completion
    try:
        request = parse(json.dumps({**(CHAT if chat else COMPLETION), **body}).encode())
        request.sampling_params(max_tokens=1, logprobs=None)
    except ApiError as error:
        assert error.status == 400 and error.message and json.loads(error.json())["error"]["code"]


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt", "twice"),
        (
            b'{"prompt": "a", "stream": true, "stream_options": {"include_usage": 1, "include_usage": 1}}',
            "include_usage",
            "twice",
        ),
        (b'{"prompt": "\\ud800"}', None, "surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', None, "JSON has no NaN"),
        (b'{"prompt": "a", "logit_bias": {"5": -Infinity}}', None, "JSON has no -Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', None, "out of range"),
        (b'\xef\xbb\xbf{"prompt": "a"}', None, "invalid character (byte 0)"),
    ],
)
def test_what_json_decoders_drop_is_refused(body, param, part):
    error = refuse(parse_completion, body)
    assert error.param == param and part in error.message


def test_an_integer_of_many_digits_is_refused():
    body = b'{"prompt": "a", "seed": ' + b"9" * 6000 + b"}"
    assert "out of range" in refuse(parse_completion, body).message


def test_fields_that_would_change_the_answer_are_refused_unless_they_ask_for_nothing():
    assert refuse(parse_completion, COMPLETION, best_of=3).param == "best_of"
    assert refuse(parse_completion, COMPLETION, use_beam_search=True).param == "use_beam_search"
    assert refuse(parse_completion, {}).param == "prompt"
    parse_completion(json.dumps({**COMPLETION, "best_of": 2, "n": 2, "suffix": ""}).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [("guided_choice", []), ("response_format", {}), ("stream_options", {}), ("thinking", {}), ("tool_choice", {})],
)
def test_what_is_empty_asks_for_nothing(name, value):
    for parse, body in ((parse_chat, CHAT), (parse_completion, COMPLETION)):
        assert parse(json.dumps({**body, name: value}).encode()) == parse(json.dumps(body).encode())
    assert refuse(parse_chat, CHAT, **{name: "x"}).param == name


def test_a_refused_value_is_not_repeated_whole():
    body = json.dumps({"messages": [{"role": "x" * 100_000, "content": "a"}]}).encode()
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert caught.value.param == "messages[0].role" and len(caught.value.message) < 400
