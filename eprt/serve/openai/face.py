"""Face: one API through which clients ask for text. All faces share one path: a GenerationJob, the ranks, an Answer.

OpenAI's two older endpoints are here. Knows nothing of HTTP.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eprt.engine.request import RequestLimits
from eprt.serve.errors import ApiError, quoted, unsupported
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.parsing import parse_chat, parse_completion
from eprt.serve.openai.prepare import Preparer
from eprt.serve.openai.writers import AnswerWriter, ChatWriter, CompletionWriter


class Face(ABC):
    """What one API says, and how. A request is whatever parse() returns."""

    endpoint: str  # for logs and metrics

    @abstractmethod
    def parse(self, body: bytes) -> Any:
        """The checked request. Raises ApiError."""

    @abstractmethod
    def prepare(self, preparer: Preparer, request: Any, request_id: str, limits: RequestLimits) -> GenerationJob:
        """What the ranks are to do. Raises ApiError."""

    @abstractmethod
    def writer(self, request: Any, job: GenerationJob, logprobs: LogprobWriter) -> AnswerWriter:
        """Of the answer to this job."""

    def error_body(self, error: ApiError, request_id: str) -> dict[str, Any]:
        """The document of an error that is sent with its own status."""
        return error.body()


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """In this block errors name a chat's fields: they get the names of the face's API instead."""
    try:
        yield
    except ApiError as error:
        error.param = names.get(error.param or "", error.param)
        raise


class CompletionFace(Face):
    """POST /v1/completions."""

    endpoint = "completions"

    def parse(self, body: bytes) -> Any:
        return parse_completion(body)

    def prepare(self, preparer: Preparer, request: Any, request_id: str, limits: RequestLimits) -> GenerationJob:
        return preparer.completion(request, request_id, limits)

    def writer(self, request: Any, job: GenerationJob, logprobs: LogprobWriter) -> AnswerWriter:
        return CompletionWriter(job, logprobs)


class ChatFace(Face):
    """POST /v1/chat/completions."""

    endpoint = "chat"

    def parse(self, body: bytes) -> Any:
        return parse_chat(body)

    def prepare(self, preparer: Preparer, request: Any, request_id: str, limits: RequestLimits) -> GenerationJob:
        return preparer.chat(request, request_id, limits)

    def writer(self, request: Any, job: GenerationJob, logprobs: LogprobWriter) -> AnswerWriter:
        return ChatWriter(job, logprobs)


def chat_fields(
    path: str,
    given: Mapping[str, Any],
    *,
    defaults: Mapping[str, tuple[Any, ...]],
    names: Mapping[str, str],
    own: Mapping[str, Callable[[Any], dict[str, Any]]],
    apart: Collection[str] = (),
) -> dict[str, Any]:
    """The fields of a chat that the fields of another API's request, POSTed to `path`, ask for.

    Args:
        defaults: fields that eprt does not serve, and the values that ask for nothing.
        names: what fields of chats are called in that API: the chats' own names are refused there.
        own: fields that chats lack, and the fields of a chat that a value of theirs makes.
        apart: fields that the caller sees to.
    """
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name in defaults:
            if value not in (*defaults[name], [], {}):
                only = f"; accepted only as {' or '.join(map(quoted, defaults[name]))}" if defaults[name] else ""
                raise unsupported(name, f"eprt does not support {name}={quoted(value)}{only}")
        elif name in names:
            raise unsupported(name, f"{path} has no {name}; use {names[name]}")
        elif name in own:
            fields |= own[name](value)
        elif name not in apart:
            fields[name] = value
    return fields
