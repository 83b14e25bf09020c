"""The HTTP contract on a running server of four ranks: shapes, fields, errors, and the oracle of offline generation."""

import contextlib
import json
import math
import socket
import threading

import httpx
import openai
import pytest

from tests.serve.processes import PATIENCE_S, held, num_sequences, ranks_of, wait_until

GREEDY = {"temperature": 0}
SUM = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], **GREEDY}
# Lets the demo model go on for as long as it is asked to.
ENDLESS = {"prompt": "Tell me", "ignore_eos": True, **GREEDY}
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def complete(http, **fields) -> dict:
    response = http.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(http, path: str, body: dict) -> list[dict]:
    """The decoded events of a stream; asserts that it ends with [DONE]."""
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def refuse(http, path: str, body, status: int, code: str, param: str | None = None) -> dict:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(path, content=content)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), response.text
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


# -- with the openai SDK --


def test_sdk_chat(client):
    answer = client.chat.completions.create(model="demo", max_tokens=32, **SUM)
    choice = answer.choices[0]
    assert choice.message.content == "17 + 25 = 42" and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and answer.object == "chat.completion" and answer.model == "demo"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_sdk_chat_stream_with_usage(client):
    stream = client.chat.completions.create(model="demo", stream=True, stream_options={"include_usage": True}, **SUM)
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "17 + 25 = 42"
    assert [c.choices[0].delta.role for c in chunks if c.choices][:2] == ["assistant", None]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].choices == []
    # One token each, EOS included, like the same request without streaming.
    assert (
        chunks[-1].usage.completion_tokens
        == client.chat.completions.create(model="demo", **SUM).usage.completion_tokens
    )
    assert len({c.id for c in chunks}) == 1


def test_sdk_completions_prompts_and_n(client):
    answer = client.completions.create(model="demo", prompt=["Hello", [1, 2, 3]], n=2, max_tokens=4, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens <= 16 and answer.object == "text_completion"
    again = client.completions.create(model="demo", prompt=["Hello", [1, 2, 3]], n=2, max_tokens=4, seed=7)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    assert answer.choices[0].text != answer.choices[1].text or answer.choices[2].text != answer.choices[3].text


def test_sdk_tools_and_their_answer(client):
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, tools=WEATHER, tool_choice="auto", **GREEDY
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Oslo"}

    chunks = list(client.chat.completions.create(model="demo", messages=messages, tools=WEATHER, stream=True, **GREEDY))
    deltas = [c.choices[0].delta for c in chunks]
    (streamed,) = [t for d in deltas for t in d.tool_calls or ()]
    assert (streamed.index, streamed.function) == (0, call.function) or streamed.function.name == "get_weather"
    assert json.loads(streamed.function.arguments) == {"city": "Oslo"}
    assert not any(d.content for d in deltas) and chunks[-1].choices[0].finish_reason == "tool_calls"

    # The SDK's own message object goes back, with whatever nulls it carries.
    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 3, "sky": "cloudy"}'},
    ]
    final = client.chat.completions.create(model="demo", messages=messages, tools=WEATHER, **GREEDY)
    assert final.choices[0].message.content == "It is 3 degrees and cloudy in Oslo."

    none = client.chat.completions.create(
        model="demo", messages=messages[:1], tools=WEATHER, tool_choice="none", **GREEDY
    )
    assert none.choices[0].message.tool_calls is None and none.choices[0].message.content


def test_sdk_errors(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", **SUM)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="demo", prompt="x", temperature=5)
    assert wrong.value.param == "temperature" and "5" in wrong.value.message
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="demo", prompt="x", suffix="y")


def test_sdk_models(client):
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").owned_by == "eprt"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# -- text, tokens, log-probabilities --


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


# -- refusals --


def test_refusals(http):
    asks = refuse(
        http, "/v1/completions", {"prompt": "x", "max_tokens": 2050}, 400, "context_length_exceeded", "max_tokens"
    )
    assert "2048" in asks["message"] and "2050" in asks["message"]
    long = refuse(
        http,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "lime wolf " * 3000}]},
        400,
        "context_length_exceeded",
        "messages",
    )
    assert "2048" in long["message"]
    for body, param in [({"max_tokens": 5}, "prompt"), ({}, "prompt")]:
        refuse(http, "/v1/completions", {"prompt": [1] * 2060, **body}, 400, "context_length_exceeded", param)
    refuse(http, "/v1/completions", {"prompt": [1, 640]}, 400, "invalid_value", "prompt")
    refuse(http, "/v1/completions", {"prompt": [[1], [1, 640]]}, 400, "invalid_value", "prompt[1]")
    refuse(http, "/v1/completions", {"prompt": "x", "stop_token_ids": [640]}, 400, "invalid_value", "stop_token_ids")
    refuse(http, "/v1/completions", {"prompt": "x", "logit_bias": {"640": 1}}, 400, "invalid_value", "logit_bias")
    refuse(http, "/v1/completions", {"prompt": ["x"] * 97}, 400, "invalid_value", "prompt")
    refuse(http, "/v1/completions", {"prompt": "x", "foo": 1}, 400, "unsupported_parameter", "foo")
    refuse(http, "/v1/completions", {"max_tokens": 1}, 400, "missing_required_parameter", "prompt")
    refuse(
        http,
        "/v1/chat/completions",
        {**SUM, "chat_template_kwargs": {"messages": []}},
        400,
        "invalid_value",
        "chat_template_kwargs",
    )
    refuse(http, "/v1/completions", b"{]", 400, "invalid_json")
    refuse(http, "/v1/completions", b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413, "body_too_large")
    refuse(http, "/v1/completions", {"prompt": "x", "model": "other"}, 404, "model_not_found", "model")
    nothing = refuse(http, "/v1/nothing", {}, 404, "not_found")
    assert "nothing at POST /v1/nothing; there are /health, " in nothing["message"]
    assert "/v1/eprt/diagnose/page" in nothing["message"]
    refuse(http, "/v1/eprt/rebalance", {"dry_rum": True}, 400, "unsupported_parameter", "dry_rum")
    zipped = http.post("/v1/completions", content=b"{}", headers={"content-encoding": "gzip"})
    assert zipped.status_code == 415 and zipped.json()["error"]["code"] == "unsupported_encoding"
    wrong_method = http.get("/v1/completions")
    assert wrong_method.status_code == 405 and wrong_method.headers["allow"] == "POST"
    assert wrong_method.json()["error"]["code"] == "method_not_allowed"


def test_request_ids(http):
    given = http.post("/v1/chat/completions", json={**SUM, "max_tokens": 1}, headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1" and given.json()["id"] == "chatcmpl-abc-1"
    own = [
        http.get("/v1/models", headers={"x-request-id": bad}).headers["x-request-id"] for bad in ("", "a b", "x" * 200)
    ]
    assert len(set(own)) == 3 and all(len(request_id) == 32 for request_id in own)
    assert http.post("/v1/completions", content=b"{", headers={"x-request-id": "e-2"}).headers["x-request-id"] == "e-2"


def test_request_ids_and_users_are_in_the_log(http, server):
    http.post("/v1/completions", json={**ENDLESS, "max_tokens": 1, "user": "ada"}, headers={"x-request-id": "log-7"})
    # It comes through mpirun.
    (line,) = wait_until(lambda: [line for line in server.output().splitlines() if "[log-7]" in line], "the line")
    assert "completions length: prompt 4" in line and "user 'ada'" in line


def test_queue_limit(http, server):
    # 4 ranks of 16 running and 8 waiting. While a rank stands still, none of them ends.
    with held(ranks_of(server.url)[3]):
        body = {**ENDLESS, "max_tokens": 8, "n": 90}
        whole: list[httpx.Response] = []
        many = threading.Thread(target=lambda: whole.append(http.post("/v1/completions", json=body)))
        many.start()
        wait_until(lambda: num_sequences(server.url) == 90, "the sequences")
        full = http.post("/v1/completions", json={**ENDLESS, "n": 7})
        few: list[dict] = []
        last = threading.Thread(target=lambda: few.append(complete(http, max_tokens=1, n=6, **ENDLESS)))
        last.start()
        wait_until(lambda: num_sequences(server.url) == 96, "six more")
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["code"] == "queue_full" and full.json()["error"]["type"] == "rate_limit_error"
    for thread in (many, last):
        thread.join(PATIENCE_S)
    assert len(few[0]["choices"]) == 6 and len(whole[0].json()["choices"]) == 90
    wait_idle(http)


def is_idle(load: dict) -> bool:
    """Nothing runs, and the ranks, each of which tells its statistics by itself, have told of the same step: what was
    sent to experts has arrived there."""
    arrived = all(sum(layer["per_rank"]) == sum(layer["per_expert"]) for layer in load["layers"])
    return arrived and not any(r["num_running_now"] + r["num_waiting_now"] for r in load["ranks"])


def load_of(http) -> dict:
    return http.get("/v1/eprt/load").json()


def wait_idle(http) -> dict:
    """/v1/eprt/load once nothing runs; asserts that every KV page is free."""
    load = wait_until(lambda: load if is_idle(load := load_of(http)) else None, "idle ranks")
    assert [r["kv_pages_used_now"] for r in load["ranks"]] == [0] * len(load["ranks"])
    return load


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_pages(http, server, stream):
    wait_idle(http)
    pid = ranks_of(server.url)[3]
    body = json.dumps({**ENDLESS, "max_tokens": 1500, "stream": stream}).encode()
    generated = sum(r["num_generated_tokens"] for r in load_of(http)["ranks"])
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as standing:
        with socket.create_connection((host, int(port))) as sock:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            wait_until(lambda: any(r["num_running_now"] for r in load_of(http)["ranks"]), "the request")
            standing.enter_context(held(pid))
        wait_until(lambda: num_sequences(server.url) == 0, "the frontend to notice")
    ranks = wait_idle(http)["ranks"]
    assert sum(r["num_generated_tokens"] for r in ranks) - generated < 1500
    assert "Traceback" not in server.output()


# -- looking in from outside --


def test_load_placement_and_diagnosis(http, server):
    complete(http, max_tokens=8, **ENDLESS)

    def settled() -> dict | None:
        load = wait_idle(http)
        return load if sum(r["num_generated_tokens"] for r in load["ranks"]) >= 8 else None

    load = wait_until(settled, "eight tokens")
    assert load["schema"] == "eprt.load/1" and load["num_ranks"] == 4 and len(load["ranks"]) == 4
    assert [layer["layer"] for layer in load["layers"]] == [1, 2, 3]
    for layer in load["layers"]:
        assert len(layer["per_rank"]) == 4 and len(layer["per_expert"]) == load["num_experts"] == 32
        assert sum(layer["per_rank"]) == sum(layer["per_expert"]) > 0 and layer["skew"] >= 1
        # Every computed token goes to its top 4 experts.
        tokens = sum(r["num_prompt_tokens"] - r["num_cached_tokens"] + r["num_generated_tokens"] for r in load["ranks"])
        assert sum(layer["per_expert"]) <= 4 * tokens
    placement = http.get("/v1/eprt/placement").json()
    assert placement["epoch"] == 0 and placement["physical_to_logical_map"] == [list(range(32))] * 3
    findings = http.get("/v1/eprt/diagnose").json()
    assert findings["schema"] == "eprt.findings/1" and findings["num_ranks"] == 4
    assert isinstance(findings["findings"], list)


def read_metrics(http) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def tokens_to(values: dict[str, float], whom: str) -> float:
    """Choices of layer 1, counted where they were made (expert) or where they arrived (rank)."""
    if whom == "expert":
        return sum(values.get(f'eprt_expert_tokens_total{{expert="{e}",layer="1"}}', 0) for e in range(32))
    return sum(values.get(f'eprt_rank_expert_tokens_total{{layer="1",rank="{r}"}}', 0) for r in range(4))


def are_settled(values: dict[str, float]) -> bool:
    no_page = not any(values.get(f'eprt_kv_pages_used{{rank="{rank}"}}', 1) for rank in range(4))
    return no_page and 0 < tokens_to(values, "expert") == tokens_to(values, "rank")


def test_metrics(http):
    complete(http, max_tokens=4, **ENDLESS)
    http.post("/v1/completions", content=b"{")
    # Ranks tell their statistics each by itself, a moment after the answer.
    values = wait_until(lambda: values if are_settled(values := read_metrics(http)) else None, "their statistics")
    assert values["eprt_up"] == 1 and values["eprt_sequences"] == 0
    assert values['eprt_requests_total{endpoint="completions",outcome="length"}'] >= 1
    assert values['eprt_requests_total{endpoint="completions",outcome="invalid_json"}'] >= 1
    assert (
        values["eprt_time_to_first_token_seconds_count"] >= 1 and values["eprt_inter_token_latency_seconds_count"] >= 3
    )
    assert values["eprt_e2e_request_latency_seconds_count"] >= 1 and values["eprt_faults_total"] == 0
    per_rank = [values[f'eprt_generated_tokens_total{{rank="{rank}"}}'] for rank in range(4)]
    assert sum(per_rank) >= 4


def test_health(http):
    health = http.get("/health").json()
    assert health["status"] == "ok" and [r["rank"] for r in health["ranks"]] == [0, 1, 2, 3]
    assert len({r["pid"] for r in health["ranks"]}) == 4


def test_garbage_on_the_socket_does_no_harm(http, server):
    host, port = server.url.removeprefix("http://").split(":")
    for garbage in (
        b"\x00\xff" * 500,
        b"GET",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n{}",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass
    assert http.get("/health").status_code == 200


def test_a_body_that_never_ends_is_given_up(http, server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = sock.recv(65536)
        while b"body_timeout" not in answer and (more := sock.recv(65536)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 408 ") and b"1 bytes of the body came within 3 s" in answer
