"""DeepSeek-V4's prompts: the four test vectors that its checkpoints bring (encoding/tests, MIT licence), and the rest
of the rules."""

import json
from pathlib import Path

import pytest

from eprt.serve.openai.encodings.deepseek_v4 import DeepSeekV4Encoding
from eprt.serve.openai.reasoning import ReasoningParser, reasoning_format_named
from tests.unit.serve.openai.encodings.cases import SYSTEM, TOOL, USER, called, render, result, said
from tests.unit.serve.openai.tool_cases import parse_anyhow

VECTORS = json.loads(Path(__file__).with_name("vectors_v4.json").read_text(encoding="utf-8"))
V4, RELEASE = DeepSeekV4Encoding(), DeepSeekV4Encoding(has_low_effort=True)
BOS, EOS, ASK, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
OPEN = f"{ANSWER}<think>"


def vector_messages(vector) -> list[dict]:
    """Without what is for training alone."""
    return [{name: value for name, value in one.items() if name != "mask"} for one in vector["messages"]]


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("template", [V4, RELEASE])
def test_published_vectors(vector, template):
    messages = vector_messages(vector)
    text = render(template, *messages, tools=vector["tools"], begins=False, thinking=vector["thinking"])
    assert text == vector["prompt"]


@pytest.mark.parametrize("vector", VECTORS[:3])
def test_what_the_model_writes_is_read_back_however_it_is_cut(vector):
    """The assistant's messages behind the last thoughts' mark, as the model would generate them."""
    last_user = max(i for i, one in enumerate(vector["messages"]) if one["role"] in ("user", "developer"))
    messages = [one for one in vector["messages"][last_user:] if one["role"] == "assistant"]
    written = [part.partition(EOS)[0] for part in vector["prompt"].split(OPEN)[1:]]
    assert len(written) == len(messages)
    for text, message in zip(written, messages):
        for size in (1, 3, len(text)):
            parser = ReasoningParser(reasoning_format_named(V4.reasoning_format or ""), begins_inside=True)
            parts = [parser.add_text(text[i : i + size]) for i in range(0, len(text), size)] + [parser.finish()]
            thoughts, answer = ("".join(part) for part in zip(*parts))
            assert thoughts == message["reasoning_content"]
            shown, calls = parse_anyhow("deepseek_v4", answer)
            assert shown == (message.get("content") or "")
            wanted = [call["function"] for call in message.get("tool_calls") or ()]
            assert calls == [(one["name"], one["arguments"]) for one in wanted]


def test_it_thinks_unless_it_is_told_not_to():
    assert render(V4, SYSTEM, USER) == f"{BOS}Be brief.{ASK}Hi{OPEN}"
    assert (
        render(V4, USER, thinking=False) == render(V4, USER, enable_thinking=False) == f"{BOS}{ASK}Hi{ANSWER}</think>"
    )
    assert render(V4, USER, begins=False) == f"{BOS}{ASK}Hi", "whoever asks for no answer gets no beginning of one"


def test_old_thoughts_are_left_out_unless_there_are_tools_or_they_are_kept():
    history = [USER, said("Hello", "old"), USER, said("Yes", "new")]
    assert render(V4, *history, begins=False) == (
        f"{BOS}{ASK}Hi{ANSWER}</think>Hello{EOS}{ASK}Hi{OPEN}new</think>Yes{EOS}"
    )
    kept = f"{BOS}{ASK}Hi{OPEN}old</think>Hello{EOS}{ASK}Hi{OPEN}new</think>Yes{EOS}"
    assert render(V4, *history, begins=False, drop_thinking=False) == kept
    with_tools = render(V4, *history, tools=[TOOL], begins=False)
    assert with_tools.endswith(kept.removeprefix(BOS)) and '{"name": "f", "parameters"' in with_tools
    plain = render(V4, *history, begins=False, thinking=False)
    assert plain == f"{BOS}{ASK}Hi{ANSWER}</think>Hello{EOS}{ASK}Hi{ANSWER}</think>Yes{EOS}"


@pytest.mark.parametrize(
    ("effort", "preview", "release"),
    [
        (None, "", ""),
        ("minimal", "", ""),
        ("low", "", ""),
        ("medium", "", "Absolute maximum"),
        ("high", "", "Absolute maximum"),
        ("xhigh", "Absolute maximum", "Absolute maximum"),
        ("max", "Absolute maximum", "Beyond maximum"),
    ],
)
def test_an_effort_is_words_in_front(effort, preview, release):
    for template, words in ((V4, preview), (RELEASE, release)):
        text = render(template, SYSTEM, USER, reasoning_effort=effort)
        assert text.startswith(f"{BOS}Reasoning Effort: {words}" if words else f"{BOS}Be brief.")
        assert text.endswith(f"Be brief.{ASK}Hi{OPEN}")
        assert "Effort" not in render(template, USER, reasoning_effort=effort, thinking=False)


def test_results_come_in_the_order_of_the_calls_and_join_the_users_words():
    messages = [USER, called(("a", {}), ("b", {})), result("B", "b"), result("A", "a"), {**USER, "content": "And?"}]
    blocks = "<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\nAnd?"
    assert render(V4, *messages).endswith(f"{EOS}{ASK}{blocks}{OPEN}")
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert f"{ASK}<tool_result>x\n\ny</tool_result>{OPEN}" in render(V4, USER, called(("a", {})), result(parts, "a"))
    unknown = [USER, called((None, {})), result("1"), result("2")]
    assert f"<tool_result>1</tool_result>\n\n<tool_result>2</tool_result>{OPEN}" in render(V4, *unknown)


@pytest.mark.parametrize("last", [SYSTEM, said("Yes", "new"), {"role": "latest_reminder", "content": "Monday"}])
def test_an_answer_begins_behind_any_last_message(last):
    assert render(V4, USER, last).endswith(OPEN)


@pytest.mark.parametrize(("task", "end"), [("title", "<｜title｜>"), ("action", f"{OPEN}<｜action｜>")])
def test_a_task_replaces_the_answer(task, end):
    assert render(V4, {**USER, "task": task}) == f"{BOS}{ASK}Hi{end}"
    assert render(V4, {**USER, "task": task}, said("Search", "none"), begins=False).endswith(f"{end}Search{EOS}")


def checkpoint(folder, program: str | None = None, **fields) -> DeepSeekV4Encoding:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **fields}))
    if program is not None:
        (folder / "encoding").mkdir()
        (folder / "encoding" / "encoding_dsv4.py").write_text(program)
    return DeepSeekV4Encoding.from_checkpoint(folder)


def test_the_checkpoint_says_which_efforts_it_knows(tmp_path):
    beyond = {
        "program": checkpoint(tmp_path / "a", "REASONING_EFFORT_PROMPTS = {}\nraise SystemExit('it must not run')"),
        "preview": checkpoint(tmp_path / "b", "REASONING_EFFORT_MAX = ''", dspark_layers=3),
        "fields": checkpoint(tmp_path / "c", dspark_layers=3),
        "neither": checkpoint(tmp_path / "d"),
    }
    found = {name: "Beyond" in render(one, USER, reasoning_effort="max") for name, one in beyond.items()}
    assert found == {"program": True, "preview": False, "fields": True, "neither": False}
