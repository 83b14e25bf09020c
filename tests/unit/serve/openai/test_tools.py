"""Tool calls are found in streaming text, wherever it is cut; what cannot be read stays text."""

import json
import random

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models

from eprt.serve.openai.tools import FORMATS, GeneratedCall, ToolCallParser, tool_format_of
from tests.unit.engine.tokenizer_cases import save_tokenizer

HERMES = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


DEEPSEEK_V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
    "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>sub\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


TWO = [("add", {"a": 1}), ("sub", {})]


def _parse(form: str, text: str, cuts: list[int]) -> tuple[str, list[GeneratedCall]]:
    parser, shown, calls = ToolCallParser(FORMATS[form]), "", []
    for begin, end in zip([0, *cuts], [*cuts, len(text)]):
        more, new = parser.add_text(text[begin:end])
        shown, calls = shown + more, calls + new
    more, new = parser.finish()
    return shown + more, calls + new


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"),
    [
        ("hermes", "no call < tool_call>", "no call < tool_call>", []),
        ("hermes", f"Let me see. {HERMES}", "Let me see. ", [("add", {"a": 1})]),
        ("hermes", f"{HERMES}\n{HERMES}\n", "", [("add", {"a": 1})] * 2),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [("add", {"a": 1})]),
        ("hermes", "<tool_call>{broken</tool_call>!", "<tool_call>{broken</tool_call>!", []),
        ("hermes", "<tool_call>[1]", "<tool_call>[1]", []),
        ("hermes", "ends with <tool_", "ends with <tool_", []),
        ("deepseek", f"Sure.{DEEPSEEK_V3}", "Sure.", TWO),
        ("deepseek", DEEPSEEK_V31, "", TWO),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>no separator<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>no separator<｜tool▁call▁end｜>",
            [],
        ),
    ],
)
def test_tool_calls_are_found_however_the_text_is_cut(form, text, shown, calls):
    draw = random.Random(0)
    for _ in range(30):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(8)))
        found_text, found = _parse(form, text, cuts)
        assert found_text == shown
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_format_follows_the_tokens(tmp_path):
    tokenizer = HfTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert tool_format_of(save_tokenizer(tokenizer, tmp_path)) is FORMATS["hermes"]
    tokenizer.add_tokens(["<｜tool▁call▁begin｜>"])
    assert tool_format_of(save_tokenizer(tokenizer, tmp_path)) is FORMATS["deepseek"]
