"""Conversation: a chat request as the text that the model reads, or a refusal where the template would drop a part.

Templates print what their authors thought of, and drop the rest in silence: tools, their results, documents. Whoever
sends these expects the model to see them. Knows nothing of tokens.
"""

from typing import Any

import msgspec

from eprt.serve.errors import invalid, quoted, unsupported
from eprt.serve.openai.prompt_template import PromptTemplate, text_of
from eprt.serve.openai.protocol import ChatRequest, Message

_OTHER_TEMPLATE = "serve the checkpoint with a chat_template.jinja that does"
# Stands for a message's content, to see whether a template prints it.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}eprt\N{OBJECT REPLACEMENT CHARACTER}"


def render_conversation(template: PromptTemplate, request: ChatRequest, variables: dict[str, Any] | None) -> str:
    """variables: chat_template_kwargs, and whatever else the template is told. Raises ApiError."""
    messages, continues, opening = request.messages, request.continues_final, ""
    _check_extras(template, messages)
    adds_prompt = request.add_generation_prompt is not False and not continues
    if continues and not text_of(messages[-1]).strip():  # no text to find: white space behind a new message's beginning
        messages, continues, adds_prompt, opening = messages[:-1], False, True, text_of(messages[-1])
    tools = request.tools if request.uses_tools else None
    documents = {"documents": request.documents} if request.documents else {}

    def render(messages: list[Message], with_tools: bool = True, more: dict[str, Any] = documents) -> str:
        given = {**(variables or {}), **more} or None
        return template.render(
            messages, tools if with_tools else None, add_generation_prompt=adds_prompt, variables=given
        )

    text = render(messages)
    if tools and text == render(messages, with_tools=False):
        raise unsupported(
            "tools",
            "the model's chat template does not print tools, so the model would not know of them; describe them in a "
            f"system message, or {_OTHER_TEMPLATE}",
        )
    if documents and text == render(messages, more={}):
        raise unsupported(
            "documents",
            "the model's chat template does not print documents, so the model would not know of them; put them into a "
            f"message, or {_OTHER_TEMPLATE}",
        )
    _check_results(messages, text, render)
    return _cut_behind(text_of(messages[-1]), text) if continues else text + opening


def _check_extras(template: PromptTemplate, messages: list[Message]) -> None:
    """Roles and fields of messages that few models have."""
    for i, message in enumerate(messages):
        given = {"tools": message.tools, "task": message.task, "latest_reminder": message.role == "latest_reminder"}
        for name, value in given.items():
            if value and name not in template.message_extras:
                path = f"messages[{i}].{'role' if name == 'latest_reminder' else name}"
                raise unsupported(
                    path, f"{path}: {name} is of DeepSeek-V4's prompts; this model's have no place for it"
                )


def _check_results(messages: list[Message], text: str, render) -> None:
    """What tools have answered is in the text."""
    for i, message in enumerate(messages):
        if message.role != "tool" or text_of(message).strip() in text:
            continue
        marked = [*messages[:i], msgspec.structs.replace(message, content=_MARK), *messages[i + 1 :]]
        if render(marked) == text:
            raise unsupported(
                f"messages[{i}].role",
                f"messages[{i}] has role tool, which the model's chat template does not print, so the model would not "
                f"know of it; send it as a user's message, or {_OTHER_TEMPLATE}",
            )


def _cut_behind(content: str, text: str) -> str:
    """The text up to the end of the last message's content, with which the model goes on. Templates may trim it."""
    found = text.rfind(content.strip())
    if found < 0:
        what = f"continue_final_message: the chat template does not print the last message as it is ({quoted(content)})"
        raise invalid("continue_final_message", what)
    whole = content.lstrip()
    return text[: found + len(whole if text.startswith(whole, found) else content.strip())]
