"""Calls in DeepSeek's markup: what is written is what the reader of the model's text reads back."""

import json

import msgspec
import pytest

from eprt.serve.errors import ApiError
from eprt.serve.openai.encodings.dsml import flag, is_on, with_tools, write_calls, write_schemas
from eprt.serve.openai.protocol import FunctionCall, Message, Tool, ToolCall
from tests.unit.serve.openai.encodings.cases import TOOL
from tests.unit.serve.openai.tool_cases import CALLS, parse_anyhow


def calls(*arguments: str) -> list[ToolCall]:
    return [ToolCall(FunctionCall("f", text)) for text in arguments]


@pytest.mark.parametrize(("form", "section"), [("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")])
def test_what_is_written_is_read_back_however_it_is_cut(form, section):
    written = [ToolCall(FunctionCall(name, json.dumps(arguments, ensure_ascii=False))) for name, arguments in CALLS]
    shown, found = parse_anyhow(form, "Well." + write_calls(written, section))
    assert shown == "Well." and [(name, json.loads(arguments)) for name, arguments in found] == CALLS


def test_text_stays_as_it_is_and_all_else_is_json():
    text = write_calls(calls('{"s": "a\\n\\"b\\" <x>", "n": 1.0, "o": {"é": null}, "b": true}'), "x")
    assert text == (
        '\n\n<｜DSML｜x>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">a\n"b" <x></｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1.0</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="o" string="false">{"é": null}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">true</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜x>"
    )
    assert write_calls(None, "x") == write_calls([], "x") == ""


@pytest.mark.parametrize("arguments", ["{", "[1]", "12", "word"])
def test_arguments_that_are_no_object_are_one_argument(arguments):
    assert f'name="arguments" string="true">{arguments}</' in write_calls(calls(arguments), "x")


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_no_arguments_are_no_parameters(arguments):
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>' in write_calls(calls(arguments), "x")


def test_tools_belong_to_the_first_system_message():
    tools = msgspec.convert([TOOL], list[Tool])
    user, developer = Message(role="user", content="Hi"), Message(role="developer", content="Be brief.")
    assert [one.role for one in with_tools([user], tools)] == ["system", "user"]
    [first, second] = with_tools([developer, user], tools)
    assert (first.role, first.content, first.tools) == ("system", "Be brief.", tools) and second is user
    [own] = with_tools([msgspec.structs.replace(developer, tools=tools)], None)
    assert own.role == "developer", "with tools of its own it is DeepSeek's role"
    assert with_tools([user], None) == [user]


def test_a_tool_is_one_line_in_the_order_that_models_know():
    function = {"strict": True, "parameters": {"z": 1, "a": "é"}, "description": "d", "name": "f"}
    tool = msgspec.convert({"type": "function", "function": function}, Tool)
    assert (
        write_schemas([tool, tool]).splitlines()
        == ['{"name": "f", "description": "d", "parameters": {"z": 1, "a": "é"}}'] * 2
    )


def test_the_switch_has_two_names():
    assert is_on({}, default=True) and not is_on({}, default=False)
    assert is_on({"thinking": True}, default=False) and not is_on({"enable_thinking": False}, default=True)


def test_a_flag_of_another_type_is_refused():
    assert flag({}, "drop_thinking", True) and not flag({"drop_thinking": False}, "drop_thinking", True)
    with pytest.raises(ApiError, match='drop_thinking="no": must be true or false') as caught:
        flag({"drop_thinking": "no"}, "drop_thinking", True)
    assert caught.value.param == "chat_template_kwargs.drop_thinking"
