"""ChatTemplate: messages and tools to one prompt text, through the checkpoint's Jinja template.

The template is looked for where Hugging Face puts it: chat_template.jinja and additional_chat_templates/NAME.jinja,
chat_template.json, then "chat_template" of tokenizer_config.json (one text, or a list of named ones). Of named ones
"tool_use" serves requests with tools. A template is a file from the internet, so it runs in Jinja's immutable sandbox.
The text equals that of transformers (a test compares). Knows nothing of tokens.
"""

import json
from bisect import bisect_left
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import msgspec

from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError, invalid
from eprt.serve.openai.prompt_template import PromptTemplate, function_of, present, text_of, to_json
from eprt.serve.openai.protocol import Message, Tool

NAMED_TEMPLATES = "additional_chat_templates"


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)


class ChatTemplate(PromptTemplate):
    """One checkpoint's template, or several by name. special_tokens: name -> text, which templates may refer to."""

    def __init__(self, source: str | dict[str, str], special_tokens: dict[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = special_tokens
        sources = {"default": source} if isinstance(source, str) else source
        self.sources = tuple(sources.values())
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
            # names that a request may set
            self.variables = frozenset().union(
                *(jinja2.meta.find_undeclared_variables(environment.parse(text)) for text in self.sources)
            ) - {"messages", "tools", "add_generation_prompt", *special_tokens, *environment.globals}
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has an error in line {error.lineno}: {error}") from None

    @staticmethod
    def from_checkpoint(model_dir: str | Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The checkpoint's template; None when it has none."""
        model_dir = Path(model_dir)
        source: Any = tokenizer.config.get("chat_template")
        if (model_dir / "chat_template.json").is_file():
            source = json.loads((model_dir / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
        if (model_dir / "chat_template.jinja").is_file():
            source = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
        if isinstance(source, list):
            source = {item["name"]: item["template"] for item in source}
        named = sorted((model_dir / NAMED_TEMPLATES).glob("*.jinja"))
        if named:
            default = {"default": source} if isinstance(source, str) else source or {}
            source = {**default, **{path.stem: path.read_text(encoding="utf-8") for path in named}}
        return ChatTemplate(source, tokenizer.special_tokens) if source else None

    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: dict[str, Any] | None = None,
    ) -> str:
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default") or next(iter(self._templates.values()))
        context = {
            **self._special_tokens,
            "tools": [_tool(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        try:
            return _run(template, messages, context)
        except Exception as error:  # the checkpoint's program, run on a client's values
            if type(error) is jinja2.TemplateError:  # raise_exception: its author's words
                raise invalid("messages", f"the model's chat template refuses these messages: {error}") from None
            raise _no_place_for(template, messages, context, error) from None


def _run(template: jinja2.Template, messages: list[Message], context: dict[str, Any]) -> str:
    try:
        return template.render(messages=[_message(one, False) for one in messages], **context)
    except TypeError:
        # Most templates print a call's arguments with `| tojson` and need an object; DeepSeek's concatenate them with
        # other text and need a string.
        return template.render(messages=[_message(one, True) for one in messages], **context)


def _no_place_for(
    template: jinja2.Template, messages: list[Message], context: dict[str, Any], error: Exception
) -> ApiError:
    """Names the first message that the template cannot print: it computes with what such a message does not have."""

    def fails(num_messages: int) -> bool:
        try:
            _run(template, messages[:num_messages], context)
        except Exception:
            return True
        return False

    i = bisect_left(range(len(messages)), True, lo=1, key=fails) - 1
    message = messages[i]
    if message.role == "user":  # every template prints these: the fault is its own
        return invalid("messages", f"the model's chat template fails: {type(error).__name__}: {error}")
    what = "the tool calls of" if message.tool_calls else "a message of"
    return invalid(
        f"messages[{i}]",
        f"messages[{i}]: the model's chat template cannot print {what} role {message.role}; send it as a user's "
        "message, or serve the checkpoint with a chat_template.jinja that can",
    )


def _message(message: Message, arguments_as_text: bool) -> dict[str, Any]:
    """A plain dict, as templates expect it, without the fields that were not given."""
    content = None if message.content is None else text_of(message)
    # "developer" is OpenAI's newer name of "system"; templates know the old one.
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": content}
    result |= present(message, "name", "tool_call_id")
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call, arguments_as_text) for call in message.tool_calls]
    return result


def _tool_call(call, arguments_as_text: bool) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if not arguments_as_text:
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            pass  # the model once wrote something that is not JSON: render it as it was
    result = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return {"id": call.id, **result} if call.id is not None else result


def _tool(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": function_of(tool)}
