"""DeepSeek-V4's prompts: results of tools are a user's words, in the order of the calls; efforts are words in front.

    <bos>EFFORT SYSTEM<｜User｜>QUESTION<｜Assistant｜><think>THOUGHTS</think>ANSWER

    <｜DSML｜tool_calls>...</｜DSML｜tool_calls><eos><｜User｜><tool_result>RESULT</tool_result>

    NEXT QUESTION<｜Assistant｜><think>

Thoughts before the last user's message are left out, unless there are tools or the request keeps them (drop_thinking).
Source: encoding/encoding_dsv4.py of the checkpoints, and its four test vectors (a test compares). Knows nothing of
generated text.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eprt.models.config_file import ConfigFile
from eprt.serve.openai.encodings.dsml import (
    ASSISTANT,
    BOS,
    EOS,
    SWITCHES,
    USER,
    flag,
    is_on,
    with_tools,
    write_calls,
    write_schemas,
)
from eprt.serve.openai.prompt_template import PromptTemplate, text_of
from eprt.serve.openai.protocol import Message, Tool
from eprt.serve.openai.reasoning import BEGIN, END

_SECTION = "tool_calls"
_EMPTY_LINE = "\n\n"
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

SCHEMAS

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""  # noqa: E501  # the model was trained on these lines

_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
# Clients' efforts -> what the model reads; those that are not here add nothing.
_PREVIEW = {"xhigh": _ABSOLUTE, "max": _ABSOLUTE}
_RELEASE = {"medium": _ABSOLUTE, "high": _ABSOLUTE, "xhigh": _ABSOLUTE, "max": _BEYOND}

_REMINDER = "latest_reminder"


@dataclass(frozen=True)
class _Turn:
    """Messages that the model reads as one."""

    role: str
    messages: list[Message]  # of a user's turn: also results of tools

    @property
    def task(self) -> str | None:
        return self.messages[0].task

    @property
    def asks(self) -> bool:
        """Whether an answer follows."""
        return self.role in ("user", "developer")


class DeepSeekV4Encoding(PromptTemplate):
    """Thinks unless a request forbids it, as DeepSeek's own API does.

    Args:
        has_low_effort: of the releases since V4-Flash-0731, whose words for an effort moved up by one.
    """

    variables = SWITCHES | {"reasoning_effort", "drop_thinking"}
    tool_format = "deepseek_v4"
    reasoning_format = "deepseek_v4"
    message_extras = frozenset({_REMINDER, "tools", "task"})

    def __init__(self, has_low_effort: bool = False):
        self._efforts = _RELEASE if has_low_effort else _PREVIEW

    @staticmethod
    def from_checkpoint(model_dir: Path) -> "DeepSeekV4Encoding":
        """The checkpoint's own program, which is read and not run, names what it has; converted checkpoints may lack
        it, but say by other fields how old they are."""
        program = model_dir / "encoding" / "encoding_dsv4.py"
        if program.is_file():
            return DeepSeekV4Encoding("REASONING_EFFORT_PROMPTS" in program.read_text(encoding="utf-8"))
        fields = ConfigFile(model_dir / "config.json").fields
        return DeepSeekV4Encoding(any(name.startswith("dspark_") for name in fields))

    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        variables = variables or {}
        thinks = is_on(variables, default=True)
        turns = _turns(with_tools(messages, tools))
        last_asking = max((i for i, turn in enumerate(turns) if turn.asks), default=-1)
        first_thinking = last_asking
        if any(message.tools for message in messages) or tools or not flag(variables, "drop_thinking", True):
            first_thinking = -1
        text = BOS + (self._efforts.get(variables.get("reasoning_effort") or "", "") if thinks else "")
        for i, turn in enumerate(turns):
            has_task = i > 0 and turns[i - 1].task is not None
            text += _write(turn, thinks=thinks and not has_task and i > first_thinking)
            following = turns[i + 1].role if i + 1 < len(turns) else None
            if following in ("assistant", _REMINDER) or (following is None and add_generation_prompt):
                opens = thinks and (i >= first_thinking or turn.task == "action")
                text += _opening(turn, BEGIN if opens else END, is_last=following is None)
        return text


def _opening(turn: _Turn, mark: str, is_last: bool) -> str:
    """What makes the model begin its answer to this turn."""
    if turn.task is not None:
        return f"{ASSISTANT}{mark}<｜action｜>" if turn.task == "action" else f"<｜{turn.task}｜>"
    return ASSISTANT + mark if turn.asks or is_last else ""


def _write(turn: _Turn, thinks: bool) -> str:
    """thinks: an assistant's turn has its thoughts."""
    message = turn.messages[0]
    if turn.role == "user":
        return USER + _EMPTY_LINE.join(_block(one) for one in turn.messages)
    if turn.role == _REMINDER:
        return f"<｜{_REMINDER}｜>{text_of(message)}"
    if turn.role == "assistant":
        thoughts = (message.reasoning_content or message.reasoning or "") + END if thinks else ""
        return thoughts + text_of(message) + write_calls(message.tool_calls, _SECTION) + EOS
    tools = _EMPTY_LINE + _TOOLS.replace("SCHEMAS", write_schemas(message.tools)) if message.tools else ""
    return (USER if turn.role == "developer" else "") + text_of(message) + tools


def _block(message: Message) -> str:
    if message.role != "tool":
        return text_of(message)
    return f"<tool_result>{text_of(message, between=_EMPTY_LINE)}</tool_result>"


def _turns(messages: list[Message]) -> list[_Turn]:
    """Users' messages and results of tools, where they follow each other, become one turn; a task ends it."""
    turns: list[_Turn] = []
    for message in messages:
        joins = turns and turns[-1].role == "user" and (turns[-1].task is None or message.role == "tool")
        if message.role in ("user", "tool") and joins:
            turns[-1].messages.append(message)
        else:
            turns.append(_Turn("user" if message.role == "tool" else message.role, [message]))
    order: dict[str | None, int] = {}
    for turn in turns:
        if calls := turn.messages[0].tool_calls:
            order = {call.id: i for i, call in enumerate(calls)}
        _sort_results(turn.messages, order)
    return turns


def _sort_results(messages: list[Message], order: dict[str | None, int]) -> None:
    """Results come in the order of the calls, at the places where there are results. order: call id -> place."""
    places = [i for i, message in enumerate(messages) if message.role == "tool"]
    results = sorted((messages[i] for i in places), key=lambda result: order.get(result.tool_call_id, 0))
    for i, result in zip(places, results):
        messages[i] = result
