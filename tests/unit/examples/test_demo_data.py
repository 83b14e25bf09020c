"""The demo model's data, tokenizer and chat template: what training and evaluation rely on."""

import json
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tokenizers

sys.path.insert(0, str(Path(__file__).parents[3]))

from examples.demo_model import chat, dataset, skills, tools
from examples.demo_model.evaluate import CHECKPOINT, ask_server, reply_text
from examples.demo_model.sample import Sample
from examples.demo_model.score import held_out_questions, score
from examples.demo_model.tokenizer import build_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def template():
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment()
    return environment.from_string((CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8"))


def render_jinja(messages, tool_list=(), add_generation_prompt=True):
    names = {"bos_token": chat.BOS, "eos_token": chat.EOS, "add_generation_prompt": add_generation_prompt}
    return template().render(messages=list(messages), tools=list(tool_list) or None, **names)


def prompt_of(sample):
    return json.dumps([sample.messages, sample.tools])


@pytest.mark.parametrize("skill", skills.SKILLS)
def test_split_is_disjoint(skill):
    rng = random.Random(3)
    trained = {prompt_of(skills.draw(skill, rng)) for _ in range(2000)}
    held_out = {prompt_of(sample) for sample in skills.held_out_samples(skill, 100)}
    assert held_out
    assert not trained & held_out


@pytest.mark.parametrize("skill", skills.SKILLS)
def test_checker_accepts_the_answer_and_refuses_others(skill):
    for sample in skills.held_out_samples(skill, 40):
        assert sample.check(sample.answer)
        assert sample.check(f" {sample.answer}\n")
        for wrong in ("", sample.answer + "x", sample.answer[:-1], "I do not know."):
            assert not sample.check(wrong), (sample, wrong)


def test_think_needs_steps_and_the_right_result():
    sample = Sample("think", ("k",), (), "<think>1 + 2 = 3. 3 + 4 = 7.</think>7")
    assert sample.check("<think>first 3, then 7</think>7")
    assert not sample.check("<think></think>7")
    assert not sample.check("<think>1 + 2 = 3. 3 + 4 = 7.</think>8")
    assert not sample.check("7")


def test_tool_call_is_compared_as_json():
    sample = Sample("tool_call", ("k",), (), '<tool_call>{"name": "f", "arguments": {"city": "Oslo"}}</tool_call>')
    assert sample.check('<tool_call>{"arguments":{"city":"Oslo"},"name":"f"}</tool_call>')
    assert not sample.check('<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>')
    assert not sample.check('<tool_call>{"name": "f", "arguments": </tool_call>')
    assert tools.parse_call("Oslo") is None


def test_seed_determines_samples():
    assert skills.held_out_samples("sort_words", 20, seed=5) == skills.held_out_samples("sort_words", 20, seed=5)
    assert skills.held_out_samples("sort_words", 20, seed=5) != skills.held_out_samples("sort_words", 20, seed=6)
    assert held_out_questions(66) == held_out_questions(66)


def test_blocks_are_deterministic_and_decode_to_their_documents(tokenizer):
    blocks = dataset.make_blocks(tokenizer, seed=7, num_blocks=8)
    assert blocks.shape == (8, dataset.BLOCK_TOKENS)
    assert (blocks == dataset.make_blocks(tokenizer, seed=7, num_blocks=8)).all()
    assert (blocks != dataset.make_blocks(tokenizer, seed=8, num_blocks=8)).any()
    trained = blocks[0][blocks[0] >= dataset.TRAINED_BIT] - dataset.TRAINED_BIT
    assert chat.EOS in tokenizer.decode(trained.tolist(), skip_special_tokens=False)
    assert chat.USER not in tokenizer.decode(trained.tolist(), skip_special_tokens=False)


def test_every_skill_is_trained_and_scored():
    assert set(dataset.SKILL_WEIGHTS) == set(skills.SKILLS)
    samples = held_out_questions(110)
    result = score(samples, [sample.answer for sample in samples])
    assert result["accuracy"] == 1.0
    assert set(result["skills"]) == {*skills.SKILLS, "multi_turn"}
    assert score(samples, ["" for _ in samples])["accuracy"] == 0.0


@pytest.mark.parametrize("text", ["Grüße, 世界 🚀", "a\tb\r\n  c", "12345", "\x00\x7f", "ﷺ é ñ", "<think>1</think>"])
def test_tokenizer_round_trips(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_keeps_digits_apart_and_marks_whole(tokenizer):
    assert tokenizer.encode("2025", add_special_tokens=False).tokens == ["2", "0", "2", "5"]
    assert tokenizer.encode("<think>", add_special_tokens=False).tokens == ["<think>"]
    assert [tokenizer.token_to_id(token) for token in (chat.BOS, chat.EOS)] == [0, 1]
    assert tokenizer.encode("a").ids[0] == 0


def test_tokenizer_build_is_deterministic():
    assert build_tokenizer(300).to_str() == build_tokenizer(300).to_str()


def test_template_equals_the_training_text():
    rng = random.Random(11)
    for _ in range(200):
        skill = rng.choice(list(skills.SKILLS))
        sample = dataset.draw_conversation(rng, skill, rng.randint(1, 3))
        assert render_jinja(sample.messages, sample.tools) == chat.render(sample.messages, sample.tools)


def test_template_renders_turns_tools_and_generation_prompt():
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Oslo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    expected = (
        f"{chat.BOS}Be kind.\nTool: get_weather(city): Get the weather in a city\n{chat.USER}Weather in Oslo?"
        f'{chat.ASSISTANT}<tool_call>{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}</tool_call>{chat.EOS}'
        f"{chat.TOOL}sunny"
    )
    assert render_jinja(messages, [TOOL], add_generation_prompt=False) == expected
    assert render_jinja(messages, [TOOL]) == expected + chat.ASSISTANT
    bare = {"type": "function", "function": {"name": "ping"}}
    assert "Tool: ping(): \n" in render_jinja(messages, [bare])


def test_template_is_the_same_in_both_files():
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")


def test_reply_is_put_together_again():
    function = {"name": "clock", "arguments": '{"city": "Rome"}'}
    message = {"content": None, "tool_calls": [{"type": "function", "function": function}]}
    assert reply_text(message) == '<tool_call>{"name": "clock", "arguments": {"city": "Rome"}}</tool_call>'
    assert reply_text({"content": "7", "reasoning_content": "3 + 4 = 7."}) == "<think>3 + 4 = 7.</think>7"


class FakeServer(BaseHTTPRequestHandler):
    """Answers with the length of the conversation, as an OpenAI server would."""

    def do_GET(self):
        self._send({"data": [{"id": "demo"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "demo" and body["temperature"] == 0
        self._send({"choices": [{"message": {"content": str(len(json.dumps(body["messages"])))}}]})

    def log_message(self, *args):
        pass

    def _send(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_server_is_asked_in_order():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        samples = held_out_questions(44)
        replies = ask_server(f"http://127.0.0.1:{server.server_port}", samples, concurrency=4, timeout_s=100)
    finally:
        server.shutdown()
        server.server_close()
    assert replies == [str(len(json.dumps(sample.messages))) for sample in samples]


def test_checkpoint_is_complete_and_small():
    files = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(files)
    assert sum(files.values()) <= 16_000_000
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "deepseek_v3"
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    with safetensors.safe_open(CHECKPOINT / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
    mtp = f"model.layers.{config['num_hidden_layers']}"
    assert {f"{mtp}.{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= names
    assert f"model.layers.1.mlp.experts.{config['n_routed_experts'] - 1}.down_proj.weight" in names
