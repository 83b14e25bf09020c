"""A message's blocks and events: thoughts, text and uses of tools in the order in which they came."""

import json
from typing import Any

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.anthropic.writer import MessageWriter
from eprt.serve.errors import ApiError
from eprt.serve.openai.choice import Choice, Delta
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.tools import CallDelta
from eprt.serve.openai.usage import Usage

USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=2, reasoning_tokens=3)


def new_writer() -> tuple[MessageWriter, Choice]:
    job = GenerationJob("id", "m", "messages", [], SamplingParams())
    return MessageWriter(job, LogprobWriter(None)), Choice(0, [1], job, None)


def events(data: bytes) -> list[dict[str, Any]]:
    found = [dict(line.split(": ", 1) for line in part.splitlines()) for part in data.decode().split("\n\n")[:-1]]
    documents = [json.loads(one["data"]) for one in found]
    assert [one["event"] for one in found] == [document["type"] for document in documents]
    return documents


def test_a_document_has_its_blocks():
    writer, choice = new_writer()
    choice.finish_reason = "tool_calls"
    calls = [CallDelta(0, "f", '{"a": 1}'), CallDelta(1, "g", "null")]
    message = writer.document([(choice, Delta(reasoning="Hm", text="Yes", calls=calls))], USAGE)
    thoughts, text, first, second = message["content"]
    assert (thoughts["type"], thoughts["thinking"], text["text"]) == ("thinking", "Hm", "Yes")
    assert (first["name"], first["input"]) == ("f", {"a": 1}) and second["input"] == {"arguments": None}
    assert message["stop_reason"] == "tool_use"
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 2, 7)


def test_events_begin_and_end_each_block_once():
    writer, choice = new_writer()
    data = writer.first_events(lambda: USAGE)
    for delta in (
        Delta(is_first=True),
        Delta(reasoning="H"),
        Delta(reasoning="m", text="Ye"),
        Delta(text="s", calls=[CallDelta(0, "f", "{")]),
        Delta(calls=[CallDelta(0, None, "}"), CallDelta(1, "g", "{}")]),
    ):
        data += writer.delta_events(choice, delta, lambda: USAGE)
    choice.finish_reason = "tool_calls"
    data += writer.delta_events(choice, Delta(finish_reason="tool_calls"), lambda: USAGE)
    found = events(data + writer.last_events(lambda: USAGE))
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    started = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use", "tool_use"]
    stopped = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert stopped == [0, 1, 2, 3]
    pieces: dict[int, str] = {}
    for event in found:
        if event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            _, text = event["delta"].values()
            pieces[event["index"]] = pieces.get(event["index"], "") + text
    assert pieces == {0: "Hm", 1: "Yes", 2: "{}", 3: "{}"}
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_error_has_anthropics_shape():
    writer, _ = new_writer()
    (event,) = events(writer.error_events(ApiError(503, "later", code="full")))
    assert event["error"] == {"type": "overloaded_error", "message": "later"} and event["request_id"] == "id"


def test_a_message_that_was_computed_without_experts_says_so():
    for lacked in (False, True):
        writer, choice = new_writer()
        choice.finish_reason, choice.lacked_experts = "stop", lacked
        assert writer.document([(choice, Delta(text="Yes"))], USAGE).get("served_without_experts", False) == lacked
        writer, _ = new_writer()
        *_, end = events(writer.delta_events(choice, Delta(text="Yes", finish_reason="stop"), lambda: USAGE))
        assert end["type"] == "message_delta" and end.get("served_without_experts", False) == lacked
