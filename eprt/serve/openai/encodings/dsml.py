"""What the prompts of DeepSeek-V3.2 and V4 share: marks, tool calls in DeepSeek's markup language (DSML), the switch.

Source: encoding/encoding_dsv32.py and encoding_dsv4.py of these checkpoints. Reading what the model writes is
tool_formats/dsml.py.
"""

import json
from typing import Any

import msgspec

from eprt.serve.errors import invalid, quoted
from eprt.serve.openai.prompt_template import function_of, to_json
from eprt.serve.openai.protocol import Message, Tool, ToolCall

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SWITCHES = frozenset({"thinking", "enable_thinking"})
_SYSTEM = Message(role="system", content="")


def is_on(variables: dict[str, Any], default: bool) -> bool:
    """Whether the model is to think."""
    given = [variables[name] for name in SWITCHES if variables.get(name) is not None]
    return any(given) if given else default


def flag(variables: dict[str, Any], name: str, default: bool) -> bool:
    """Of chat_template_kwargs. ApiError for another type."""
    value = variables.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        path = f"chat_template_kwargs.{name}"
        raise invalid(path, f"{path}={quoted(value)}: must be true or false", code="invalid_type")
    return value


def with_tools(messages: list[Message], tools: list[Tool] | None) -> list[Message]:
    """The request's tools belong to the leading system message, which is made where there is none. A developer's
    message is OpenAI's newer name of a system message; only with tools of its own is it DeepSeek's role."""
    messages = [
        msgspec.structs.replace(one, role="system") if one.role == "developer" and not one.tools else one
        for one in messages
    ]
    if not tools:
        return messages
    if messages[0].role != "system":
        messages.insert(0, _SYSTEM)
    messages[0] = msgspec.structs.replace(messages[0], tools=tools)
    return messages


def write_schemas(tools: list[Tool]) -> str:
    """One line for each tool."""
    return "\n".join(to_json(function_of(tool)) for tool in tools)


def write_calls(calls: list[ToolCall] | None, section: str) -> str:
    """An assistant's calls, with the empty line before them. section: what the tag around them is called."""
    if not calls:
        return ""
    written = "\n".join(
        f'<｜DSML｜invoke name="{call.function.name}">\n{_parameters(call.function.arguments)}\n</｜DSML｜invoke>'
        for call in calls
    )
    return f"\n\n<｜DSML｜{section}>\n{written}\n</｜DSML｜{section}>"


def _parameters(arguments: str) -> str:
    """One line for each argument: text as it is, anything else as JSON."""
    return "\n".join(
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else to_json(value)}</｜DSML｜parameter>"
        for key, value in _read(arguments).items()
    )


def _read(arguments: str) -> dict[str, Any]:
    """What is not a JSON object, which a model may have written once, becomes one argument."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
