"""DeepSeek-V4 behind a server: its prompts, thoughts and calls without a chat template, by the model's type alone."""

import json

import httpx
import msgspec
import pytest
from tokenizers import AddedToken

from eprt.serve.openai.encodings.deepseek_v4 import DeepSeekV4Encoding
from eprt.serve.openai.protocol import Message, Tool
from eprt.serve.running import RunningServer
from tests import tiny_v4
from tests.serve.processes import PATIENCE_S, PATIENT
from tests.unit.engine.tokenizer_cases import save_tokenizer, train_byte_level

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>")
MARKS = ("<think>", "</think>", "｜DSML｜")
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4") / "demo"
    tools = DeepSeekV4Encoding().render([Message(role="user", content="Hi")], [msgspec.convert(WEATHER, Tool)])
    tokenizer = train_byte_level([tools] * 4, vocab_size=500)  # its long prompt becomes few tokens
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])
    ids = [tokenizer.token_to_id(text) for text in SPECIAL[:2]]
    fields = {"bos_token_id": ids[0], "eos_token_id": ids[1], "pad_token_id": ids[1], "max_position_embeddings": 2048}
    fields |= {"num_hidden_layers": 2, "compress_ratios": [128, 4], "num_hash_layers": 1}
    model = tiny_v4.make_model(vocab_size=tokenizer.get_vocab_size(), **fields)
    tiny_v4.save(model, folder)
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


def chat(http: httpx.Client, **body) -> dict:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 12, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_prompt_is_the_encodings(http):
    assert prompt(http, messages=HI) == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>"
    assert prompt(http, messages=HI, reasoning_effort="none").endswith("<｜Assistant｜></think>")
    assert "Reasoning Effort: Absolute maximum" in prompt(http, messages=HI, reasoning_effort="max")
    reminded = prompt(http, messages=[{"role": "latest_reminder", "content": "Monday"}, *HI])
    assert reminded.startswith("<｜begin▁of▁sentence｜><｜latest_reminder｜>Monday<｜User｜>Hi")
    assert '{"name": "weather", "parameters"' in prompt(http, messages=HI, tools=[WEATHER])


def test_thoughts_are_told_apart_by_the_models_type(http):
    thinking = chat(http)
    message = thinking["choices"][0]["message"]
    assert message["reasoning_content"] and not message["content"], "twelve tokens, and </think> is not among them"
    assert thinking["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    plain = chat(http, thinking={"type": "disabled"})["choices"][0]["message"]
    assert plain["content"] and not plain.get("reasoning_content")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_read_in_the_models_markup(http, stream):
    body = {
        "messages": HI,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "thinking": False,
        "max_tokens": 300,
        "stream": stream,
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert not "".join(delta.get("content") or "" for delta in deltas)
        name, arguments = pieces[0]["name"], "".join(piece.get("arguments") or "" for piece in pieces)
    else:
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert name == "weather" and json.loads(arguments)["city"] in ("Oslo", "Bergen")
