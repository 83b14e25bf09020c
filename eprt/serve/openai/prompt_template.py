"""PromptTemplate: how a model wants its conversations written, whatever writes them.

A checkpoint has a Jinja template (chat.py), or its type has an encoding that is code (encodings/); templates.py finds
it. Knows nothing of tokens.
"""

import json
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from eprt.serve.openai.protocol import Message, Tool


class PromptTemplate(ABC):
    """Writes messages and tools as one text."""

    variables: frozenset[str]  # names that a request may set
    sources: tuple[str, ...] = ()  # its texts, in which the marks of calls and thoughts show
    tool_format: str | None = None  # of tools.py, where the template knows it; None: sources are looked at
    reasoning_format: str | None = None  # of reasoning.py, likewise
    message_extras: frozenset[str] = frozenset()  # roles and fields of messages, beyond OpenAI's, that it writes

    @abstractmethod
    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. variables: more names for the template (chat_template_kwargs). ApiError 400 when it refuses."""


def text_of(message: Message, between: str = "") -> str:
    """Its content as one text. between: its parts."""
    content = message.content or ""
    return content if isinstance(content, str) else between.join(part.text or "" for part in content)


def function_of(tool: Tool) -> dict[str, Any]:
    """What a model is told of a tool, in the order in which models were trained to read it."""
    return present(tool.function, "name", "description", "parameters")


def present(struct: msgspec.Struct, *names: str) -> dict[str, Any]:
    """Those of its fields that are not None."""
    return {name: value for name in names if (value := getattr(struct, name)) is not None}


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """As models were trained to read it: neither escaped for HTML nor with sorted keys, as Jinja's own filter does."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)
