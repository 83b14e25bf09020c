"""MessageRequest: the body of POST /v1/messages, and the chat that it asks for.

Fields that both APIs have go to the chat's own checks, so they are honoured or refused alike. Knows nothing of answers
(writer.py).
"""

from dataclasses import dataclass
from typing import Any

from eprt.serve.anthropic.blocks import messages_of, system_text
from eprt.serve.errors import invalid, quoted, shortened, unsupported
from eprt.serve.openai.face import chat_fields, renamed
from eprt.serve.openai.parsing import chat_request, given_fields
from eprt.serve.openai.protocol import ChatRequest

# Fields that eprt does not serve, and the values that are accepted because they ask for nothing.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
# Field of chats -> its name here.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "n": "several requests",
    "user": "metadata.user_id",
}


@dataclass(frozen=True)
class MessageRequest:
    """One request."""

    chat: ChatRequest
    shows_thinking: bool

    @staticmethod
    def from_body(body: bytes, *, needs_max_tokens: bool = True) -> "MessageRequest":
        """Raises ApiError."""
        given = given_fields(body)
        for name in ("max_tokens", "messages") if needs_max_tokens else ("messages",):
            if name not in given:
                raise invalid(name, f"{name} is missing", code="missing_required_parameter")
        fields = _chat_fields(given)
        thinking = given.get("thinking")
        with renamed(NAMES):
            return MessageRequest(chat_request(fields), not (thinking and thinking.get("display") == "omitted"))


def _chat_fields(given: dict[str, Any]) -> dict[str, Any]:
    apart = ("messages", "system", "thinking")
    fields = chat_fields("/v1/messages", given, defaults=_DEFAULTS, names=NAMES, own=_OWN, apart=apart)
    messages = messages_of(given["messages"])
    if messages and messages[-1]["role"] == "assistant":
        # The answer goes on with these words.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    system = [{"role": "system", "content": system_text(given["system"])}] if "system" in given else []
    return {**fields, **_thinking(given), "messages": [*system, *messages]}


def _object(name: str, value: Any, *known: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(name, f"{name} is {quoted(value)}; must be an object", code="invalid_type")
    for key in value:
        if key not in known:
            raise unsupported(f"{name}.{shortened(key)}", f"{name} has the unknown field {quoted(key)}")
    return value


def _thinking(given: dict[str, Any]) -> dict[str, Any]:
    """A budget is a target in Anthropic's API too, not a limit: it is checked and left to the model."""
    if "thinking" not in given:
        return {}
    thinking = _object("thinking", given["thinking"], "type", "budget_tokens", "display")
    budget, most = thinking.get("budget_tokens"), given.get("max_tokens")
    if budget is not None and (type(budget) is not int or budget < 1 or (type(most) is int and budget >= most)):
        message = f"thinking.budget_tokens={quoted(budget)}: must be at least 1 and below max_tokens={quoted(most)}"
        raise invalid("thinking.budget_tokens", message)
    if thinking.get("display") not in (None, "summarized", "omitted"):
        message = f"thinking.display={quoted(thinking['display'])}: must be summarized or omitted"
        raise invalid("thinking.display", message)
    return {"thinking": {"type": thinking.get("type")}}


def _stop_sequences(value: Any) -> dict[str, Any]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        message = f"stop_sequences is {quoted(value)}; must be a list of strings"
        raise invalid("stop_sequences", message, code="invalid_type")
    return {"stop": value}


def _metadata(value: Any) -> dict[str, Any]:
    user = _object("metadata", value, "user_id").get("user_id")
    return {"user": user} if user is not None else {}


def _service_tier(value: Any) -> dict[str, Any]:
    """auto: the key's tier. Other names than these two are refused: Anthropic's clients know no others."""
    if value not in ("auto", "standard_only"):
        raise unsupported("service_tier", f"service_tier={quoted(value)}: must be auto or standard_only")
    return {"service_tier": "auto" if value == "auto" else "default"}


def _output_config(value: Any) -> dict[str, Any]:
    config, fields = _object("output_config", value, "effort", "format"), {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    if config.get("format") is not None:
        form = _object("output_config.format", config["format"], "type", "schema")
        schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
        fields["response_format"] = {"type": form.get("type"), "json_schema": schema}
    return fields


def _tools(value: Any) -> dict[str, Any]:
    if not isinstance(value, list):
        raise invalid("tools", f"tools is {quoted(value)}; must be a list", code="invalid_type")
    tools = []
    for i, tool in enumerate(value):
        path = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
            raise unsupported(f"{path}.type", f"{path} is {quoted(tool)}; eprt knows tools of the client's own")
        known = ("name", "description", "input_schema", "strict", "type", "cache_control", "eager_input_streaming")
        spec = {key: one for key, one in _object(path, tool, *known).items() if key in known[:4]}
        if "input_schema" in spec:
            spec["parameters"] = spec.pop("input_schema")
        tools.append({"type": "function", "function": spec})
    return {"tools": tools} if tools else {}


def _tool_choice(value: Any) -> dict[str, Any]:
    choice = _object("tool_choice", value, "type", "name", "disable_parallel_tool_use")
    kind = choice.get("type")
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    names = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in names:
        message = f"tool_choice.type={quoted(kind)}: must be auto, any, tool or none"
        raise invalid("tool_choice.type", message)
    return {**fields, "tool_choice": names[kind]}


# Name -> the chat's fields that its value asks for. cache_control: equal beginnings are always cached.
_OWN = {
    "cache_control": lambda value: {},
    "metadata": _metadata,
    "service_tier": _service_tier,
    "output_config": _output_config,
    "stop_sequences": _stop_sequences,
    "tool_choice": _tool_choice,
    "tools": _tools,
}
