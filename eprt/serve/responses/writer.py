"""ResponseWriter: an answer as /v1/responses gives it, a document or the events that the client's SDK puts together.

An answer's items are reasoning, messages and function calls, in the order in which they were generated. Knows nothing
of how a request was parsed.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from eprt.serve.errors import ApiError
from eprt.serve.openai.choice import Choice, Delta
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.tools import CallDelta
from eprt.serve.openai.usage import Usage
from eprt.serve.openai.writers import AnswerWriter, Part, event, told_of_experts
from eprt.serve.responses.items import messages_of
from eprt.serve.responses.request import ResponseRequest
from eprt.serve.responses.store import ResponseStore

_STATUS = {"length": "incomplete", "abort": "cancelled"}
# The text of an item, by its type: where it stands, and the part that holds it.
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponseWriter(AnswerWriter):
    """Of one response, which the store keeps if the request asks for that."""

    def __init__(self, job: GenerationJob, logprobs: LogprobWriter, request: ResponseRequest, store: ResponseStore):
        super().__init__(job, logprobs)
        self._request, self._store = request, store
        self._id = f"resp_{uuid.uuid4().hex}"
        self._items: list[dict[str, Any]] = []  # the last may still grow
        self._is_open = False  # the last does
        self._status = "in_progress"
        self._num_events = 0
        self._told_of_experts: dict[str, bool] = {}

    # -- the whole --

    def document(self, parts: list[Part], usage: Usage) -> dict[str, Any]:
        ((choice, delta),) = parts
        delta.entries = delta.entries[choice.num_reasoning_tokens :]
        for _ in self._grow(delta):
            pass
        self._end(choice)
        return self._finished(usage)

    def _finished(self, usage: Usage) -> dict[str, Any]:
        document = self._response(usage)
        if self._request.stores:
            messages = [*self._request.earlier, *self._request.messages, *messages_of(self._items)]
            self._store.add_response(document, messages, self._request.raw["input"])
        return document

    def _response(self, usage: Usage | None = None) -> dict[str, Any]:
        raw, params = self._request.raw, self.job.params
        is_cut = self._status == "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self.job.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": raw.get("instructions"),
            "max_output_tokens": raw.get("max_output_tokens"),
            "metadata": raw.get("metadata", {}),
            "model": self.job.model,
            "output": self._items,
            "parallel_tool_calls": raw.get("parallel_tool_calls", True),
            "previous_response_id": self._request.previous_id,
            "reasoning": {"effort": None, "summary": None, **raw.get("reasoning", {})},
            "service_tier": self.job.given_tier or "default",
            "store": self._request.stores,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **raw.get("text", {})},
            "tool_choice": raw.get("tool_choice", "auto"),
            "tools": raw.get("tools", []),
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": raw.get("user"),
            **self._told_of_experts,
        }

    # -- events --

    def first_events(self, usage: Callable[[], Usage]) -> bytes:
        return b"".join(
            self._event(f"response.{state}", response=self._response()) for state in ("created", "in_progress")
        )

    def delta_events(self, choice: Choice, delta: Delta, usage: Callable[[], Usage]) -> bytes:
        if not delta.text:
            delta.entries = []  # of reasoning and calls, which have no log-probabilities here
        data = b"".join(self._grow(delta))
        return data + self._end(choice) if delta.finish_reason else data

    def last_events(self, usage: Callable[[], Usage]) -> bytes:
        response = self._finished(usage())
        kind = "response.completed" if self._status == "completed" else "response.incomplete"
        return self._event(kind, response=response)

    def error_events(self, error: ApiError) -> bytes:
        self._status = "failed"
        told = {"code": "server_error", "message": f"{error.message} ({error.code})"}
        return self._event("response.failed", response={**self._response(), "error": told})

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    # -- items --

    def _grow(self, delta: Delta) -> Iterator[bytes]:
        """The events of what a delta adds; keeps the items up to date."""
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add_text("message", delta.text, delta)
        for call in delta.calls:
            if call.name is not None:
                yield from self._open(self._call(call))
            item = self._items[-1]
            item["arguments"] += call.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)

    def _call(self, call: CallDelta) -> dict[str, Any]:
        call_id = f"call_{self.job.request_id}_{call.number}"
        return {"type": "function_call", "call_id": call_id, "name": call.name, "arguments": ""}

    def _add_text(self, kind: str, text: str, delta: Delta | None = None) -> Iterator[bytes]:
        if not (self._is_open and self._items[-1]["type"] == kind):
            yield from self._open(
                {"type": kind, "summary": []} if kind == "reasoning" else {"type": kind, "role": "assistant"}
            )
            part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            yield self._item_event("response.content_part.added", content_index=0, part=part)
            self._items[-1]["content"] = [part]
        part = self._items[-1]["content"][0]
        part["text"] += text
        more: dict[str, Any] = {}
        if delta is not None:
            more["logprobs"] = []
            if self.job.params.logprobs is not None:
                more["logprobs"] = self.logprobs.chat(delta.entries)["content"]
            part["logprobs"] += more["logprobs"]
        yield self._item_event(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **more)

    def _open(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[item["type"]]
        item = {"id": f"{prefix}_{self._id[5:]}_{len(self._items)}", **item, "status": "in_progress"}
        if item["type"] != "function_call":
            item["content"] = []
        self._items.append(item)
        self._is_open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _close(self, status: str) -> bytes:
        """The events that end the last item, if it is open."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            data = self._item_event(kind, arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            data = self._item_event(f"response.{part['type']}.done", content_index=0, text=part["text"], **more)
            data += self._item_event("response.content_part.done", content_index=0, part=part)
        return data + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _end(self, choice: Choice) -> bytes:
        """The sequence has ended. An answer of no words is an empty message."""
        data = b""
        if not self._items:
            data = b"".join(self._add_text("message", "", Delta()))
        self._status = _STATUS.get(choice.finish_reason or "", "completed")
        self._told_of_experts = told_of_experts(choice)
        return data + self._close("completed" if self._status == "completed" else "incomplete")


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
