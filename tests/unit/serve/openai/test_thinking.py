"""What clients ask of the model's thoughts reaches its chat template, or is refused by name."""

import json
from typing import Any

import pytest

from eprt.serve.errors import ApiError
from eprt.serve.openai.parsing import parse_chat
from eprt.serve.openai.reasoning import reasoning_format_named
from eprt.serve.openai.thinking import ThinkingSwitch
from tests.unit.serve.openai.template_cases import PLAIN, R1, V4, V31, template


def variables(source: str, asked: dict[str, Any], reasoning: str | None = None) -> dict[str, Any]:
    switch = ThinkingSwitch(template(source), reasoning_format_named(reasoning) if reasoning else None)
    body = {"messages": [{"role": "user", "content": "Hi"}], **asked}
    return switch.template_variables(parse_chat(json.dumps(body).encode()))


ON = [
    {"thinking": True},
    {"thinking": {"type": "enabled"}},
    {"enable_thinking": True},
    {"chat_template_kwargs": {"thinking": True}},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"chat_template_kwargs": {"enable_thinking": True, "thinking": None}, "reasoning_effort": "high"},
    {"chat_template_kwargs": {"reasoning_effort": "low"}},
    {"reasoning_effort": "medium"},
]
OFF = [
    {"thinking": False},
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
]


@pytest.mark.parametrize(("asked", "wanted"), [*((one, True) for one in ON), *((one, False) for one in OFF)])
def test_every_way_to_ask_reaches_the_models_switch(asked, wanted):
    assert variables(V31, asked) == {"thinking": wanted, "enable_thinking": wanted}
    assert template(V31).render([], variables=variables(V31, asked)).endswith("<think>" if wanted else "</think>")
    given = variables(V4, asked)
    assert given["thinking"] == wanted and "enable_thinking" not in given


def test_a_degree_is_passed_on_where_the_template_reads_it():
    assert variables(V4, {"reasoning_effort": "max"}) == {"thinking": True, "reasoning_effort": "max"}
    assert variables(V4, {"reasoning_effort": "none"}) == {"thinking": False}
    assert variables(V31, {}) == variables(R1, {}) == variables(PLAIN, {}) == {}


@pytest.mark.parametrize("asked", ON)
def test_a_model_without_a_switch_does_what_it_always_does(asked):
    assert variables(R1, asked) == {}
    assert variables(PLAIN, asked, "deepseek_r1") == {}, "the parser says that the model thinks"
    with pytest.raises(ApiError, match="its chat template has no switch for thinking") as caught:
        variables(PLAIN, asked)
    assert caught.value.code == "unsupported_parameter" and str(caught.value.param) in str(asked)


@pytest.mark.parametrize("asked", OFF)
def test_a_model_that_always_thinks_cannot_be_told_not_to(asked):
    assert variables(PLAIN, asked) == {}
    with pytest.raises(ApiError, match="it always thinks"):
        variables(R1, asked)


def test_as_little_as_it_can_is_no_thinking_where_a_model_cannot():
    assert variables(PLAIN, {"reasoning_effort": "minimal"}) == {}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"thinkng": True}}, "chat_template_kwargs.thinkng"),
        ({"thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(asked, param):
    with pytest.raises(ApiError) as caught:
        variables(V31, asked)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_variables_of_the_template_and_words_without_effect_pass():
    source = "{{ style }}" + PLAIN
    asked = {"chat_template_kwargs": {"style": "terse", "add_generation_prompt": True, "enable_thinking": None}}
    assert variables(source, asked) == {"style": "terse"}


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_template_variables_do_not_replace_fields(name):
    with pytest.raises(ApiError, match=f"chat_template_kwargs has {name}, which is a field of its own"):
        variables("{{ tools }}", {"chat_template_kwargs": {name: []}})
