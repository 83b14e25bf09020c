"""Parsing: the bytes of a body become a checked request, or an ApiError that names the field and its value.

No field is ignored: it is honoured, or accepted because its value asks for what happens anyway, or refused by name.
Knows nothing of tokens, of chat templates or of the model's limits (prepare.py).
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from eprt.serve.errors import ApiError, invalid, quoted, shortened, unsupported
from eprt.serve.openai import unserved
from eprt.serve.openai.protocol import ChatRequest, CompletionRequest
from eprt.serve.openai.unserved import Unserved

_OPTIONAL_OBJECTS = ("guided_choice", "response_format", "stream_options", "thinking", "tool_choice")
_LONGEST_REASON = 200  # characters of msgspec's words, which repeat the whole value of an enumeration
_NONE: Mapping[str, Unserved] = MappingProxyType({})

_Request = TypeVar("_Request", CompletionRequest, ChatRequest)
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _elsewhere(path: str, kind: type[msgspec.Struct], others: Mapping[str, Unserved]) -> dict[str, Unserved]:
    """The fields of an endpoint as another one takes them: with the values that ask for nothing."""
    why = f"it is a field of {path}"
    accepted = {field.name: unserved.NEUTRAL.get(field.name, ()) for field in msgspec.structs.fields(kind)}
    accepted |= {name: field.accepted for name, field in others.items()}
    return {name: Unserved(why, values) for name, values in accepted.items()}


_OF_CHATS = _elsewhere("/v1/chat/completions", ChatRequest, unserved.CHAT)
_OF_COMPLETIONS = _elsewhere("/v1/completions", CompletionRequest, unserved.COMPLETION)
_COMPLETION = {**_OF_CHATS, **unserved.COMPLETION}
_CHAT = {**_OF_COMPLETIONS, **unserved.CHAT}
OF_GENERATION = {**_OF_COMPLETIONS, **_OF_CHATS}  # for an endpoint that generates nothing


def parse_completion(body: bytes) -> CompletionRequest:
    return _parse(body, CompletionRequest, _COMPLETION)


def parse_chat(body: bytes) -> ChatRequest:
    return _parse(body, ChatRequest, _CHAT)


def chat_request(raw: Any) -> ChatRequest:
    """The same, of a body that another API's request was turned into."""
    request = parse_struct(_without_empty(raw), ChatRequest, _CHAT)
    request.check()
    return request


def _parse(body: bytes, kind: type[_Request], others: Mapping[str, Unserved]) -> _Request:
    """Raises ApiError 400 naming the field and its value."""
    request = parse_struct(_without_empty(decode_body(body)), kind, others)
    request.check()
    return request


def _without_empty(raw: Any) -> Any:
    """The body without those of its fields that, empty, ask for nothing, and yet have no such value."""
    if not isinstance(raw, dict):
        return raw
    return {name: value for name, value in raw.items() if value not in ([], {}) or name not in _OPTIONAL_OBJECTS}


def parse_struct(raw: Any, kind: type[_Struct], others: Mapping[str, Unserved] = _NONE) -> _Struct:
    """A body's JSON as a struct. Raises ApiError 400 naming the field and its value."""
    _require_object(raw)
    _refuse_unknown(raw, {field.name for field in msgspec.structs.fields(kind)}, others)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _as_api_error(error, raw) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def given_fields(body: bytes) -> dict[str, Any]:
    """The fields of an object's body whose values are not null. Raises ApiError 400."""
    return {name: value for name, value in _require_object(decode_body(body)).items() if value is not None}


def _require_object(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body must be a JSON object, not {quoted(raw)}", code="invalid_json")
    return raw


def decode_body(body: bytes) -> Any:
    """The body's JSON. ApiError 400, also for an object with the same key twice: JSON decoders drop one of them."""
    try:
        raw = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_refuse_repeated, parse_int=str, parse_float=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {_why_not_json(body, error)}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    return raw


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise invalid(shortened(twice), f"the body has {quoted(twice)} twice in one object; send it once")


def _why_not_json(body: bytes, error: Exception) -> str:
    """Better words than msgspec's, which calls a string with half a surrogate pair truncated, and of NaN names only the
    position. The standard library accepts both."""
    constants: list[str] = []
    try:
        json.dumps(json.loads(body, parse_constant=constants.append), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "a string has half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
    except (ValueError, RecursionError):
        return str(error)
    return f"JSON has no {constants[0]}" if constants else str(error)


def _refuse_unknown(raw: dict[str, Any], known: set[str], others: Mapping[str, Unserved]) -> None:
    for name, value in raw.items():
        if name in known:
            continue
        if name not in others:
            raise unsupported(shortened(name), f"unknown field {quoted(name)}")
        if not others[name].accepts(value):
            raise others[name].refusal(name, value)


def _as_api_error(error: msgspec.ValidationError, raw: Any) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`": adds the value, makes the path the parameter."""
    what, _, path = str(error).partition(" - at ")
    param = path.strip("`").removeprefix("$").removeprefix(".") or None
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(param, f"{param} is missing", code="missing_required_parameter")
    unknown = re.search(r"unknown field `(.*)`", what)
    if unknown:
        param = f"{param}.{unknown[1]}" if param else unknown[1]
        return unsupported(shortened(param), f"unknown field {quoted(param)}")
    found, value = _lookup(raw, param)
    shown = f" ({quoted(value)})" if found else ""
    what = shortened(what, _LONGEST_REASON)
    return invalid(param, f"{param}{shown}: {what[:1].lower()}{what[1:]}", code="invalid_type")


def _lookup(raw: Any, path: str | None) -> tuple[bool, Any]:
    """The value at msgspec's path "a.b[3].c"; False where a part of the path cannot be followed ("[...]")."""
    try:
        for name, index in re.findall(r"(\w+)|\[(\d+|\.\.\.)\]", path or ""):
            raw = raw[name] if name else raw[int(index)]
    except (KeyError, IndexError, TypeError, ValueError):
        return False, None
    return True, raw
