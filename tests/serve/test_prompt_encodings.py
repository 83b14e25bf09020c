"""DeepSeek-V3.2 and V4 behind a server: prompts, thoughts and calls by the model's type, without a chat template."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import AddedToken

from eprt.serve.openai.encodings.deepseek_v4 import DeepSeekV4Encoding
from eprt.serve.openai.encodings.deepseek_v32 import DeepSeekV32Encoding
from eprt.serve.openai.prompt_template import PromptTemplate
from eprt.serve.openai.protocol import Message, Tool
from eprt.serve.running import RunningServer
from tests import tiny, tiny_v4
from tests.serve.cases import GREEDY, events
from tests.serve.processes import PATIENCE_S, PATIENT
from tests.unit.engine.tokenizer_cases import save_tokenizer, train_byte_level

BOS = "<｜begin▁of▁sentence｜>"
SPECIAL = (BOS, "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>")
MARKS = ("<think>", "</think>", "｜DSML｜")
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}}
HI = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY = [
    *HI,
    {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "12 degrees"},
]


@dataclass(frozen=True)
class Family:
    """A model without a chat template, and what its prompts end with."""

    encoding: PromptTemplate
    save: Callable[[Path, dict[str, Any]], object]  # into this directory, with these fields of the config
    thinks: bool  # where a request does not say
    # Of HISTORY, with thinking: from the call on.
    tail: str


def save_v4(folder: Path, fields: dict[str, Any]) -> None:
    tiny_v4.save(tiny_v4.make_model(**fields, compress_ratios=[128, 4], num_hash_layers=1), folder)


def save_v32(folder: Path, fields: dict[str, Any]) -> None:
    tiny.save(tiny.make_variant("v32", **fields), folder)


_CALLED = """<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
</｜DSML｜invoke>"""
FAMILIES = {
    "v4": Family(
        DeepSeekV4Encoding(),
        save_v4,
        True,
        f"<｜DSML｜tool_calls>\n{_CALLED}\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
        "<｜User｜><tool_result>12 degrees</tool_result><｜Assistant｜><think>",
    ),
    "v32": Family(
        DeepSeekV32Encoding(),
        save_v32,
        False,
        f"<｜DSML｜function_calls>\n{_CALLED}\n</｜DSML｜function_calls><｜end▁of▁sentence｜>"
        "\n\n<function_results>\n<result>12 degrees</result>\n</function_results>\n\n<think>",
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def http(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "demo"
    tools = family.encoding.render([Message(role="user", content="Hi")], [msgspec.convert(WEATHER, Tool)])
    tokenizer = train_byte_level([tools] * 4, vocab_size=500)  # its long prompt becomes few tokens
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    ids = [tokenizer.token_to_id(text) for text in SPECIAL[:2]]
    fields = {"bos_token_id": ids[0], "eos_token_id": ids[1], "pad_token_id": ids[1], "max_position_embeddings": 2048}
    family.save(folder, {**fields, "num_hidden_layers": 2, "vocab_size": tokenizer.get_vocab_size()})
    save_tokenizer(tokenizer, folder)
    with (
        RunningServer(folder, 1, "--kv-cache-gb", "0.05", variables=PATIENT) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def prompt(http: httpx.Client, **body) -> str:
    answer = http.post("/tokenize", json={"return_token_strs": True, **body})
    assert answer.status_code == 200, answer.text
    return http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]


def token_id(http: httpx.Client, text: str) -> int:
    (one,) = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return one


def chat(http: httpx.Client, **body) -> dict:
    asked = {"messages": HI, "max_tokens": 12, "ignore_eos": True, **GREEDY, **body}
    answer = http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def deltas(http: httpx.Client, **body) -> list[dict]:
    asked = {"messages": HI, "max_tokens": 12, "ignore_eos": True, **GREEDY, **body}
    return [event["choices"][0]["delta"] for event in events(http, "/v1/chat/completions", asked)]


def joined(pieces: list[dict], name: str) -> str:
    return "".join(piece.get(name) or "" for piece in pieces)


def test_the_prompt_is_the_encodings(http, family):
    default = "<think>" if family.thinks else "</think>"
    assert prompt(http, messages=HI) == f"{BOS}<｜User｜>Hi<｜Assistant｜>{default}"
    for on in ({"thinking": True}, {"reasoning_effort": "high"}, {"chat_template_kwargs": {"thinking": True}}):
        assert prompt(http, messages=HI, **on).endswith("<｜Assistant｜><think>"), on
    assert prompt(http, messages=HI, reasoning_effort="none").endswith("<｜Assistant｜></think>")
    assert '{"name": "weather", "parameters"' in prompt(http, messages=HI, tools=[WEATHER])
    assert prompt(http, messages=HISTORY, tools=[WEATHER], thinking=True).endswith(f"Hm.</think>\n\n{family.tail}")


def test_what_only_v4_knows(http, family):
    reminded = [{"role": "latest_reminder", "content": "Monday"}, *HI]
    if family is FAMILIES["v4"]:
        assert "Reasoning Effort: Absolute maximum" in prompt(http, messages=HI, reasoning_effort="max")
        assert prompt(http, messages=reminded).startswith(f"{BOS}<｜latest_reminder｜>Monday<｜User｜>Hi")
    else:
        refused = http.post("/v1/chat/completions", json={"messages": reminded})
        assert refused.status_code == 400 and "latest_reminder" in refused.json()["error"]["message"]


def test_thoughts_are_told_apart_by_the_models_type(http):
    thinking = chat(http, thinking=True)
    message = thinking["choices"][0]["message"]
    assert message["reasoning_content"] and not message["content"], "twelve tokens, and </think> is not among them"
    assert thinking["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    streamed = deltas(http, thinking=True)
    assert joined(streamed, "reasoning_content") == message["reasoning_content"] and not joined(streamed, "content")
    plain = chat(http, thinking={"type": "disabled"})["choices"][0]["message"]
    assert plain["content"] and not plain.get("reasoning_content")
    assert joined(deltas(http, thinking=False), "content") == plain["content"]


@pytest.mark.parametrize("thinks", [False, True])
def test_a_call_is_read_in_the_models_markup(http, thinks):
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {"tools": [WEATHER], "tool_choice": named, "thinking": thinks, "max_tokens": 300, "ignore_eos": False}
    # A random model would think for ever.
    asked["logit_bias"] = {str(token_id(http, "</think>")): 100} if thinks else None
    (call,) = chat(http, **asked)["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Bergen")
    streamed = deltas(http, **asked)
    pieces = [each["function"] for delta in streamed for each in delta.get("tool_calls") or ()]
    assert not joined(streamed, "content") and pieces[0]["name"] == "weather"
    assert joined(pieces, "arguments") == call["function"]["arguments"]
