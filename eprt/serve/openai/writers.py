"""AnswerWriter: an answer as one document or as server-sent events, and the two kinds of OpenAI's older endpoints.

Knows nothing of how an answer is generated (answer.py) or of how a request was parsed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec

from eprt.serve.errors import ApiError
from eprt.serve.openai.choice import Choice, Delta
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.tools import CallDelta
from eprt.serve.openai.usage import Usage

_json = msgspec.json.Encoder()
# Of one choice: what it is, and what it gained since it was written before.
Part = tuple[Choice, Delta]


class AnswerWriter(ABC):
    """Writes one answer. An event method returns bytes, empty where it has nothing to say."""

    def __init__(self, job: GenerationJob, logprobs: LogprobWriter):
        self.job, self.logprobs = job, logprobs

    @abstractmethod
    def document(self, parts: list[Part], usage: Usage) -> dict[str, Any]:
        """The whole answer."""

    def first_events(self, usage: Callable[[], Usage]) -> bytes:
        """Sent before anything is generated."""
        return b""

    @abstractmethod
    def delta_events(self, choice: Choice, delta: Delta, usage: Callable[[], Usage]) -> bytes:
        """What a choice has gained."""

    @abstractmethod
    def last_events(self, usage: Callable[[], Usage]) -> bytes:
        """Sent when all choices have ended."""

    @abstractmethod
    def error_events(self, error: ApiError) -> bytes:
        """Sent in place of the rest: the status line went out before."""


class OpenAIWriter(AnswerWriter):
    """What /v1/completions and /v1/chat/completions have in common."""

    id_prefix: str
    document_kind: str
    chunk_kind: str

    def document(self, parts: list[Part], usage: Usage) -> dict[str, Any]:
        choices = [self.whole_choice(choice, delta) for choice, delta in parts]
        head = {**self._head(self.document_kind), **told_of_experts(*(choice for choice, _ in parts))}
        return {**head, "choices": choices, "usage": usage.document()}

    def delta_events(self, choice: Choice, delta: Delta, usage: Callable[[], Usage]) -> bytes:
        chunk = {**self._head(self.chunk_kind), "choices": [self.chunk_choice(choice, delta)]}
        if delta.finish_reason is not None:
            chunk |= told_of_experts(choice)
        if self.job.include_usage or self.job.continuous_usage:
            chunk["usage"] = usage().document() if self.job.continuous_usage else None
        return event(chunk)

    def last_events(self, usage: Callable[[], Usage]) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self.job.include_usage:
            return done
        return event({**self._head(self.chunk_kind), "choices": [], "usage": usage().document()}) + done

    def error_events(self, error: ApiError) -> bytes:
        return event(error.body()) + b"data: [DONE]\n\n"

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        num_top = self.job.prompt_logprobs
        if num_top is None:
            return {}
        return {"prompt_logprobs": self.logprobs.prompt(choice.prompt_token_ids, choice.prompt_logprobs, num_top)}

    @abstractmethod
    def whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One of the document's choices."""

    @abstractmethod
    def chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One of a chunk's choices."""

    def _head(self, kind: str) -> dict[str, Any]:
        job = self.job
        head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{job.request_id}",
            "object": kind,
            "created": job.created,
            "model": job.model,
        }
        if job.given_tier is not None:
            head["service_tier"] = job.given_tier
        return head

    def _choice(
        self, choice: Choice, delta: Delta, content: dict[str, Any], write_logprobs: Callable
    ) -> dict[str, Any]:
        """What all kinds have around their content."""
        wants_logprobs = self.job.params.logprobs is not None
        result = {
            "index": choice.index,
            **content,
            "logprobs": write_logprobs(delta.entries) if wants_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self.job.return_token_ids:
            if delta.is_first:
                result["prompt_token_ids"] = choice.prompt_token_ids
            result["token_ids"] = delta.token_ids
        return result


class CompletionWriter(OpenAIWriter):
    """/v1/completions."""

    id_prefix, document_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {**self.chunk_choice(choice, delta), **self._prompt_logprobs(choice)}

    def chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._choice(choice, delta, {"text": delta.text}, self.logprobs.completion)


class ChatWriter(OpenAIWriter):
    """/v1/chat/completions. Reasoning has DeepSeek's name and vLLM's newer one, which clients look for."""

    id_prefix, document_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def document(self, parts: list[Part], usage: Usage) -> dict[str, Any]:
        return {**super().document(parts, usage), **self._prompt_logprobs(parts[0][0])}

    def whole_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [self._tool_call(choice, call) for call in delta.calls]
        if self.job.formats.reasoning is not None:
            message |= self._reasoning(delta.reasoning or None)
        return self._choice(choice, delta, {"message": message}, self.logprobs.chat)

    def chunk_choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if delta.is_first else {}
        if delta.reasoning:
            message |= self._reasoning(delta.reasoning)
        if delta.text or (delta.is_first and not delta.calls and not delta.reasoning):
            message["content"] = delta.text
        if delta.calls:
            message["tool_calls"] = [self._tool_call_piece(choice, call) for call in delta.calls]
        return self._choice(choice, delta, {"delta": message}, self.logprobs.chat)

    def _reasoning(self, text: str | None) -> dict[str, Any]:
        return {"reasoning_content": text, "reasoning": text}

    def _tool_call(self, choice: Choice, call: CallDelta) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._call_id(choice, call), "type": "function", "function": function}

    def _tool_call_piece(self, choice: Choice, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.number, "function": {"arguments": call.arguments}}
        return {**self._tool_call(choice, call), "index": call.number}

    def _call_id(self, choice: Choice, call: CallDelta) -> str:
        return f"call_{self.job.request_id}_{choice.index}_{call.number}"


def told_of_experts(*choices: Choice) -> dict[str, bool]:
    """What an answer says where one of these was computed without experts that were lost; else nothing."""
    return {"served_without_experts": True} if any(choice.lacked_experts for choice in choices) else {}


def event(document: dict[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _json.encode(document) + b"\n\n"
