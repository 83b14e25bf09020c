"""A message's request as a chat: other names, the same checks."""

import json

import pytest

from eprt.serve.anthropic.request import MessageRequest
from eprt.serve.errors import ApiError

BODY = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}


def request(**fields) -> MessageRequest:
    return MessageRequest.from_body(json.dumps({**BODY, **fields}).encode())


def test_fields_have_their_meaning_in_a_chat():
    found = request(
        system="Be brief.",
        stop_sequences=["x"],
        thinking={"type": "enabled", "budget_tokens": 20, "display": "omitted"},
        tools=[{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}],
        tool_choice={"type": "auto"},
        metadata={"user_id": "u"},
        top_k=3,
        context_management={},
    )
    chat = found.chat
    assert [(message.role, message.content) for message in chat.messages] == [("system", "Be brief."), ("user", "Hi")]
    assert (chat.max_new_tokens, chat.stop_strings, chat.top_k, chat.user) == (50, ("x",), 3, "u")
    assert chat.thinking == {"type": "enabled"} and not found.shows_thinking and request().shows_thinking
    assert (
        chat.tools is not None
        and chat.tools[0].function.parameters == {"type": "object"}
        and chat.tool_choice == "auto"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop": "x"}, "stop"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        request(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
