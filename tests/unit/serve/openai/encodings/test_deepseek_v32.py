"""DeepSeek-V3.2's prompts. No vectors are published; what its checkpoint's program writes was compared by random
conversations when this was written, and stands here in small."""

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.openai.encodings.deepseek_v32 import DeepSeekV32Encoding
from tests.unit.serve.openai.encodings.cases import SYSTEM, TOOL, USER, called, render, result, said

V32 = DeepSeekV32Encoding()
BOS, EOS, ASK, ANSWER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CALL = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="q" string="true">x</｜DSML｜parameter>\n'
    f"</｜DSML｜invoke>\n</｜DSML｜function_calls>{EOS}"
)
TWO = called(("a", {}), ("b", {}))


def test_it_thinks_when_it_is_told_to():
    assert render(V32, SYSTEM, USER) == f"{BOS}Be brief.{ASK}Hi{ANSWER}</think>"
    assert render(V32, USER, thinking=True) == render(V32, USER, enable_thinking=True) == f"{BOS}{ASK}Hi{ANSWER}<think>"
    assert render(V32, USER, begins=False, thinking=True) == f"{BOS}{ASK}Hi"


def test_thoughts_stand_behind_the_last_users_message_alone():
    history = [USER, said("Hello", "old"), USER, said("Yes", "new")]
    assert render(V32, *history, begins=False, thinking=True) == (
        f"{BOS}{ASK}Hi{ANSWER}</think>Hello{EOS}{ASK}Hi{ANSWER}<think>new</think>Yes{EOS}"
    )
    assert "new" not in render(V32, *history)
    assert render(V32, USER, said("Yes"), begins=False, thinking=True).endswith(f"<think></think>Yes{EOS}")


@pytest.mark.parametrize(("thinking", "mark"), [(True, "<think>"), (False, "</think>")])
def test_results_are_a_block_that_the_answer_follows(thinking, mark):
    messages = [USER, called(("a", {"q": "x"}), thoughts="Hm"), result("22", "a")]
    before = f"{BOS}{ASK}Hi{ANSWER}<think>Hm</think>" if thinking else f"{BOS}{ASK}Hi{ANSWER}</think>"
    block = f"{before}{CALL}\n\n<function_results>\n<result>22</result>\n</function_results>"
    assert render(V32, *messages, thinking=thinking) == f"{block}\n\n{mark}"
    assert render(V32, *messages, begins=False, thinking=thinking) == block
    # A user's next message ends what may think.
    later = render(V32, *messages, USER, thinking=thinking)
    assert later.endswith(f"</function_results>\n\n</think>{ASK}Hi{ANSWER}{mark}") and "Hm" not in later


def test_results_come_in_the_order_of_the_calls():
    text = render(V32, USER, TWO, result("B", "b"), result("A", "a"))
    assert "<function_results>\n<result>A</result>\n<result>B</result>\n</function_results>" in text
    nameless = render(V32, USER, TWO, result("1"), result("2"))
    assert "<result>1</result>\n<result>2</result>" in nameless


@pytest.mark.parametrize(
    ("results", "param", "words"),
    [
        ([result("A", "a")], "messages[2]", "1 results follow a message with 2 tool calls"),
        ([result("A", "a"), result("A", "a")], "messages[3].tool_call_id", "is answered twice"),
        ([result("A", "a"), result("C", "c")], "messages[3].tool_call_id", "is not among the calls before it"),
    ],
)
def test_results_and_calls_without_a_counterpart_are_refused(results, param, words):
    with pytest.raises(ApiError, match=words) as caught:
        render(V32, USER, TWO, *results)
    assert caught.value.param == param
    with pytest.raises(ApiError, match="2 results follow a message with 0 tool calls"):
        render(V32, USER, result("A", "a"), result("B", "b"))


def test_calls_that_nobody_answered_are_history():
    assert render(V32, USER, TWO, USER).endswith(f"</｜DSML｜function_calls>{EOS}{ASK}Hi{ANSWER}</think>")


def test_tools_stand_behind_the_system_message():
    text = render(V32, SYSTEM, USER, tools=[TOOL])
    assert text.startswith(f"{BOS}Be brief.\n\n## Tools\n\nYou have access to a set of tools you can use")
    schema = '{"name": "f", "parameters": {"type": "object", "properties": {}}}'
    assert text.endswith(f"\n<functions>\n{schema}\n</functions>\n{ASK}Hi{ANSWER}</think>")
    assert render(V32, USER, tools=[TOOL]).startswith(f"{BOS}\n\n## Tools")


@pytest.mark.parametrize("last", [SYSTEM, said("Yes", "new")])
def test_an_answer_begins_behind_any_last_message(last):
    assert render(V32, USER, last, thinking=True).endswith(f"{ANSWER}<think>")
