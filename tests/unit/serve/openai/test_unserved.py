"""What is not served is refused by name unless it asks for nothing; and the page of the docs says the same."""

from pathlib import Path

import msgspec
import pytest

from eprt.serve.errors import ApiError, quoted
from eprt.serve.openai import unserved
from eprt.serve.openai.parsing import parse_chat, parse_completion
from eprt.serve.openai.protocol import ChatRequest, CompletionRequest

DOCS = Path(__file__).resolve().parents[4] / "docs" / "openai.md"
ENDPOINTS = (
    (parse_chat, ChatRequest, unserved.CHAT, {"messages": [{"role": "user", "content": "x"}]}),
    (parse_completion, CompletionRequest, unserved.COMPLETION, {"prompt": "x"}),
)


def names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("parse, kind, others, body", ENDPOINTS, ids=["chat", "completions"])
def test_neutral_values_are_taken_and_others_refused_by_name(parse, kind, others, body):
    assert not set(names(kind)) & set(others), "what is served is not listed"
    for name, field in others.items():
        for value in (None, [], {}, "", *field.accepted):
            parse(msgspec.json.encode({**body, name: value}))
        with pytest.raises(ApiError) as caught:
            parse(msgspec.json.encode({**body, name: "something"}))
        error = caught.value
        assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
        assert f'does not support {name}="something": {field.why}' in error.message
        assert all(quoted(value) in error.message for value in field.accepted)
    required = ("messages", "prompt")
    parse(msgspec.json.encode({**body, **{name: None for name in names(kind) if name not in required}}))


@pytest.mark.parametrize(("here", "there"), [ENDPOINTS, ENDPOINTS[::-1]], ids=["chat", "completions"])
def test_fields_of_the_other_endpoint_are_taken_where_they_ask_for_nothing(here, there):
    parse, kind, others, body = here
    elsewhere = [name for name in [*names(there[1]), *there[2]] if name not in (*names(kind), *others)]
    assert elsewhere
    for name in elsewhere:
        listed = there[2][name].accepted if name in there[2] else unserved.NEUTRAL.get(name, ())
        for value in (None, [], {}, "", *listed):
            parse(msgspec.json.encode({**body, name: value}))
        with pytest.raises(ApiError, match="it is a field of /v1/") as caught:
            parse(msgspec.json.encode({**body, name: "something"}))
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported_parameter", name)
    assert set(unserved.NEUTRAL) <= {*names(here[1]), *names(there[1])}


def test_one_is_not_true():
    assert not unserved.CHAT["store"].accepts(0) and unserved.CHAT["length_penalty"].accepts(1)


def cell(name: str, kind: type[msgspec.Struct], others) -> str:
    if name in names(kind):
        return "yes"
    if name not in others:
        return "–"
    return "only " + (" or ".join(f"`{quoted(value)}`" for value in others[name].accepted) or "empty")


def test_the_docs_have_every_field_and_what_becomes_of_it():
    rows = [line.split(" | ") for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    found = {row[0].strip("| `"): tuple(row[1:3]) for row in rows if len(row) >= 4}
    known = {name for _, kind, others, _ in ENDPOINTS for name in [*names(kind), *others]}
    assert sorted(found) == sorted(known)
    for name, cells in found.items():
        assert cells == tuple(cell(name, kind, others) for _, kind, others, _ in ENDPOINTS), name
