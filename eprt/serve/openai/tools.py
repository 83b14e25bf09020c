"""Tool calls in generated text: found, checked and taken out while the text streams.

Formats, chosen by the tokens the checkpoint has:
    hermes      <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    deepseek    <｜tool▁calls▁begin｜> calls <｜tool▁calls▁end｜>, where a call is (V3, R1)
                <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME newline ```json ARGUMENTS ```<｜tool▁call▁end｜>
                or (V3.1) <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>
What looks like a call but cannot be read stays in the text, as the model wrote it: nothing is lost. Knows nothing of
how an answer writes calls (answer.py).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from eprt.engine.sequence_text import overlap
from eprt.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class GeneratedCall:
    """A tool call that a model wrote."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: begin + body + end."""

    begin: str
    end: str
    wrappers: tuple[str, ...]  # text around the calls, which is removed too
    read: Callable[[str], GeneratedCall | None]  # body -> call; None where it cannot be read


def _read_hermes(body: str) -> GeneratedCall | None:
    try:
        call = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return GeneratedCall(call["name"], arguments)
    return GeneratedCall(call["name"], msgspec.json.encode(arguments).decode())


_DEEPSEEK_BODY = re.compile(
    r"\s*(?:function<｜tool▁sep｜>\s*(?P<v3>[^\n]+?)\s*\n```json\s*(?P<v3_args>.*?)\s*```"
    r"|(?P<v31>[^\n<]+?)\s*<｜tool▁sep｜>(?P<v31_args>.*?))\s*",
    re.DOTALL,
)


def _read_deepseek(body: str) -> GeneratedCall | None:
    match = _DEEPSEEK_BODY.fullmatch(body)
    if not match:
        return None
    name, arguments = match["v3"] or match["v31"], match["v3_args"] or match["v31_args"] or "{}"
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return GeneratedCall(name, arguments)


FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", (), _read_hermes),
    "deepseek": ToolFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        _read_deepseek,
    ),
}


def tool_format_of(tokenizer: Tokenizer) -> ToolFormat:
    """The format whose begin mark is a token of the checkpoint; hermes otherwise."""
    return next((f for f in reversed(FORMATS.values()) if tokenizer.has_token(f.begin)), FORMATS["hermes"])


class ToolCallParser:
    """One completion's text in; text to show and complete calls out, in order."""

    def __init__(self, form: ToolFormat):
        self._format, self._held, self._in_call = form, "", False
        self._marks = (form.begin, *form.wrappers)
        self._seen_call = False

    def add_text(self, text: str) -> tuple[str, list[GeneratedCall]]:
        """What can be shown now, and the calls that this text completed."""
        self._held += text
        shown, calls = [], []
        while True:
            if self._in_call:
                body, end, rest = self._held.partition(self._format.end)
                if not end:
                    break
                self._end_call(body, end, shown, calls)
                self._held = rest
            elif not self._skip_to_mark(shown):
                break
        return "".join(shown), calls

    def _skip_to_mark(self, shown: list[str]) -> bool:
        """Shows the text before the next mark; False where there is none yet."""
        found = [(at, mark) for mark in self._marks if (at := self._held.find(mark)) >= 0]
        if not found:
            num_held = max(overlap(self._held, mark) for mark in self._marks)
            self._show(self._held[: len(self._held) - num_held], shown)
            self._held = self._held[len(self._held) - num_held :]
            return False
        at, mark = min(found)
        self._show(self._held[:at], shown)
        self._held = self._held[at + len(mark) :]
        self._in_call = mark == self._format.begin
        return True

    def _show(self, text: str, shown: list[str]) -> None:
        # Line breaks between calls and after the last one belong to the format, not to the answer.
        if text and not (self._seen_call and text.isspace()):
            shown.append(text)

    def _end_call(self, body: str, end: str, shown: list[str], calls: list[GeneratedCall]) -> None:
        call = self._format.read(body)
        self._in_call = False
        if call is None:
            shown.append(self._format.begin + body + end)
        else:
            self._seen_call = True
            calls.append(call)

    def finish(self) -> tuple[str, list[GeneratedCall]]:
        """What was held back when the completion ended. A call that lacks only its end mark counts."""
        held, self._held = self._held, ""
        if not self._in_call:
            return held, []
        shown, calls = [], []
        self._end_call(held, "", shown, calls)
        return "".join(shown), calls
