"""ThinkingSwitch: what a request asks of the model's thoughts, as variables of the chat template.

Clients ask in several ways: `reasoning_effort` (OpenAI), `thinking` (DeepSeek, Anthropic), `enable_thinking` (Qwen),
or the same names in `chat_template_kwargs` (vLLM, SGLang). Templates read `thinking`, `enable_thinking` or
`reasoning_effort`, or think always, or never. Knows nothing of generated text (reasoning.py).
"""

from typing import Any

from eprt.serve.errors import ApiError, invalid, quoted, unsupported
from eprt.serve.openai.prompt_template import PromptTemplate
from eprt.serve.openai.protocol import ChatRequest, Message
from eprt.serve.openai.reasoning import BEGIN, ReasoningFormat

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("thinking", "enable_thinking")
_EFFORT = "reasoning_effort"
# Names that vLLM's and SGLang's clients send to every model, and the values that ask for nothing.
_NEUTRAL = {"add_generation_prompt": True, "continue_final_message": False, "tokenize": False}


class ThinkingSwitch:
    """What one model's template offers. reasoning: how the model writes its thoughts; None: they are not looked for."""

    def __init__(self, template: PromptTemplate, reasoning: ReasoningFormat | None):
        self._variables = template.variables
        self._switches = [name for name in _SWITCHES if name in self._variables]
        prompt = probe(template, {})
        self._thinks = prompt.endswith(BEGIN) or (reasoning is not None and reasoning.begins_inside(prompt))

    def template_variables(self, request: ChatRequest) -> dict[str, Any]:
        """For PromptTemplate.render. Raises ApiError where the model cannot do as asked."""
        given = {name: value for name, value in (request.chat_template_kwargs or {}).items() if value is not None}
        asked = _asked(request, given)
        variables = {}
        for name, value in given.items():
            if name in (*_SWITCHES, _EFFORT) or _NEUTRAL.get(name) == value:
                continue
            if name in ("messages", "tools"):
                raise invalid("chat_template_kwargs", f"chat_template_kwargs has {name}, which is a field of its own")
            if name not in self._variables:
                raise unsupported(f"chat_template_kwargs.{name}", self._unknown(name))
            variables[name] = value
        wanted = _agreed(asked)
        if wanted is not None:
            name, value = asked[-1]
            self._check(name, value, wanted)
            variables |= dict.fromkeys(self._switches, wanted)
            effort = dict(asked).get(_EFFORT)
            if _EFFORT in self._variables and effort not in (None, "none"):
                variables[_EFFORT] = effort
        return variables

    def _check(self, name: str, value: Any, wanted: bool) -> None:
        if self._switches or (_EFFORT in self._variables and name == _EFFORT) or wanted == self._thinks:
            return
        if wanted and value == "minimal":  # OpenAI's word for as little as the model can
            return
        why = "its chat template has no switch for thinking" if wanted else "it always thinks"
        raise unsupported(name, f"{name}={quoted(value)}: this model cannot do that: {why}")

    def _unknown(self, name: str) -> str:
        known = sorted(self._variables)
        has = f"has only {', '.join(known)}" if known else "has no variables"
        return f"chat_template_kwargs has {quoted(name)}, which the model's chat template does not read: it {has}"


def _asked(request: ChatRequest, given: dict[str, Any]) -> list[tuple[str, Any]]:
    """(name, value) of all that speaks of thinking; checks the values' types."""
    asked: list[tuple[str, Any]] = []
    if request.thinking is not None:
        asked.append(("thinking", request.thinking))
    if request.enable_thinking is not None:
        asked.append(("enable_thinking", request.enable_thinking))
    for name in _SWITCHES:
        if name in given:
            if not isinstance(given[name], bool):
                path = f"chat_template_kwargs.{name}"
                raise invalid(path, f"{path}={quoted(given[name])}: must be true or false", code="invalid_type")
            asked.append((name, given[name]))
    for effort in (given.get(_EFFORT), request.reasoning_effort):
        if effort is not None:
            if effort not in EFFORTS:
                raise invalid(_EFFORT, f"{_EFFORT}={quoted(effort)}: must be one of {', '.join(EFFORTS)}")
            asked.append((_EFFORT, effort))
    return asked


def _agreed(asked: list[tuple[str, Any]]) -> bool | None:
    """Whether to think; None: not said. ApiError where the answers differ."""
    wanted = {}
    for name, value in asked:
        if isinstance(value, dict):
            thinks = value["type"] != "disabled"
        else:
            thinks = value != "none" if name == _EFFORT else bool(value)
        wanted[thinks] = f"{name}={quoted(value)}"
    if len(wanted) > 1:
        raise invalid(asked[-1][0], f"{wanted[True]} and {wanted[False]} contradict each other; give one of them")
    return next(iter(wanted), None)


def probe(template: PromptTemplate, variables: dict[str, Any]) -> str:
    """The prompt of a short chat, without white space at its end; empty where the template refuses it."""
    try:
        return template.render([Message(role="user", content="Hi")], variables=variables).rstrip()
    except ApiError:
        return ""
