"""A source that asks a running server: it keeps up, asks only for what is new, and says when it cannot."""

import contextlib
import json
import socket
import threading

import pytest
from eprt.diagnostics import Report
from eprt.diagnostics.mutes import Mute, MuteChange
from eprt.diagnostics.page.recording import ReadOnlyError
from eprt.diagnostics.page.server_source import Client, ServerError, ServerSource

from tests.unit.diagnostics.speaker import Speaker
from tests.web.conftest import wait_until
from tests.web.logs import CALLS, make_window


@pytest.fixture
def source(speaker, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.page.server_source._POLL_S", 0.05)
    with contextlib.closing(ServerSource(Client(speaker, "secret"))) as opened:
        yield opened


def test_a_source_keeps_up_with_its_server(source):
    assert source.overview()["windows"]["window"] == [0, 1, 2] and source.overview()["live"]
    Speaker.records = [*Speaker.records, *make_window(3, 8, 4)]
    wait_until(lambda: source.overview()["findings"]["windows"] == 4, "the new window")
    record = make_window(3, 8, 4)[1]
    assert source.window(3).planes_PNN[0, 1].tolist() == [us / CALLS for us in record.dispatch_wait_us]
    assert source.experts(None)["experts"]["epoch"] == 1
    assert Speaker.asked[0].endswith("since=-1") and Speaker.asked[1].endswith("since=0"), "only what is new"


def test_a_server_that_goes_away_is_told_and_waited_for(source, monkeypatch):
    monkeypatch.setattr(source._client, "_api_key", "wrong")
    wait_until(lambda: "401" in source.overview()["trouble"], "the trouble")
    assert source.overview()["findings"]["findings"], "what was known stays"
    monkeypatch.setattr(source._client, "_api_key", "secret")
    wait_until(lambda: not source.overview()["trouble"], "the end of the trouble")


def test_a_server_with_other_ranks_is_another_server(source):
    Speaker.records = make_window(9, 4, 4)
    wait_until(lambda: "now has 4 ranks" in source.overview()["trouble"], "the trouble")
    assert source.overview()["num_ranks"] == 8


def test_nothing_but_the_server_is_asked(source):
    source.experts(None)
    assert all(path.startswith("/v1/eprt/diagnose?since=") for path in Speaker.asked)


def test_a_mute_goes_to_the_server(source, monkeypatch):
    assert "mutes by a file only" in source.why_read_only(), "as the server does not say that it can"
    mute = MuteChange("column:5", Mute("column:5", 2e9, "on order"))
    assert source.change_mutes(mute) and source.change_mutes(MuteChange("column:5", None))
    told = [asked for asked in Speaker.asked if "mutes" in asked]
    assert told == [f"/v1/eprt/diagnose/mutes column:5 {end}" for end in ("False on order", "True None")]
    monkeypatch.setattr(source._client, "_api_key", "wrong")
    with pytest.raises(ReadOnlyError, match="403 Forbidden: it needs the admin key"):
        source.change_mutes(mute)


# ---- the client -----------------------------------------------------------------------------------------------------


def test_the_client_reads_findings_and_windows(speaker):
    client = Client(speaker + "/v1/", "secret")
    expected = Report.of_records(Speaker.records).to_json()
    assert client.findings() == expected
    findings, records, problems = client.windows(0)
    assert findings == expected and problems == [] and [r.window for r in records] == [1] * 8 + [2] * 8


def test_a_server_of_several_instances_asks_for_instance(speaker):
    Speaker.refusal = {"message": "this server has several instances", "param": "instance"}
    with pytest.raises(
        ServerError, match="400 Bad Request: this server has several instances; here by --instance NAME"
    ):
        Client(speaker, "secret").findings()


def test_a_line_that_cannot_be_read_is_a_problem(monkeypatch):
    records = make_window(0, 8, 4)
    lines = [json.loads(one.to_line()) for one in records]
    lines[3]["compute_us"] = -1
    reply = {**Report.of_records(records).to_json(), "records": lines}
    monkeypatch.setattr(Client, "get", lambda self, path: dict(reply))
    _, known, problems = Client("http://x").windows(-1)
    assert len(known) == 7 and len(problems) == 1 and "compute_us=-1" in problems[0]


def test_a_server_that_does_not_send_its_windows_is_named(monkeypatch):
    monkeypatch.setattr(Client, "get", lambda self, path: {"schema": "eprt.findings/1"})
    with pytest.raises(ServerError, match="http://x does not send its windows; is it an older version"):
        Client("http://x").windows(-1)


def test_an_address_must_be_one():
    with pytest.raises(ServerError, match="--url somewhere:8000: must begin with http:// or https://"):
        Client("somewhere:8000")
    for url in ("http://[", "http://h:99999999", "http://h/a b", "http://"):
        with pytest.raises(ServerError, match=r"--url .*: must be the address of a server"):
            Client(url)
    with pytest.raises(ServerError, match="--api-key, EPRT_API_KEY: must be printable ASCII"):
        Client("http://h", "a\nb")


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000])
def test_what_answers_in_another_protocol_is_named(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.recv(65536)
                caller.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"{url}/v1/eprt/diagnose cannot be read: "):
            Client(url).findings()


@pytest.mark.parametrize("reply", [[], {}, {"changed": "no"}])
def test_a_reply_to_a_mute_that_says_nothing_is_named(reply, monkeypatch):
    client = Client("http://h")
    monkeypatch.setattr(client, "_ask", lambda request: reply)
    with pytest.raises(ServerError, match="it says nothing of changed"):
        client.change_mutes(MuteChange("job", None))
