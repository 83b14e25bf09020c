"""What clients and tools ask beside completions: tokens, version, ping, the model's card; who listens."""

import httpx
import openai
import psutil
import pytest

import eprt
from tests.serve.cases import SUM
from tests.serve.processes import listening


def test_tokens_of_a_prompt_and_of_a_chat(http, client):
    answer = http.post("/tokenize", json={"model": "demo", "prompt": "What is 17 + 25?", "return_token_strs": True})
    tokens = answer.json()
    assert answer.status_code == 200 and tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    completion = client.completions.create(model="demo", prompt="What is 17 + 25?", max_tokens=1)
    assert tokens["count"] == completion.usage.prompt_tokens
    chat = http.post("/tokenize", json={"messages": SUM["messages"]}).json()
    assert chat["count"] == client.chat.completions.create(model="demo", max_tokens=1, **SUM).usage.prompt_tokens
    back = http.post("/detokenize", json={"model": "demo", "tokens": tokens["tokens"]}).json()
    assert back["prompt"].endswith("What is 17 + 25?")  # behind the token that begins a text
    assert tokens["max_model_len"] == http.get("/v1/models/demo").json()["max_model_len"]


def test_a_long_text_is_counted_beside_running_requests(http):
    long = "What is 17 + 25? " * 5000
    answer = http.post("/tokenize", json={"prompt": long, "add_special_tokens": False}).json()
    assert answer["count"] > answer["max_model_len"]
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == long


def test_version_ping_and_the_root(http):
    assert http.get("/version").json() == {"version": eprt.__version__}
    for method in ("GET", "POST", "HEAD"):
        assert http.request(method, "/ping").status_code == 200
    assert "/v1/chat/completions" in http.get("/").json()["paths"]
    head = http.head("/")
    assert head.status_code == 200 and head.content == b""


def test_nothing_listens_but_the_http_port(http, server):
    """Four ranks, the frontend and the launcher: on one host they speak through sockets that no network reaches."""
    found = listening(psutil.Process(server.process.pid))
    assert set().union(*found.values()) == {"127.0.0.1"}, found


def test_the_models_card_says_how_long_a_request_may_be(http, client):
    card = http.get("/v1/models/demo").json()
    assert card == http.get("/v1/models").json()["data"][0] and card["max_model_len"] > 0
    assert card["root"].endswith("checkpoint") and card["parent"] is None
    assert client.models.retrieve("demo").id == "demo"


def test_what_eprt_lacks_is_refused_by_name(http, client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.embeddings.create(model="demo", input="x")
    assert refused.value.code == "unsupported_endpoint" and "/v1/embeddings" in refused.value.message
    for path in ("/v1/audio/transcriptions", "/rerank", "/v1/moderations"):
        error = http.post(path, json={}).json()["error"]
        assert error["code"] == "unsupported_endpoint" and error["type"] == "invalid_request_error"


def test_options_names_the_methods_of_a_path(http: httpx.Client):
    answer = http.options("/v1/chat/completions")
    assert answer.status_code == 204 and answer.headers["allow"] == "POST"
