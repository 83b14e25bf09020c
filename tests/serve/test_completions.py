"""Text, tokens, log-probabilities and usage of a running server's answers, with and without streaming."""

import math

import pytest

from tests.serve.cases import ENDLESS, GREEDY, SUM, complete, events


def test_stop_strings_across_tokens(http):
    whole = complete(http, max_tokens=24, **ENDLESS)["choices"][0]["text"]
    for begin, end in ((3, 5), (7, 12), (1, 2)):
        stop = whole[begin:end]
        cut = whole[: whole.find(stop)]
        plain = complete(http, max_tokens=24, stop=["<never>", stop], **ENDLESS)["choices"][0]
        assert plain["text"] == cut and plain["finish_reason"] == "stop"
        pieces = [e["choices"][0] for e in events(http, "/v1/completions", {**ENDLESS, "max_tokens": 24, "stop": stop})]
        assert "".join(p["text"] for p in pieces) == cut and pieces[-1]["finish_reason"] == "stop"


def test_stop_token_ids_and_min_tokens(http):
    free = complete(http, max_tokens=12, return_token_ids=True, **ENDLESS)["choices"][0]
    assert free["finish_reason"] == "length" and len(free["token_ids"]) == 12
    stop_id = free["token_ids"][5]
    first = free["token_ids"].index(stop_id)
    stopped = complete(http, max_tokens=12, return_token_ids=True, stop_token_ids=[stop_id], **ENDLESS)["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["token_ids"] == free["token_ids"][: first + 1]
    assert free["text"].startswith(stopped["text"])


def test_token_ids_in_equal_text_in(http):
    by_text = complete(http, max_tokens=8, return_token_ids=True, **ENDLESS)["choices"][0]
    body = {**ENDLESS, "prompt": by_text["prompt_token_ids"]}
    assert complete(http, max_tokens=8, **body)["choices"][0]["text"] == by_text["text"]
    pieces = [
        e["choices"][0] for e in events(http, "/v1/completions", {**body, "max_tokens": 8, "return_token_ids": True})
    ]
    assert [t for p in pieces for t in p["token_ids"]] == by_text["token_ids"]
    assert pieces[0]["prompt_token_ids"] == by_text["prompt_token_ids"] and "prompt_token_ids" not in pieces[1]


def test_completion_logprobs(http):
    choice = complete(http, max_tokens=6, logprobs=3, **ENDLESS)["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 6
    for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"]):
        assert len(top) == 3 and top[token] == logprob == max(top.values())  # greedy: the best is chosen
        assert sum(map(math.exp, top.values())) <= 1 + 1e-6
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"]):
        assert choice["text"][offset:].startswith(token)
    none = complete(http, max_tokens=2, logprobs=0, **ENDLESS)["choices"][0]["logprobs"]
    assert [list(top) for top in none["top_logprobs"]] == [[t] for t in none["tokens"]]


def test_echo_with_prompt_logprobs_equals_generation(http):
    generated = complete(http, max_tokens=6, logprobs=1, return_token_ids=True, **ENDLESS)["choices"][0]
    ids = generated["prompt_token_ids"] + generated["token_ids"]
    scored = complete(http, prompt=ids, max_tokens=0, echo=True, logprobs=1, **GREEDY)["choices"][0]
    assert len(scored["logprobs"]["tokens"]) == len(ids) and scored["logprobs"]["token_logprobs"][0] is None
    assert scored["finish_reason"] == "length"
    for one, other in zip(scored["logprobs"]["token_logprobs"][-6:], generated["logprobs"]["token_logprobs"]):
        assert one == pytest.approx(other, abs=0.05)  # bf16: prefill and decode round differently
    echoed = complete(http, max_tokens=6, echo=True, logprobs=0, **ENDLESS)["choices"][0]
    assert echoed["text"] == "Tell me" + generated["text"]
    for offset, token in zip(echoed["logprobs"]["text_offset"], echoed["logprobs"]["tokens"]):
        assert echoed["text"][offset:].startswith(token) or token.startswith("<｜")
    streamed = events(http, "/v1/completions", {**ENDLESS, "max_tokens": 6, "echo": True})
    assert "".join(e["choices"][0]["text"] for e in streamed) == echoed["text"]


def test_chat_logprobs(client, http):
    answer = client.chat.completions.create(model="demo", logprobs=True, top_logprobs=2, **SUM)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens  # the ending EOS included
    assert "".join(entry.token for entry in content[:-1]) == "17 + 25 = 42"
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2 for entry in content)
    pieces = events(http, "/v1/chat/completions", {**SUM, "logprobs": True})
    streamed = [entry for e in pieces for entry in e["choices"][0]["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == [entry.token for entry in content]


def test_logit_bias_and_penalties_reach_the_sampler(http):
    ids = complete(http, max_tokens=4, return_token_ids=True, logit_bias={"37": 100}, **ENDLESS)["choices"][0][
        "token_ids"
    ]
    assert ids == [37] * 4
    ids = complete(
        http,
        max_tokens=4,
        return_token_ids=True,
        logit_bias={"37": 5, "38": 5},
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=2.0,
        **ENDLESS,
    )["choices"][0]["token_ids"]
    assert len(set(ids)) > 1


def test_seeds_make_samples_equal_and_default_ones_differ(http):
    def sample(**fields):
        return complete(http, prompt="Tell me", max_tokens=12, temperature=1.5, ignore_eos=True, **fields)["choices"]

    assert sample(seed=5)[0]["text"] == sample(seed=5)[0]["text"]
    assert len({c["text"] for c in sample(n=4)}) > 1 and sample()[0]["text"] != sample()[0]["text"]


def test_continuous_usage(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = events(http, "/v1/completions", {**ENDLESS, "max_tokens": 5, "stream_options": options})
    counts = [e["usage"]["completion_tokens"] for e in stream]
    assert counts[-1] == 5 and counts == sorted(counts) and stream[-1]["choices"] == []


def test_prefix_cache_shows_in_usage(http):
    body = {"prompt": "Repeat after me: " + "lime wolf " * 40, "max_tokens": 2, **GREEDY}
    complete(http, **body)
    usage = complete(http, **body)["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
