"""MessageWriter: an answer as /v1/messages gives it, a document or events.

Knows nothing of how a request was parsed.
"""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from eprt.serve.anthropic.errors import error_document
from eprt.serve.errors import ApiError
from eprt.serve.openai.choice import Choice, Delta
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.usage import Usage
from eprt.serve.openai.writers import AnswerWriter, Part, event, told_of_experts

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}
# Clients hand thoughts back with a signature of who wrote them. Nobody signs them here, and none is asked for.
_SIGNATURE = "unsigned"


class MessageWriter(AnswerWriter):
    """Of one message."""

    def __init__(self, job: GenerationJob, logprobs: LogprobWriter):
        super().__init__(job, logprobs)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._num_blocks = 0
        self._open: str | None = None  # the type of the block that grows

    def document(self, parts: list[Part], usage: Usage) -> dict[str, Any]:
        ((choice, delta),) = parts
        content: list[dict[str, Any]] = []
        if delta.reasoning:
            content.append({"type": "thinking", "thinking": delta.reasoning, "signature": _SIGNATURE})
        if delta.text:
            content.append({"type": "text", "text": delta.text})
        for call in delta.calls:
            arguments = msgspec.json.decode(call.arguments)
            if not isinstance(arguments, dict):  # a model's call with a list, say; the API knows objects
                arguments = {"arguments": arguments}
            content.append({**self._tool_use(call.number, call.name), "input": arguments})
        return {**self._message(content, usage), **_end(choice), **told_of_experts(choice)}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.job.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _tool_use(self, number: int, name: str | None) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{self.job.request_id}_{number}", "name": name, "input": {}}

    # -- events --

    def first_events(self, usage: Callable[[], Usage]) -> bytes:
        return _event("message_start", message=self._message([], usage())) + _event("ping")

    def delta_events(self, choice: Choice, delta: Delta, usage: Callable[[], Usage]) -> bytes:
        data = b"".join(self._grow(delta))
        if delta.finish_reason is None:
            return data
        end = {"delta": _end(choice), "usage": _usage(usage()), **told_of_experts(choice)}
        return data + self._close() + _event("message_delta", **end)

    def last_events(self, usage: Callable[[], Usage]) -> bytes:
        return _event("message_stop")

    def error_events(self, error: ApiError) -> bytes:
        return event(error_document(error, self.job.request_id), "error")

    def _grow(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning:
            yield self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text:
            yield self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.text})
        for call in delta.calls:
            if call.name is not None:
                yield self._close()
                yield self._begin("tool_use", self._tool_use(call.number, call.name))
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """The event that begins a block, unless one of this kind is open."""
        if self._open == kind:
            return b""
        data = self._close()
        self._open = kind
        self._num_blocks += 1
        return data + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        data = self._delta({"type": "signature_delta", "signature": _SIGNATURE}) if self._open == "thinking" else b""
        self._open = None
        return data + _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _end(choice: Choice) -> dict[str, Any]:
    if choice.stop_string is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": _REASONS[choice.finish_reason or "stop"], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
