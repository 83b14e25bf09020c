"""What a running server refuses, and how it names the reason: wrong fields, and bytes that are no request."""

import json
import socket

from tests.serve.cases import SUM
from tests.serve.processes import PATIENCE_S


def refuse(http, path: str, body, status: int, code: str, param: str | None = None) -> dict:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(path, content=content)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), response.text
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


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
