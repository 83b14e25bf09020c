"""Forms that requests ask for: by fields of OpenAI, vLLM and SGLang, and by tools; what is refused, and how."""

import asyncio
import json
import threading
from dataclasses import replace

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from eprt.engine.grammars import Grammars
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.http.responses import unless_disconnected
from eprt.serve.openai import forms as forms_module
from eprt.serve.openai.formats import ModelFormats
from eprt.serve.openai.forms import Forms, RequestedForm
from eprt.serve.openai.parsing import parse_chat, parse_completion
from eprt.serve.openai.reasoning import reasoning_format_named
from eprt.serve.openai.tools import TOOL_FORMAT_NAMES, ToolCallParser, tool_format_named
from tests.paths import DEMO

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g_2"}},
]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def forms(tokenizer) -> Forms:
    return Forms(tokenizer, ModelFormats(tools=tool_format_named("hermes")))


def chat(forms: Forms, prompt: str = "", **fields) -> RequestedForm | None:
    return forms.of_chat(parse_chat(msgspec.json.encode({"messages": MESSAGES, **fields})), prompt)


def fits(forms: Forms, tokenizer: Tokenizer, form: RequestedForm | None, text: str) -> bool:
    assert form is not None
    asyncio.run(forms.require(form))
    matcher = Grammars(lambda: tokenizer).compile(form.outputs).deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "fields, field, outputs",
    [
        ({"response_format": {"type": "json_object"}}, "response_format", {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "response_format.json_schema.schema",
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", {"json": SCHEMA}),
        (
            {"structured_outputs": {"regex": "a+", "disable_fallback": True}},
            "structured_outputs.regex",
            {"regex": "a+"},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar", {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", {"json_object": True}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            "structured_outputs.json_object",
            {"json_object": True, "whitespace_pattern": ""},
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?", "guided_decoding_backend": "auto"},
            "guided_json",
            {"json": SCHEMA, "whitespace_pattern": " ?"},
        ),
        ({"guided_regex": "a"}, "guided_regex", {"regex": "a"}),
        ({"guided_choice": ["a"]}, "guided_choice", {"choice": ["a"]}),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", {"grammar": 'root ::= "a"'}),
        ({"guided_json_object": True}, "guided_json_object", {"json_object": True}),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", {"json": SCHEMA}),
        ({"regex": "[0-9]"}, "regex", {"regex": "[0-9]"}),
        ({"ebnf": 'root ::= "a"'}, "ebnf", {"grammar": 'root ::= "a"'}),
    ],
)
def test_fields(forms, fields, field, outputs):
    completion = forms.of_completion(parse_completion(msgspec.json.encode({"prompt": "x", **fields})))
    for form in (chat(forms, **fields), completion):
        assert form is not None and form.field == field
        want = StructuredOutputs(**outputs)
        if want.json is not None:
            assert json.loads(form.outputs.text) == json.loads(want.text)
            want = replace(want, json=form.outputs.json)
        assert form.outputs == want
        asyncio.run(forms.require(form))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_json_object": False, "regex": None},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": STRICT, "tool_choice": "none"},
        {"parallel_tool_calls": False},
    ],
)
def test_neutral_fields_ask_for_no_form(forms, fields):
    assert chat(forms, **fields) is None


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"name": "x"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": {"yaml": "x"}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex"),
        ({"guided_json": 3}, "guided_json"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "tool_choice"),
    ],
)
def test_wrong_fields_are_named(forms, fields, param):
    with pytest.raises(ApiError) as refused:
        chat(forms, **fields)
    assert refused.value.status == 400 and refused.value.param == param


@pytest.mark.parametrize(
    "fields, param, words",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}}},
            None,
            "at /items",
        ),
        ({"guided_regex": "("}, "guided_regex", "unclosed"),
        ({"ebnf": 'root ::= "a'}, "ebnf", "ebnf: not a grammar"),
        (
            {"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools[1].function.parameters",
            "not",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(forms, fields, param, words):
    form = chat(forms, **fields, **({"tool_choice": "required"} if "tools" in fields else {}))
    assert form is not None
    with pytest.raises(ApiError, match=words) as refused:
        asyncio.run(forms.require(form))
    assert refused.value.status == 400 and refused.value.param == (param or "response_format.json_schema.schema")


CALL = '<tool_call>{"name": "f", "arguments": {"x": 3}}</tool_call>'
OTHER = '<tool_call>{"name": "g_2", "arguments": {}}</tool_call>'
ANY = '<tool_call>{"name": "g_2", "arguments": {"anything": [1]}}</tool_call>'


@pytest.mark.parametrize(
    "fields, good, bad",
    [
        ({"tool_choice": "required"}, [CALL, f"{CALL}\n{OTHER}"], ["hi", CALL.replace("3", '"3"'), ANY, "x" + CALL]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL, OTHER], [f"{CALL}\n{OTHER}"]),
        ({"tool_choice": NAMED}, [CALL], [OTHER, f"{CALL}\n{CALL}", "hi"]),
        ({"parallel_tool_calls": False}, ["hi", CALL.replace("3", '"3"'), "hi" + ANY], [f"{CALL}\n{CALL}"]),
        ({"tools": STRICT}, ["hi", "hi" + CALL, f"{CALL}\n{ANY}"], [CALL.replace("3", '"3"')]),
    ],
)
def test_tools(forms, tokenizer, fields, good, bad):
    form = chat(forms, **{"tools": TOOLS, **fields})
    assert [fits(forms, tokenizer, form, text) for text in good] == [True] * len(good)
    assert [fits(forms, tokenizer, form, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_forced_calls_of_every_format_are_read(tokenizer, name):
    """Marks that this tokenizer lacks are plain text."""
    tools = tool_format_named(name)
    forms = Forms(tokenizer, ModelFormats(tools=tools))
    form = chat(forms, tools=TOOLS, tool_choice="required")
    frames = [tools.call_frame(tool["function"]["name"]) for tool in TOOLS]
    calls = tools.between.join([frames[0][0] + '{"x": 3}' + frames[0][1], frames[1][0] + "{}" + frames[1][1]])
    text = tools.section_begin + calls + tools.section_end
    assert fits(forms, tokenizer, form, text) and not fits(forms, tokenizer, form, text.replace("3", "null"))
    parser = ToolCallParser(tools, {"f": frozenset(["x"]), "g_2": frozenset()})
    shown, deltas = parser.add_text(text)
    more, rest = parser.finish()
    assert (shown + more).strip() == ""
    read: dict[int, list[str]] = {}
    for delta in (*deltas, *rest):
        name_of, arguments = read.setdefault(delta.number, ["", ""])
        read[delta.number] = [name_of or delta.name or "", arguments + delta.arguments]
    assert [(name_of, json.loads(arguments)) for name_of, arguments in read.values()] == [("f", {"x": 3}), ("g_2", {})]


def test_thoughts_come_before_the_form(tokenizer):
    formats = ModelFormats(tools=tool_format_named("hermes"), reasoning=reasoning_format_named("deepseek_v3"))
    forms = Forms(tokenizer, formats)
    held = chat(forms, "...<think>", guided_regex="a")
    assert fits(forms, tokenizer, held, "hm\n</think>a") and not fits(forms, tokenizer, held, "a")
    free = chat(forms, "...</think>", guided_regex="a")
    assert fits(forms, tokenizer, free, "a") and not fits(forms, tokenizer, free, "hm</think>a")
    required = chat(forms, "...<think>", tools=TOOLS, tool_choice="required")
    assert fits(forms, tokenizer, required, "hm</think>" + CALL) and not fits(forms, tokenizer, required, CALL)
    strict = chat(forms, "...<think>", tools=STRICT)
    assert fits(forms, tokenizer, strict, "hm</think>hello" + CALL) and fits(
        forms, tokenizer, strict, "hm</think>hello"
    )


def test_servers_that_cannot_say_so():
    with pytest.raises(ApiError, match="without a tokenizer"):
        Forms(None, ModelFormats()).of_completion(parse_completion(b'{"prompt": [1], "guided_regex": "a"}'))
    with pytest.raises(ApiError, match="--tool-call-parser"):
        chat(Forms(Tokenizer(DEMO), ModelFormats()), tools=TOOLS, tool_choice="required")


def test_no_more_requests_wait_for_the_check_of_their_forms_than_can_have_it(tokenizer, monkeypatch):
    monkeypatch.setattr(forms_module, "_MOST_WAITING", 2)
    forms, goes_on = Forms(tokenizer, ModelFormats()), threading.Event()
    kept: dict[StructuredOutputs, str] = {}

    class SlowChecker:
        def find(self, outputs: StructuredOutputs) -> str | None:
            return kept.get(outputs)

        def why_refused(self, outputs: StructuredOutputs) -> str:
            assert goes_on.wait(30)
            return kept.setdefault(outputs, "no" if outputs.regex == "1" else "")

    monkeypatch.setattr(forms, "_checker", SlowChecker())

    async def ask() -> list[BaseException | None]:
        asked = [RequestedForm("regex", StructuredOutputs(regex=str(i))) for i in range(3)]
        waiting = [asyncio.create_task(forms.require(form)) for form in asked]
        (third,) = await asyncio.gather(waiting[2], return_exceptions=True)
        goes_on.set()
        first = await asyncio.gather(*waiting[:2], return_exceptions=True)
        again = await asyncio.gather(*map(forms.require, asked), return_exceptions=True)
        return [*first, third, *again]

    first, second, third, *again = asyncio.run(ask())
    assert first is None and isinstance(second, ApiError) and second.status == 400
    assert isinstance(third, ApiError) and (third.status, third.code) == (503, "too_many_forms")
    assert third.retry_after_s and "2 other requests wait" in third.message
    assert [getattr(error, "status", None) for error in again] == [None, 400, None]


def test_a_request_whose_client_leaves_waits_no_longer(tokenizer, monkeypatch):
    forms, goes_on, checked = Forms(tokenizer, ModelFormats()), threading.Event(), []

    class SlowChecker:
        def find(self, outputs: StructuredOutputs) -> str | None:
            return None

        def why_refused(self, outputs: StructuredOutputs) -> str:
            checked.append(outputs.regex)
            assert goes_on.wait(30)
            return ""

    monkeypatch.setattr(forms, "_checker", SlowChecker())

    async def never() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    def ask(i: int, receive):
        return unless_disconnected(forms.require(RequestedForm("regex", StructuredOutputs(regex=str(i)))), receive)

    async def run() -> None:
        busy = [asyncio.create_task(ask(i, never)) for i in range(2)]
        while len(checked) < 2:
            await asyncio.sleep(0.001)
        gone = await asyncio.gather(*(ask(i, leaves) for i in range(2, 80)), return_exceptions=True)
        assert all(isinstance(error, ClientDisconnect) for error in gone if not isinstance(error, ApiError))
        last = asyncio.create_task(ask(80, never))
        goes_on.set()
        await asyncio.gather(*busy, last)

    asyncio.run(run())
    assert sorted(checked) == ["0", "1", "80"]
