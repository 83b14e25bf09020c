"""A response's items and events: reasoning, text and calls in the order in which they came."""

import json
from typing import Any

import pytest

from eprt.engine.sampling_params import SamplingParams
from eprt.serve.errors import ApiError
from eprt.serve.openai.choice import Choice, Delta
from eprt.serve.openai.job import GenerationJob
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.tools import CallDelta
from eprt.serve.openai.usage import Usage
from eprt.serve.responses.request import ResponseRequest
from eprt.serve.responses.store import ResponseStore
from eprt.serve.responses.writer import ResponseWriter

USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=2, reasoning_tokens=3)
DELTAS = [
    Delta(reasoning="Let me"),
    Delta(reasoning=" see", text="Yes"),
    Delta(text="."),
    Delta(calls=[CallDelta(0, "f", '{"a":')]),
    Delta(calls=[CallDelta(0, None, "1}"), CallDelta(1, "g", "{}")]),
    Delta(finish_reason="tool_calls"),
]


def new_writer(kept: ResponseStore, **fields: Any) -> tuple[ResponseWriter, Choice]:
    request = ResponseRequest.from_body(json.dumps({"input": "Hi", **fields}).encode())
    job = GenerationJob("id", "m", "responses", [], SamplingParams())
    return ResponseWriter(job, LogprobWriter(None), request, kept), Choice(0, [1], job, None)


def events(data: bytes) -> list[dict[str, Any]]:
    found = [dict(line.split(": ", 1) for line in part.splitlines()) for part in data.decode().split("\n\n")[:-1]]
    documents = [json.loads(one["data"]) for one in found]
    assert [one["event"] for one in found] == [document["type"] for document in documents]
    return documents


def stream(writer: ResponseWriter, choice: Choice, deltas: list[Delta], reason: str) -> list[dict[str, Any]]:
    data = writer.first_events(lambda: USAGE)
    for delta in deltas:
        choice.finish_reason = delta.finish_reason
        data += writer.delta_events(choice, delta, lambda: USAGE)
    choice.finish_reason = reason
    return events(data + writer.last_events(lambda: USAGE))


def test_the_items_are_the_deltas_put_together():
    found = stream(*new_writer(ResponseStore()), DELTAS, "tool_calls")
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    items = found[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
    assert items[1]["content"][0]["text"] == "Yes."
    assert [(item["name"], item["arguments"]) for item in items[2:]] == [("f", '{"a":1}'), ("g", "{}")]
    assert {item["status"] for item in items} == {"completed"} and len({item["id"] for item in items}) == 4
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == items and found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    for number, item in enumerate(items):
        deltas = [event for event in found if event.get("output_index") == number and "delta" in event]
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert "".join(event["delta"] for event in deltas) == text and {e["item_id"] for e in deltas} == {item["id"]}


def test_an_answer_that_is_kept_is_followed_with_all_that_was_said():
    store = ResponseStore()
    writer, choice = new_writer(store, store=True, metadata={"k": "v"})
    whole = Delta(reasoning="Hm", text="Yes", calls=[CallDelta(0, "f", "{}")])
    choice.finish_reason = "tool_calls"
    document = writer.document([(choice, whole)], USAGE)
    assert document["status"] == "completed" and document["metadata"] == {"k": "v"}
    user, assistant = store.messages(document["id"])
    assert user == {"role": "user", "content": "Hi"}
    assert (assistant["reasoning_content"], assistant["content"]) == ("Hm", "Yes")
    assert assistant["tool_calls"][0]["id"] == document["output"][2]["call_id"]


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer_of_no_words_is_an_empty_message(reason, status):
    found = stream(*new_writer(ResponseStore()), [Delta(finish_reason=reason)], reason)
    (item,) = found[-1]["response"]["output"]
    assert item["content"][0]["text"] == "" and item["status"] == found[-1]["response"]["status"] == status
    assert found[-1]["type"] == f"response.{status}"


def test_an_error_ends_a_stream_as_failed():
    writer, _ = new_writer(ResponseStore())
    (event,) = events(writer.error_events(ApiError(500, "rank 1 was lost", code="rank_lost")))
    assert event["response"]["status"] == "failed" and "rank 1 was lost" in event["response"]["error"]["message"]


def test_a_response_that_was_computed_without_experts_says_so():
    for lacked in (False, True):
        writer, choice = new_writer(ResponseStore())
        choice.lacked_experts = lacked
        *first, last = stream(writer, choice, [Delta(text="Yes"), Delta(finish_reason="stop")], "stop")
        assert last["response"].get("served_without_experts", False) == lacked
        assert not [event for event in first if "served_without_experts" in event.get("response", {})]
