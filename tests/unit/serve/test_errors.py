"""Errors as clients and operators see them."""

import io
import json
import socket
import sys

from eprt.serve import errors


def test_one_rank_tells_what_all_find(capfd, monkeypatch):
    monkeypatch.setattr(errors, "RANK_0_REPORTS_FIRST_S", 0.0)
    for rank, told in ((None, "eprt x: no"), (0, "eprt x: no"), (2, f"eprt x: rank 2 on {socket.gethostname()}: no")):
        errors.report_mistake("eprt x", ValueError("no"), rank)
        assert capfd.readouterr().err == told + "\n"


class Writes(io.StringIO):
    """A stream that remembers each write."""

    def __init__(self):
        super().__init__()
        self.texts: list[str] = []

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)


def test_a_line_is_one_write(monkeypatch):
    """So that processes that share a terminal cannot write into each other's lines."""
    out, err = Writes(), Writes()
    monkeypatch.setattr(sys, "stderr", err)
    errors.print_line("eprt: rank 1 ended")
    errors.print_line("eprt serving", out)
    assert err.texts == ["eprt: rank 1 ended\n"] and out.texts == ["eprt serving\n"]


def test_a_message_does_not_repeat_all_that_a_client_sent():
    error = errors.invalid("mode", f"mode={'x' * 100_000!r}: must be off")
    assert len(error.message) == 2000 and error.body()["error"]["message"] == error.message == str(error)


def test_an_error_has_openais_shape():
    error = errors.invalid("n", "n=0: must be in 1..128")
    assert json.loads(error.json()) == {
        "error": {
            "message": "n=0: must be in 1..128",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    soon = errors.unavailable("soon", code="loading", retry_after_s=7)
    assert (soon.kind, soon.retry_after_s) == ("service_unavailable_error", 7)
    assert errors.ApiError(500, "a defect", code="internal_error").kind == "server_error"


def test_values_in_messages_are_json_and_short():
    assert errors.quoted({"a": [1, None]}) == '{"a":[1,null]}'
    assert len(errors.quoted("x" * 1000)) == 64 and errors.quoted("x" * 1000).endswith("...")
    assert errors.shortened("x" * 64) == "x" * 64
