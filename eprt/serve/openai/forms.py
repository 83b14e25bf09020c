"""Forms: the form that a request's answer must have, by the fields that ask for one, or by its tools.

    tool_choice required, or a named function   nothing but calls, whose arguments fit the tools' schemas
    a strict tool, or parallel_tool_calls=false   text, behind which such calls may follow; one, if none are parallel

Where the completion begins amid the model's thoughts, the form begins behind them. Knows nothing of how answers are
held to their forms (eprt/engine/grammars.py).
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from eprt.engine.form_checker import FormChecker
from eprt.engine.structured_outputs import FramedCalls, StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import invalid, unavailable
from eprt.serve.openai.formats import ModelFormats
from eprt.serve.openai.protocol import ChatRequest, CompletionRequest, Tool
from eprt.serve.openai.reasoning import END
from eprt.serve.openai.tools import ToolFormat

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

# Requests whose forms wait for their check, which takes up to three seconds of processor time each: all that come at
# once have their answer within two minutes, or know at once that they have none.
_MOST_WAITING = 64
_RETRY_S = 5


@dataclass(frozen=True)
class RequestedForm:
    """What an answer is held to, and the field that asks for it."""

    field: str
    outputs: StructuredOutputs
    schema_fields: tuple[str, ...] = ()  # of outputs.calls: the field of each frame's schema


class Forms:
    """The forms of one server's answers. tokenizer: None where there is none: then no form can be asked for."""

    def __init__(self, tokenizer: Tokenizer | None, formats: ModelFormats):
        self._tokenizer, self._formats = tokenizer, formats
        self._checker = FormChecker(tokenizer) if tokenizer else None
        self._threads = ThreadPoolExecutor(2, "forms")
        self._num_waiting = 0  # requests, those whose forms are being checked among them

    def of_completion(self, request: CompletionRequest) -> RequestedForm | None:
        """ApiError where the request asks for what cannot be, as in of_chat()."""
        return self._checked(_asked_by_fields(request))

    def of_chat(self, request: ChatRequest, prompt: str) -> RequestedForm | None:
        """prompt: the rendered messages."""
        asked, calls = self._checked(_asked_by_fields(request)), calls_of(request, self._formats)
        required = calls is not None and calls.outputs.calls is not None and calls.outputs.calls.required
        if asked is not None and required:
            message = f"{asked.field} asks for a form of the text, and tool_choice for nothing but calls; leave out one"
            raise invalid("tool_choice", message)
        form = asked or calls
        if form is None:
            return None
        reasoning = self._formats.reasoning
        thinks = reasoning is not None and reasoning.begins_inside(prompt)
        # Where calls may follow text, the thoughts are a part of it.
        if thinks and (asked is not None or required):
            form = replace(form, outputs=replace(form.outputs, after=END))
        return form

    def _checked(self, form: RequestedForm | None) -> RequestedForm | None:
        if form is not None and self._tokenizer is None:
            raise invalid(form.field, f"{form.field}: the server runs without a tokenizer, which this needs")
        return form

    async def require(self, form: RequestedForm) -> None:
        """ApiError 400, saying where and why, for a form that cannot be enforced; 503 where too many wait for that.
        Cancelled, it leaves no work behind that has not begun."""
        assert self._checker is not None, "without a tokenizer no form is asked for"
        known = self._checker.find(form.outputs)
        if known == "":
            return
        if known is None and self._num_waiting >= _MOST_WAITING:
            what = f"{form.field}: {self._num_waiting} other requests wait for the check of their forms"
            raise unavailable(f"{what}; try again later", code="too_many_forms", retry_after_s=_RETRY_S)
        self._num_waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._check, self._checker, form)
        finally:
            self._num_waiting -= 1

    def _check(self, checker: FormChecker, form: RequestedForm) -> None:
        try:
            refusal = checker.why_refused(form.outputs)
        except OSError as error:
            raise unavailable(f"the form of the answer cannot be checked: {error}", code="no_process") from None
        if refusal:
            frames = form.outputs.calls.frames if form.outputs.calls else ()
            for field, (_, schema, _) in zip(form.schema_fields, frames):
                self._check(checker, RequestedForm(field, StructuredOutputs(json=schema)))
            raise invalid(form.field, f"{form.field}: {refusal}")


def _asked_by_fields(request: CompletionRequest | ChatRequest) -> RequestedForm | None:
    asked = request.requested_form()
    return None if asked is None else RequestedForm(*asked)


def calls_of(request: ChatRequest, formats: ModelFormats) -> RequestedForm | None:
    """What the request's tools demand of the answer; None: nothing."""
    name, form = request.named_tool, formats.tools
    required = name is not None or request.tool_choice == "required"
    one_only = name is not None or request.parallel_tool_calls is False
    tools = (request.tools or []) if request.uses_tools else []
    if not (required or (tools and one_only) or any(tool.function.strict for tool in tools)):
        return None
    if form is None:
        raise invalid("tools", "the server reads no tool calls (--tool-call-parser none), so it cannot force any")
    wanted = {i: tool for i, tool in enumerate(tools) if name in (None, tool.function.name)}
    calls = FramedCalls(
        tuple(_frame(form, tool, required) for tool in wanted.values()),
        section_begin=form.section_begin,
        section_end=form.section_end,
        between=form.between,
        required=required,
        many=not one_only,
        in_text=formats.reasoning.marks if formats.reasoning else (),
    )
    return RequestedForm(
        "tools", StructuredOutputs(calls=calls), tuple(f"tools[{i}].function.parameters" for i in wanted)
    )


def _frame(form: ToolFormat, tool: Tool, required: bool) -> tuple[str, str, str]:
    """Where calls are not required, the arguments of a tool that is not strict may be any object."""
    begin, end = form.call_frame(tool.function.name)
    schema: Any = {"type": "object"}
    if required or tool.function.strict:
        schema = _NO_ARGUMENTS if tool.function.parameters is None else {"type": "object", **tool.function.parameters}
    return begin, json.dumps(schema, ensure_ascii=False), end
