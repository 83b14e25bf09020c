"""A response's request as a chat: other names, the same checks."""

import json

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.responses.request import ResponseRequest


def chat(**fields):
    return ResponseRequest.from_body(json.dumps({"input": "Hi", **fields}).encode()).chat()


def test_fields_have_their_meaning_in_a_chat():
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": None}
    request = chat(
        instructions="Be brief.",
        max_output_tokens=5,
        tools=[tool],
        reasoning={"effort": "none", "summary": None},
        top_logprobs=3,
        seed=7,
        text={"format": {"type": "text"}},
        store=None,
        context_management=[],
    )
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert (request.max_new_tokens, request.seed, request.num_logprobs) == (5, 7, 3)
    assert request.reasoning_effort == "none" and request.tools
    assert request.tools[0].function.name == "f"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": "high"}, "reasoning"),
        ({"text": {"color": 1}}, "text.color"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 99}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
