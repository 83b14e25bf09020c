"""Conversations: the last message goes on, and what a template would drop is refused by name."""

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.conversation import render_conversation
from eprt.serve.openai.encodings.deepseek_v4 import DeepSeekV4Encoding
from eprt.serve.openai.encodings.deepseek_v32 import DeepSeekV32Encoding
from eprt.serve.openai.protocol import ChatRequest, FunctionCall, FunctionSpec, Message, Tool, ToolCall

# Prints nothing but users' and assistants' messages, like the first templates of DeepSeek-V3 and R1.
BARE = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<A>{{ m.content | trim }}<E>{% endif %}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)
FULL = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson if m.role == 'tool' else m.content }}{% endfor %}"
)
# Computes with what only some messages have.
FAILING = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}"
TOOLS = [Tool("function", FunctionSpec("search"))]
USER, RESULT = Message(role="user", content="Hi"), Message(role="tool", content='a "word"', tool_call_id="1")
CALL = Message(role="assistant", content=None, tool_calls=[ToolCall(FunctionCall("search", "{}"))])


def render(source: str, *messages: Message, **fields) -> str:
    request = ChatRequest(messages=list(messages), **fields)
    request.check()
    return render_conversation(ChatTemplate(source, {}), request, None)


def refused(source: str, *messages: Message, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        render(source, *messages, **fields)
    assert caught.value.status == 400
    return caught.value


def test_a_message_goes_on():
    said = Message(role="assistant", content="Well, ")
    assert render(BARE, USER, said) == "<U>Hi<A>Well,<E><A>", "a new message without being asked to"
    assert render(BARE, USER, said, continue_final_message=True) == "<U>Hi<A>Well,"
    assert render(FULL, USER, said, continue_final_message=True) == "<user>Hi<assistant>Well, "
    asked = Message(role="assistant", content="Well", prefix=True)
    assert render(BARE, USER, asked) == "<U>Hi<A>Well"
    assert render(BARE, Message(role="user", content="Well"), asked) == "<U>Well<A>Well", "the last place is meant"
    empty = Message(role="assistant", content=" ")
    assert render(BARE, USER, empty, continue_final_message=True) == "<U>Hi<A> "


@pytest.mark.parametrize(
    "messages, fields, param",
    [
        ([USER], {"continue_final_message": True}, "continue_final_message"),
        ([USER, CALL], {"continue_final_message": True}, "continue_final_message"),
        (
            [USER, Message(role="assistant", content="x")],
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ([Message(role="assistant", content="x", prefix=True), USER], {}, "messages[0].prefix"),
        ([USER, Message(role="assistant", content="x")], {"echo": True}, "echo"),
    ],
)
def test_what_cannot_go_on_is_named(messages, fields, param):
    assert refused(BARE, *messages, **fields).param == param


def test_a_message_that_is_printed_otherwise_cannot_go_on():
    error = refused("{{ messages[-1].content | upper }}", USER, Message(role="assistant", content="x", prefix=True))
    assert error.param == "continue_final_message" and "does not print the last message" in error.message


def test_tools_and_documents_that_a_template_drops_are_refused():
    assert render(FULL, USER, tools=TOOLS, documents=[{"text": "d"}]) == "[search](d)<user>Hi"
    error = refused(BARE, USER, tools=TOOLS)
    assert (error.param, error.code) == ("tools", "unsupported_parameter") and "chat_template.jinja" in error.message
    assert refused(BARE, Message(role="user", content="search"), tools=TOOLS).param == "tools", "a word like its name"
    assert render(BARE, USER, tools=TOOLS, tool_choice="none") == "<U>Hi<A>"
    assert refused(BARE, USER, documents=[{"text": "d"}]).param == "documents"
    assert render(BARE, USER, documents=[]) == "<U>Hi<A>"


def test_results_that_a_template_drops_are_refused():
    assert render(FULL, USER, RESULT) == '<user>Hi<tool>"a \\"word\\""', "in another form, but printed"
    error = refused(BARE, USER, RESULT)
    assert (error.param, error.code) == (
        "messages[1].role",
        "unsupported_parameter",
    ) and "user's message" in error.message


def test_a_message_that_a_template_fails_on_is_named_without_a_word_of_python():
    error = refused(FAILING, USER, USER, CALL, RESULT)
    assert (error.param, error.code) == ("messages[2]", "invalid_value")
    assert "cannot print the tool calls of role assistant" in error.message and "None" not in error.message
    broken = refused("{{ 1 / 0 }}", USER)
    assert broken.param == "messages" and "template fails: ZeroDivisionError" in broken.message
    own = refused("{{ raise_exception('roles must alternate') }}", USER)
    assert own.param == "messages" and "roles must alternate" in own.message, "the template's own words"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (Message(role="latest_reminder", content="Monday"), "messages[1].role"),
        (Message(role="user", content="Hi", task="title"), "messages[1].task"),
        (Message(role="developer", content="Hi", tools=TOOLS), "messages[1].tools"),
    ],
)
def test_what_few_models_have_is_refused_by_the_others(message, param):
    error = refused(FULL, USER, message)
    assert (error.param, error.code) == (param, "unsupported_parameter") and "DeepSeek-V4" in error.message
    request = ChatRequest(messages=[USER, message])
    assert render_conversation(DeepSeekV4Encoding(), request, None)
    with pytest.raises(ApiError):
        render_conversation(DeepSeekV32Encoding(), request, None)


@pytest.mark.parametrize("template", [DeepSeekV4Encoding(), DeepSeekV32Encoding()])
def test_encodings_print_everything_or_refuse_it(template):
    said = Message(role="assistant", content=" Well, ")
    request = ChatRequest(messages=[USER, said], continue_final_message=True)
    assert render_conversation(template, request, {"thinking": True}).endswith("<think></think> Well, ")
    tools = ChatRequest(messages=[USER, CALL, RESULT], tools=TOOLS)
    assert '"name": "search"' in render_conversation(template, tools, None)
    with pytest.raises(ApiError, match="does not print documents"):
        render_conversation(template, ChatRequest(messages=[USER], documents=[{"text": "d"}]), None)
