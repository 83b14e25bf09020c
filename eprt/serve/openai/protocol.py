"""Request schemas: what a client may send to /v1/completions and /v1/chat/completions, and its SamplingParams.

Knows nothing of bytes (parsing.py), tokens, text or ranks.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import invalid, quoted, unsupported
from eprt.serve.openai.extended_fields import ExtendedFields, Int

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_MAX_STOPS = 16
# Fields that SamplingParams has too, with the same meaning.
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "n", "seed", "ignore_eos")
_SAMPLING_FIELDS += ("frequency_penalty", "presence_penalty", "repetition_penalty")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream reports in addition to its choices."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False  # eprt's events have no padding


class _Sampling(ExtendedFields, kw_only=True, frozen=True):
    """Fields of both endpoints. None is "not given", as in OpenAI's API."""

    model: str | None = None
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    n: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """max_tokens or its newer name; both may be given if they agree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid("max_tokens", f"max_tokens={old} and max_completion_tokens={new} differ; give one of them")
        return new if old is None else old

    def check(self) -> None:
        """Checks of values that msgspec and SamplingParams do not know. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only for stream=true")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            what = "include_obfuscation=true: eprt does not pad its events; accepted only as false"
            raise unsupported("stream_options.include_obfuscation", what)
        self.check_extended(self.n or 1, bool(self.stream))
        for text in self.stop_strings:
            if not text:
                raise invalid("stop", "stop has an empty string, which would end every answer before it begins")
        if len(self.stop_strings) > _MAX_STOPS:
            raise invalid("stop", f"stop has {len(self.stop_strings)} strings; at most {_MAX_STOPS}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling_params(
        self,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
        defaults: Mapping[str, Any] = NO_DEFAULTS,
    ) -> SamplingParams:
        """SamplingParams, with defaults or else OpenAI's for what is not given. Raises ApiError naming the field."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # "all" in other servers
            given["top_k"] = 0
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                stop=self.stop_strings,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                logit_bias=self._logit_bias(),
                **{**defaults, **given, **self.extended_params},
            )
        except ValueError as error:
            raise invalid(str(error).partition("=")[0], str(error)) from None

    def _logit_bias(self) -> dict[int, float]:
        biases = {}
        for key, bias in (self.logit_bias or {}).items():
            # "05" would be a second name of token 5.
            if not key.isascii() or not key.isdecimal() or len(key) > 18 or str(int(key)) != key:
                raise invalid("logit_bias", f"logit_bias has the key {quoted(key)}; keys are token ids")
            if type(bias) not in (int, float):
                what = f"logit_bias of token {key} is {quoted(bias)}; must be a number"
                raise invalid("logit_bias", what, code="invalid_type")
            if not -100 <= bias <= 100:
                raise invalid("logit_bias", f"logit_bias of token {key} is {quoted(bias)}; must be in -100..100")
            biases[int(key)] = float(bias)
        return biases


class CompletionRequest(_Sampling, kw_only=True, frozen=True):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.suffix and self.echo:
            raise invalid("echo", "echo is only for a prompt without suffix")

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many alternatives the ranks report for each token of the prompt; None: no report."""
        echoed = self.logprobs if self.echo else None
        return max((n for n in (echoed, self.prompt_logprobs) if n is not None), default=None)

    @property
    def num_prompts(self) -> int:
        """Found without looking at each prompt."""
        is_one = not isinstance(self.prompt, list) or type(next(iter(self.prompt), None)) is int
        return 1 if is_one else len(self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """One or many prompts, each text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or _is_token_ids(prompt):
            return [prompt]
        if not prompt:
            raise invalid("prompt", "prompt is an empty list; give at least one prompt")
        are_token_ids = type(prompt[0]) is int
        for i, item in enumerate(prompt):
            ok = _is_token_ids([item]) if are_token_ids else isinstance(item, str) or _is_token_ids(item)
            if not ok:
                want = "a prompt is a string, a list of token ids, or a list of these"
                raise invalid(f"prompt[{i}]", f"prompt[{i}] is {quoted(item)}; {want}", code="invalid_type")
        return prompt


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message. Fields other than text are known so that a refusal can name the part's type."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class FunctionCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call that an assistant's message carries."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: Int | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of reasoning_content
    prefix: bool | None = None  # DeepSeek's: the answer goes on with this message, the last one
    # Of DeepSeek-V4's prompts, with the role latest_reminder: tools that a developer's message brings, and a short
    # classification that is asked for instead of an answer.
    tools: "list[Tool] | None" = None
    task: Literal["action", "query", "authority", "domain", "title", "read_url"] | None = None
    # Clients send an answer of the API back as it was, with nulls in these fields.
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class ChatRequest(_Sampling, kw_only=True, frozen=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None  # the answer begins with the message that it continues
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None  # instead of the model's, where --trust-request-chat-template allows it
    chat_template_kwargs: dict[str, Any] | None = None
    # How to think: thinking.py.
    reasoning_effort: str | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # Names of vLLM and SGLang: whether to show the reasoning, and whether apart from the answer.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise invalid("messages", "messages is an empty list; give at least one message")
        for i, message in enumerate(self.messages):
            _check_message(f"messages[{i}]", message)
        self._check_final_message()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs is only for logprobs=true")
        if not 0 <= (self.top_logprobs or 0) <= 20:
            raise invalid("top_logprobs", f"top_logprobs={self.top_logprobs}: must be in 0..20")
        self._check_tool_choice()
        _check_thinking(self.thinking)

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none") or (choice == "auto" and not self.tools):  # SGLang's default
            return
        if not self.tools:
            raise invalid("tool_choice", "tool_choice is only for a request with tools")
        if choice in ("auto", "required"):
            return
        known = 'auto, none, required or {"type": "function", "function": {"name": ...}}'
        if not isinstance(choice, dict):
            raise invalid("tool_choice", f"tool_choice={quoted(choice)}: must be {known}")
        if choice.get("type", "function") != "function":
            raise unsupported("tool_choice.type", f"tool_choice.type={quoted(choice['type'])}: must be {known}")
        names = [tool.function.name for tool in self.tools]
        if self.named_tool not in names:
            raise invalid(
                "tool_choice.function.name",
                f"tool_choice names {quoted(self.named_tool)}; the tools are {', '.join(map(quoted, names))}",
            )

    @property
    def named_tool(self) -> str | None:
        """The only tool that may be called, and must be."""
        if not isinstance(self.tool_choice, dict):
            return None
        function = self.tool_choice.get("function")
        return function.get("name") if isinstance(function, dict) else None

    @property
    def continues_final(self) -> bool:
        """Whether the answer goes on with the last message."""
        return bool(self.continue_final_message or self.messages[-1].prefix)

    def _check_final_message(self) -> None:
        for i, message in enumerate(self.messages[:-1]):
            if message.prefix:
                raise invalid(f"messages[{i}].prefix", f"messages[{i}] has prefix, which only the last one may have")
        last, where = self.messages[-1], f"messages[{len(self.messages) - 1}]"
        if not self.continues_final:
            if self.echo:
                raise invalid("echo", "echo is only with continue_final_message: a new message has nothing to echo")
            return
        name = f"{where}.prefix" if last.prefix else "continue_final_message"
        if last.role != "assistant" or last.tool_calls:
            what = "has tool_calls" if last.tool_calls else f"has role {last.role}"
            raise invalid(name, f"{name}: only an assistant's text can be continued; the last message, {where}, {what}")
        if self.add_generation_prompt:
            what = (
                "continue_final_message and add_generation_prompt exclude each other: a message is continued or begun"
            )
            raise invalid("add_generation_prompt", what)

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _check_thinking(thinking: bool | dict[str, Any] | None) -> None:
    """DeepSeek's and Anthropic's {"type": "enabled"}."""
    if not isinstance(thinking, dict):
        return
    if thinking.get("type") not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", f"thinking={quoted(thinking)}: type must be enabled, disabled or adaptive")
    for name in thinking:
        if name != "type":
            raise unsupported(f"thinking.{name}", f"thinking has {quoted(name)}; eprt reads only its type")


def _check_message(path: str, message: Message) -> None:
    for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
        where = f"{path}.content[{j}]"
        if part.type != "text":
            raise unsupported(f"{where}.type", f"{where} has type {quoted(part.type)}; eprt reads text only")
        for name in ("image_url", "input_audio", "file", "refusal"):
            if getattr(part, name) is not None:
                raise unsupported(f"{where}.{name}", f"{where} is text and has {name} too")
        if part.text is None:
            raise invalid(f"{where}.text", f"{where} has no text")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(f"{path}.content", f"{path} has no content; only an assistant's tool call may lack it")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", f"{path} has tool_calls, which only an assistant's message may have")
    if message.annotations:
        raise unsupported(f"{path}.annotations", f"{path} has annotations, which eprt cannot show to the model")


def _is_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        return False
    return min(value) >= -(1 << 63) and max(value) < 1 << 63
