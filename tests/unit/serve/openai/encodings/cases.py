"""What tests of prompt encodings share: messages and tools from plain JSON."""

import json
from typing import Any

import msgspec

from eprt.serve.openai.prompt_template import PromptTemplate
from eprt.serve.openai.protocol import Message, Tool

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def render(template: PromptTemplate, *messages: dict[str, Any], tools: Any = None, begins: bool = True, **variables):
    """begins: the model's answer comes next."""
    return template.render(
        msgspec.convert(list(messages), list[Message]),
        msgspec.convert(tools, list[Tool] | None),
        add_generation_prompt=begins,
        variables=variables,
    )


def said(content: str, thoughts: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning_content": thoughts, **more}


def called(*calls: tuple[str | None, dict[str, Any] | str], thoughts: str | None = None) -> dict[str, Any]:
    """An assistant's message that calls f: (id, arguments) of each call."""
    written = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": _text(arguments)}}
        for id, arguments in calls
    ]
    return said("", thoughts, tool_calls=written)


def _text(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def result(content: Any, id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id}
