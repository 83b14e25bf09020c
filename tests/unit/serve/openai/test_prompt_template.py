"""What all templates share: a message's text, a tool as the model reads it, JSON."""

import msgspec
import pytest

from eprt.serve.openai.prompt_template import PromptTemplate, function_of, text_of, to_json
from eprt.serve.openai.protocol import Message, Tool


def test_the_parts_of_a_message_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = msgspec.convert({"role": "user", "content": parts}, Message)
    assert (text_of(message), text_of(message, between="\n\n")) == ("ab", "a\n\nb")
    assert text_of(Message(role="assistant")) == "" and text_of(Message(role="user", content="x"), "\n") == "x"


def test_a_tool_lacks_what_was_not_given():
    tool = msgspec.convert({"type": "function", "function": {"name": "f", "strict": True}}, Tool)
    assert function_of(tool) == {"name": "f"}


def test_json_is_neither_escaped_nor_sorted():
    assert to_json({"b": "<é>", "a": 1}) == '{"b": "<é>", "a": 1}'


def test_a_template_must_render():
    with pytest.raises(TypeError, match="render"):
        PromptTemplate()  # type: ignore[abstract]
