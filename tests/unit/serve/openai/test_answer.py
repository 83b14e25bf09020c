"""An answer: one document or a stream of events, with usage, errors, and sequences that are ended when it ends."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from eprt.engine.outputs import TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.tokenizer import Tokenizer
from eprt.serve.errors import ApiError
from eprt.serve.openai.answer import Answer
from eprt.serve.openai.job import GenerationJob, Prompt, TextFormats
from eprt.serve.openai.logprobs import LogprobWriter
from eprt.serve.openai.reasoning import reasoning_format_named
from eprt.serve.openai.tools import tool_format_named
from eprt.serve.openai.writers import ChatWriter, CompletionWriter
from eprt.serve.ranks.generation import Generation
from tests.unit.engine.tokenizer_cases import save_tokenizer, train_byte_level

TEXT = "The quick brown fox"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_tokenizer(train_byte_level(), tmp_path_factory.mktemp("tokenizer"))


def job(**changes: Any) -> GenerationJob:
    given = {"endpoint": "chat", "prompts": [Prompt("hi", [1, 2, 3])], "params": SamplingParams(), **changes}
    return GenerationJob("id", "demo", created=7, **given)


def new_answer(job: GenerationJob, generation: Generation, tokenizer: Tokenizer) -> Answer:
    writer = ChatWriter if job.endpoint == "chat" else CompletionWriter
    return Answer(job, generation, tokenizer, writer(job, LogprobWriter(tokenizer)))


class Ranks:
    """What the ranks send for each sequence, and which sequences they were told to end."""

    def __init__(self, *texts: str, tokenizer: Tokenizer, finish_reason: str = "length"):
        self.ended: list[str] = []
        self.generation = Generation(lambda request_id, _reason: self.ended.append(request_id))
        self.generation.request_ids = [str(index) for index in range(len(texts))]
        for index, text in enumerate(texts):
            *first, last = tokenizer.encode(text)
            for token in first:
                self.generation.add_output(index, TokenOutput(str(index), token, -0.5, num_cached_tokens=2))
            self.generation.add_output(index, TokenOutput(str(index), last, -0.5, finish_reason=finish_reason))


def collect(answer: Answer) -> dict[str, Any]:
    return asyncio.run(answer.collect())


def events(answer: Answer) -> list[Any]:
    """The decoded events, without [DONE], which is the last."""

    async def read() -> bytes:
        return b"".join([data async for data in answer.events()])

    *lines, done = [line.removeprefix("data: ") for line in asyncio.run(read()).decode().split("\n\n")[:-1]]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_chat_is_one_document(tokenizer):
    ranks = Ranks(TEXT, tokenizer=tokenizer)
    answer = new_answer(job(), ranks.generation, tokenizer)
    document = collect(answer)
    assert (document["id"], document["object"], document["model"]) == ("chatcmpl-id", "chat.completion", "demo")
    (choice,) = document["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT} and choice["finish_reason"] == "length"
    num_tokens = len(tokenizer.encode(TEXT))
    assert document["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": num_tokens,
        "total_tokens": 3 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer.outcome == "length" and answer.first_token_s is not None and ranks.ended


def test_choices_are_by_prompt_then_by_sample_and_cached_tokens_count_once_per_prompt(tokenizer):
    prompts = [Prompt("a", [1]), Prompt(None, [2, 3])]
    ranks = Ranks("brown", "fox", "dog", "lazy", tokenizer=tokenizer)
    answer = new_answer(
        job(endpoint="completions", prompts=prompts, params=SamplingParams(n=2)), ranks.generation, tokenizer
    )
    document = collect(answer)
    assert [(c["index"], c["text"]) for c in document["choices"]] == list(enumerate(["brown", "fox", "dog", "lazy"]))
    assert document["usage"]["prompt_tokens"] == 3 and document["object"] == "text_completion"
    cached = [2 * (len(tokenizer.encode(text)) > 1) for text in ("brown", "dog")]
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(cached)


def test_a_stream_gives_the_same_text_in_pieces_and_usage_where_it_was_asked_for(tokenizer):
    asked = job(stream=True, include_usage=True, continuous_usage=True, return_token_ids=True)
    chunks = events(new_answer(asked, Ranks(TEXT, tokenizer=tokenizer).generation, tokenizer))
    *pieces, last = chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in pieces]
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert pieces[-1]["choices"][0]["finish_reason"] == "length" and last["choices"] == []
    assert pieces[-1]["usage"] == last["usage"]
    assert [t for chunk in pieces for t in chunk["choices"][0]["token_ids"]] == tokenizer.encode(TEXT)
    assert pieces[0]["choices"][0]["prompt_token_ids"] == [1, 2, 3]


def test_a_stream_without_usage_has_none(tokenizer):
    chunks = events(new_answer(job(stream=True), Ranks(TEXT, tokenizer=tokenizer).generation, tokenizer))
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_numbered_and_named(tokenizer, stream):
    calls = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>' for i in range(2))
    ranks = Ranks(f"Yes.{calls}!", tokenizer=tokenizer, finish_reason="stop")
    answer = new_answer(
        job(stream=stream, formats=TextFormats(tools=tool_format_named("hermes"))), ranks.generation, tokenizer
    )
    messages: Sequence[dict] = (
        [chunk["choices"][0]["delta"] for chunk in events(answer)]
        if stream
        else [collect(answer)["choices"][0]["message"]]
    )
    told = [call for message in messages for call in message.get("tool_calls", ()) if "id" in call]
    assert [(call["id"], call["function"]["name"]) for call in told] == [("call_id_0_0", "f0"), ("call_id_0_1", "f1")]
    assert [call.get("index") for call in told] == ([0, 1] if stream else [None, None])
    assert "".join(message.get("content") or "" for message in messages) == "Yes." and answer.outcome == "tool_calls"


def test_echo_begins_with_the_prompt_however_it_was_given(tokenizer):
    ids = tokenizer.encode("fox ")
    for prompt in (Prompt("fox ", ids), Prompt(None, ids)):
        ranks = Ranks("jumps", tokenizer=tokenizer)
        answer = new_answer(job(endpoint="completions", prompts=[prompt], echo=True), ranks.generation, tokenizer)
        assert collect(answer)["choices"][0]["text"] == "fox jumps"


def test_tokens_after_a_stop_string_are_dropped_and_the_sequence_is_ended(tokenizer):
    ranks = Ranks(TEXT, tokenizer=tokenizer)
    answer = new_answer(job(params=SamplingParams(stop=("quick",))), ranks.generation, tokenizer)
    (choice,) = collect(answer)["choices"]
    assert choice["message"]["content"] == "The " and choice["finish_reason"] == answer.outcome == "stop"
    assert set(ranks.ended) == {"0"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_rank_ends_the_answer_with_its_error(tokenizer, stream):
    generation = Generation(lambda request_id, _reason: None)
    generation.request_ids = ["0"]
    generation.add_output(0, TokenOutput("0", tokenizer.encode("fox")[0]))
    generation.fail(ApiError(500, "rank 1 was lost", code="rank_lost"))
    answer = new_answer(job(stream=stream), generation, tokenizer)
    if stream:
        assert events(answer)[-1]["error"]["code"] == "rank_lost"
    else:
        with pytest.raises(ApiError, match="rank 1 was lost"):
            collect(answer)
    assert answer.outcome == "rank_lost"


def test_a_defect_in_a_stream_is_an_event_and_in_the_log(tokenizer, monkeypatch, caplog):
    answer = new_answer(job(stream=True), Ranks(TEXT, tokenizer=tokenizer).generation, tokenizer)
    monkeypatch.setattr(answer.choices[0], "take_delta", lambda: {}["a defect"])
    (error,) = events(answer)
    assert error["error"]["code"] == answer.outcome == "internal_error"
    assert "a defect" in caplog.text and "[id]" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_fields_of_its_own_and_its_tokens_are_counted(tokenizer, stream):
    formats = TextFormats(reasoning=reasoning_format_named("deepseek_r1"), begins_inside=True)
    ranks = Ranks("The quick\n</think>\n\nbrown fox", tokenizer=tokenizer)
    answer = new_answer(job(stream=stream, include_usage=True, formats=formats), ranks.generation, tokenizer)
    if stream:
        *chunks, last = events(answer)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        kinds = [key for delta in deltas for key in delta if key in ("reasoning_content", "content") and delta[key]]
        assert kinds == sorted(kinds, reverse=True), "reasoning first"
        message = {
            name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")
        }
        usage = last["usage"]
    else:
        document = collect(answer)
        message, usage = document["choices"][0]["message"], document["usage"]
        assert message["reasoning"] == message["reasoning_content"]
    assert (message["reasoning_content"], message["content"]) == ("The quick", "brown fox")
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_reasoning < usage["completion_tokens"] == len(tokenizer.encode("The quick\n</think>\n\nbrown fox"))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("lacking", [(), (1,)])
def test_an_answer_that_was_computed_without_experts_says_so_once(tokenizer, endpoint, lacking):
    def ranks() -> Ranks:
        made = Ranks(TEXT, TEXT, tokenizer=tokenizer)
        made.generation._arrived = [
            (index, replace(output, lacked_experts=index in lacking)) for index, output in made.generation._arrived
        ]
        return made

    two = job(endpoint=endpoint, params=SamplingParams(n=2))
    document = collect(new_answer(two, ranks().generation, tokenizer))
    assert document.get("served_without_experts") == (True if lacking else None)
    told = [
        event for event in events(new_answer(two, ranks().generation, tokenizer)) if "served_without_experts" in event
    ]
    assert [chunk["choices"][0]["index"] for chunk in told] == list(lacking)
    assert all(chunk["choices"][0]["finish_reason"] == "length" for chunk in told)
