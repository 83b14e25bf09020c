"""The page of a running server: from the server itself and through `eprt diagnose --url`."""

import io
import json
import threading

import httpx
import numpy as np
import pytest
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.page.server_source import Client, ServerSource

from tests.serve.processes import PATIENCE_S, wait_until

PAGE = "/v1/eprt/diagnose/page/"


@pytest.fixture(scope="module")
def http(server):
    """While requests run, so that windows close."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        done = threading.Event()

        def keep_busy():
            while not done.is_set():
                body = {"prompt": "Tell me", "max_tokens": 64, "ignore_eos": True, "n": 4, "temperature": 1}
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            wait_until(lambda: client.get(f"{PAGE}api/overview").json()["windows"]["window"], "a closed window")
        finally:
            done.set()
            busy.join()
        yield client


def test_the_server_shows_its_page(http):
    redirect = http.get(PAGE.rstrip("/"))
    assert redirect.is_redirect and redirect.headers["location"] == "page/"
    html = http.get(PAGE)
    assert html.status_code == 200 and "<title>eprt diagnose</title>" in html.text
    assert "default-src 'none'" in html.headers["content-security-policy"]
    assert http.get(f"{PAGE}js/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("..%2f..%2f..%2f..%2fmetrics", "%2e%2e%2fpage.py", "js%2f..%2f..%2fpage.py", "api/windows/999999"):
        assert http.get(PAGE + path).status_code == 404, path


def test_its_figures_are_the_servers_records(http):
    overview = http.get(f"{PAGE}api/overview").json()
    records = http.get("/v1/eprt/diagnose?since=-1").json()["records"]
    assert overview["num_ranks"] == 4 and overview["live"] and overview["findings"]["schema"] == "eprt.findings/1"
    window = overview["windows"]["window"][-1]  # the records of the first one may be dropped by now
    head, _, rest = http.get(f"{PAGE}api/windows/{window}").content.partition(b"\n")
    assert json.loads(head)["planes"] == ["dispatch", "combine", "tokens"]
    dispatch_us_NN = np.frombuffer(rest, "<f4")[:16].reshape(4, 4)
    lines = [record for record in records if record["window"] == window]
    assert len(lines) == 4
    for line in lines:
        expected = np.array(line["dispatch_wait_us"]) / line["num_calls"]
        np.testing.assert_allclose(dispatch_us_NN[line["rank"]], expected, rtol=1e-5)


def test_experts_are_there(http):
    experts = http.get(f"{PAGE}api/experts/newest").json()["experts"]
    assert len(experts["layers"]) == 3 and sorted(set(experts["rank_of_slot"])) == [0, 1, 2, 3]
    tokens = experts["load"] or experts["rows"]
    assert sum(map(sum, tokens)) > 0
    refused = http.get(f"{PAGE}api/experts/newest?format=npz")
    assert refused.status_code == 400 and "/v1/eprt/load?format=npz" in refused.json()["error"]["message"]
    file = http.get("/v1/eprt/load?format=npz")
    assert file.status_code == 409 or np.load(io.BytesIO(file.content))["load"].shape[1] == 3


def test_events_follow_the_server(http):
    with http.stream("GET", f"{PAGE}api/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        first = next(line for line in stream.iter_lines() if line)
        assert json.loads(first.removeprefix("data: "))["windows"] >= 1


def test_the_command_reads_the_server(http, server, capsys):
    assert main(["--url", server.url, "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["num_ranks"] == 4
    assert main(["--url", server.url, "--text"]) in (0, 1)
    text = capsys.readouterr().out
    assert "4 ranks" in text and "us per call that a rank (row) waited for a rank (column)" in text
    source = ServerSource(Client(server.url))
    try:
        assert source.overview()["windows"]["window"] and source.experts(None)["experts"]["layers"]
    finally:
        source.close()
