"""What a client may send to /v1/completions and /v1/chat/completions, checked field by field.

Nothing is ignored: a field is honoured, or accepted because its value asks for what happens anyway, or refused by name.
Knows the JSON and its meaning as SamplingParams; nothing of tokens, text or ranks.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError, invalid, unsupported

# Without bounds an integer of a thousand digits would travel on.
Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Sampling(msgspec.Struct, kw_only=True, frozen=True):
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
    user: str | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """max_tokens or its newer name; both may be given if they agree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid("max_tokens", f"max_tokens={old} and max_completion_tokens={new} differ; give one of them")
        return new if old is None else old

    def check(self) -> None:
        """What no other place checks. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options is only for stream=true")
        for text in self.stop_strings:
            if not text:
                raise invalid("stop", "stop has an empty string, which would end every answer before it begins")
        if len(self.stop_strings) > _MAX_STOPS:
            raise invalid("stop", f"stop has {len(self.stop_strings)} strings; at most {_MAX_STOPS}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling_params(self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: bool = False):
        """SamplingParams with OpenAI's defaults for what is not given. Raises ApiError naming the field."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # -1 means "all" in other servers
            "min_p": self.min_p,
            "n": self.n,
            "seed": self.seed,
            "stop": self.stop_strings or None,
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "ignore_eos": self.ignore_eos,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self._logit_bias() or None,
        }
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                **{name: value for name, value in given.items() if value is not None},
            )
        except ValueError as error:
            raise invalid(str(error).partition("=")[0], str(error)) from None

    def _logit_bias(self) -> dict[int, float]:
        biases = {}
        for key, bias in (self.logit_bias or {}).items():
            # "05" would be a second name of token 5.
            if not key.isascii() or not key.isdecimal() or len(key) > 18 or str(int(key)) != key:
                raise invalid("logit_bias", f"logit_bias has the key {_show(key)}; keys are token ids")
            if type(bias) not in (int, float):
                what = f"logit_bias of token {key} is {_show(bias)}; must be a number"
                raise invalid("logit_bias", what, code="invalid_type")
            if not -100 <= bias <= 100:
                raise invalid("logit_bias", f"logit_bias of token {key} is {_show(bias)}; must be in -100..100")
            biases[int(key)] = float(bias)
        return biases


class CompletionRequest(_Sampling, kw_only=True, frozen=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Int | None = None
    best_of: Int | None = None

    @property
    def num_prompts(self) -> int:
        """Without a look at each."""
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
                raise invalid(
                    f"prompt[{i}]",
                    f"prompt[{i}] is {_show(item)}; a prompt is a string, a list of token ids, or a list of these",
                    code="invalid_type",
                )
        return prompt


class ContentPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """image_url and the like are known, so that the refusal names the part's type, which says more."""

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
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: Int | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """refusal, annotations, audio, function_call: clients send an answer of the API back as it was, with nulls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
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
    type: Literal["function"]
    function: FunctionSpec


class ChatRequest(_Sampling, kw_only=True, frozen=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise invalid("messages", "messages is an empty list; give at least one message")
        for i, message in enumerate(self.messages):
            _check_message(f"messages[{i}]", message)
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs is only for logprobs=true")
        if not 0 <= (self.top_logprobs or 0) <= 20:
            raise invalid("top_logprobs", f"top_logprobs={self.top_logprobs}: must be in 0..20")
        if self.tool_choice not in (None, "none", "auto"):
            raise unsupported("tool_choice", f"tool_choice={_show(self.tool_choice)}: eprt knows auto and none")
        if self.tool_choice == "auto" and not self.tools:
            raise invalid("tool_choice", "tool_choice is only for a request with tools")
        for i, tool in enumerate(self.tools or ()):
            if tool.function.strict:
                raise unsupported(
                    f"tools[{i}].function.strict", "strict=true: eprt does not force answers into a schema"
                )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _check_message(path: str, message: Message) -> None:
    for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type != "text":
            raise unsupported(
                f"{path}.content[{j}].type", f"{path}.content[{j}] has type {_show(part.type)}; eprt reads text only"
            )
        for name in ("image_url", "input_audio", "file", "refusal"):
            if getattr(part, name) is not None:
                raise unsupported(f"{path}.content[{j}].{name}", f"{path}.content[{j}] is text and has {name} too")
        if part.text is None:
            raise invalid(f"{path}.content[{j}].text", f"{path}.content[{j}] has no text")
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(f"{path}.content", f"{path} has no content; only an assistant's tool call may lack it")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{path}.tool_calls", f"{path} has tool_calls, which only an assistant's message may have")
    if message.annotations:
        raise unsupported(f"{path}.annotations", f"{path} has annotations, which eprt cannot show to the model")


_MAX_STOPS = 16

# Fields of OpenAI's schema that eprt does not serve, with the values that ask for nothing: those are accepted.
_COMPLETION_DEFAULTS: dict[str, tuple[Any, ...]] = {"suffix": ("",)}
_CHAT_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": (),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}

_Request = TypeVar("_Request", CompletionRequest, ChatRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    request = _parse(body, CompletionRequest, _COMPLETION_DEFAULTS)
    if request.best_of not in (None, request.n or 1):
        raise unsupported("best_of", f"best_of={request.best_of}: eprt returns all n={request.n or 1} it generates")
    return request


def parse_chat(body: bytes) -> ChatRequest:
    return _parse(body, ChatRequest, _CHAT_DEFAULTS)


def _parse(body: bytes, kind: type[_Request], defaults: Mapping[str, tuple[Any, ...]]) -> _Request:
    """Raises ApiError 400 naming the field and its value."""
    raw = decode_body(body)
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_show(raw)}", code="invalid_json")
    _refuse_unknown(raw, {field.name for field in msgspec.structs.fields(kind)}, defaults)
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _as_api_error(error, raw) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    request.check()
    return request


def decode_body(body: bytes) -> Any:
    """The body's JSON. ApiError 400, also for an object that has a key twice, of which JSON decoders drop one."""
    try:
        raw = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_refuse_repeated, parse_int=str, parse_float=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {_why_no_json(body, error)}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    return raw


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise invalid(_short(twice), f"the body has {_show(twice)} twice in one object; send it once")


def _why_no_json(body: bytes, error: Exception) -> str:
    """msgspec calls a string with half a surrogate pair truncated, and says of NaN only where it stands; the standard
    library lets both through."""
    constants: list[str] = []
    try:
        json.dumps(json.loads(body, parse_constant=constants.append), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a string has half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    except (ValueError, RecursionError):
        return str(error)
    return f"JSON has no {constants[0]}" if constants else str(error)


def _refuse_unknown(raw: dict[str, Any], known: set[str], defaults: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in raw.items():
        if name in known or (name in defaults and (value is None or value in defaults[name])):
            continue
        if name not in defaults:
            raise unsupported(_short(name), f"unknown field {_show(name)}")
        only = f"; accepted only as {' or '.join(map(_show, defaults[name]))}" if defaults[name] else ""
        use = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise unsupported(name, f"eprt does not support {name}={_show(value)}{only}{use}")


def _as_api_error(error: msgspec.ValidationError, raw: Any) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`": add the value, split off the path."""
    what, _, path = str(error).partition(" - at ")
    param = path.strip("`").removeprefix("$").removeprefix(".") or None
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(param, f"{param} is missing", code="missing_required_parameter")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        return unsupported(_short(param), f"unknown field {_show(param)}")
    found, value = _lookup(raw, param)
    shown = f" ({_show(value)})" if found else ""
    return invalid(param, f"{param}{shown}: {what[:1].lower()}{what[1:]}", code="invalid_type")


def _lookup(raw: Any, path: str | None) -> tuple[bool, Any]:
    """The value at msgspec's path "a.b[3].c"; False where the path has a part that cannot be followed ("[...]")."""
    try:
        for name, index in re.findall(r"(\w+)|\[(\d+|\.\.\.)\]", path or ""):
            raw = raw[name] if name else raw[int(index)]
    except (KeyError, IndexError, TypeError, ValueError):
        return False, None
    return True, raw


def _is_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        return False
    return min(value) >= -(1 << 63) and max(value) < 1 << 63


def _short(text: str, length: int = 64) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _show(value: Any) -> str:
    """The value as JSON, cut to a length that fits in a message."""
    return _short(msgspec.json.encode(value).decode(errors="replace"))
