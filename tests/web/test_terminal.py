"""`eprt diagnose` in a terminal: text with and without colours, a server's findings, exit statuses."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from eprt.diagnostics import Report
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.page.server_source import Client, ServerSource
from eprt.diagnostics.text import to_text, wants_colour

from tests.web.conftest import wait_until
from tests.web.logs import CALLS, LATE_RANK, make_window, write_log

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


# ---- text -----------------------------------------------------------------------------------------------------------


def test_text_says_the_findings_and_the_matrix(log_8, capsys):
    assert main([str(log_8), "--text"]) == 1
    text = capsys.readouterr().out
    assert "\x1b" not in text, "no terminal, no colours"
    assert "8 ranks, 6 windows" in text and f"column rank {LATE_RANK}" in text and "point rank 2 <- rank 6" in text
    assert text.count("\n  -> ") == 2, "each with its advice"
    records = [r for window in range(6) for r in make_window(window, 8, 4) if r.rank == 3]
    waits = [sum(r.dispatch_wait_us[j] + r.combine_wait_us[j] for r in records) / (6 * CALLS) for j in range(8)]
    (row,) = re.findall(r"^ +3  .*$", text, re.MULTILINE)
    expected = ["3", *(("." if j == 3 else f"{wait:.0f}") for j, wait in enumerate(waits))]
    assert row.replace("|", " ").split() == expected


def test_colours_change_nothing_but_the_colour(log_8, capsys):
    main([str(log_8), "--text"])
    plain = capsys.readouterr().out
    main([str(log_8), "--text", "--color", "always"])
    coloured = capsys.readouterr().out
    assert coloured.count("\x1b[38;5;") > 56
    stripped = COLOUR.sub("", coloured)
    assert stripped.startswith(plain.rstrip("\n")), "only the legend of the colours is more"


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    class Stream:
        def __init__(self, tty):
            self.isatty = lambda: tty

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert wants_colour(Stream(True)) and not wants_colour(Stream(False))
    assert wants_colour(Stream(False), "always") and not wants_colour(Stream(True), "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Stream(True)) and wants_colour(Stream(True), "always")
    monkeypatch.setenv("NO_COLOR", "")
    assert wants_colour(Stream(True)), "an empty NO_COLOR says nothing"
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Stream(True))


def test_many_ranks_fit_the_terminal(log_256, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main([str(log_256), "--text"]) == 1
    lines = capsys.readouterr().out.splitlines()
    matrix = [line for line in lines if re.match(r" *\d+ [ .:=+*#%@-]+$", line)]
    assert len(matrix) == 128 and max(map(len, lines)) <= 140
    assert matrix[0][6 + LATE_RANK // 2] not in ". ", "the late rank's column is seen"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_few_ranks(tmp_path, capsys, num_ranks):
    assert main([str(write_log(tmp_path, num_ranks, 3, num_ranks)), "--text"]) == 0
    text = capsys.readouterr().out
    assert ("nothing to compare" if num_ranks == 1 else "fewer than four ranks") in text


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either DIR or --url"),
        (["x", "--url", "http://y"], "either DIR or --url"),
        (["x", "--json", "--text"], "not allowed with"),
        (["x", "--port", "65536"], "0..65535"),
        (["x", "--windows", "5-3"], "5-3: must be A-B, A- or A"),
        (["x", "--windows", "-"], "-: must be A-B, A- or A"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("form", [[], ["--text"], ["--json"]])
def test_unreadable_input_is_status_2_in_every_form(tmp_path, capsys, form):
    assert main([str(tmp_path / "missing"), *form]) == 2
    assert main(["--url", "http://127.0.0.1:9", *form]) == 2
    assert main(["--url", "127.0.0.1:9", *form]) == 2
    errors = capsys.readouterr().err
    assert "missing" in errors and "127.0.0.1:9/v1/eprt/diagnose" in errors and "must begin with http://" in errors


def test_what_cannot_be_read_is_said_without_error_numbers(log_8, tmp_path, capsys):
    os.mkfifo(tmp_path / "diagnose_rank0.log")
    for arguments, message in (
        ([str(tmp_path / "missing")], f"{tmp_path / 'missing'}: No such file or directory"),
        ([str(tmp_path)], "diagnose_rank0.log is not a regular file"),
        ([str(log_8), "--windows", "999999-"], "has the windows 0 to "),
        ([str(log_8), "--run", "7"], "holds 1 run; there is no run 7"),
    ):
        assert main([*arguments, "--json"]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("eprt diagnose: ") and message in errors and "Errno" not in errors


@pytest.mark.parametrize("form", ["--text", "--json"])
def test_a_reader_that_has_enough_is_no_error(log_8, form):
    command = [sys.executable, "-m", "eprt.diagnostics", str(log_8), form]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait(60) == 1 and "Broken pipe" not in errors and "BrokenPipe" not in errors


def test_a_port_that_is_taken(log_8, server_8, capsys):
    port = server_8.server_port
    assert main([str(log_8), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_the_command_serves_the_page_until_it_is_interrupted(log_8):
    command = [sys.executable, "-m", "eprt.diagnostics", str(log_8), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert url and "ssh -L" in process.stdout.readline()
        with urllib.request.urlopen(url[0], timeout=20) as reply:
            assert b"<title>eprt diagnose</title>" in reply.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None and process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


# ---- a running server -----------------------------------------------------------------------------------------------


class _Speaker(BaseHTTPRequestHandler):
    """Answers /v1/eprt/diagnose as a server with the windows in `records` does."""

    records: list = []  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self.asked.append(self.path)
        if self.headers.get("authorization") != "Bearer secret":
            self.send_error(401)
            return
        body = Report.of_records(self.records).to_json()
        since = re.search(r"since=(-?\d+)", self.path)
        if since:
            body["records"] = [json.loads(r.to_line()) for r in self.records if r.window > int(since[1])]
        data = json.dumps(body).encode() if "diagnose" in self.path else b"[]"
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def speaker():
    _Speaker.records = [record for window in range(3) for record in make_window(window, 8, 4)]
    _Speaker.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Speaker)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.05))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_servers_findings(speaker, capsys):
    assert main(["--url", speaker, "--api-key", "secret", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == Report.of_records(_Speaker.records).to_json()
    assert main(["--url", speaker + "/v1/", "--api-key", "secret", "--text"]) == 1
    assert "point rank 2 <- rank 6" in capsys.readouterr().out
    assert main(["--url", speaker, "--json"]) == 2
    assert "401" in (error := capsys.readouterr().err) and "--api-key" in error


@pytest.mark.parametrize(
    "broken, named",
    [
        ({"num_ranks": None}, "num_ranks is null"),
        ({"windows": "3"}, 'windows is "3"'),
        ({"findings": {"rank": 1}}, "findings is"),
        ({"findings": ["slow"]}, 'findings[0].kind is "slow"'),
        ({"findings": [{"kind": "column", "rank": 1}]}, "findings[0].cause is null"),
        ({"schema": "eprt.findings/9"}, "schema"),
    ],
)
@pytest.mark.parametrize("form", ["--text", "--json"])
def test_an_answer_that_breaks_the_schema_is_named(monkeypatch, capsys, broken, named, form):
    whole = {**Report.of_records(make_window(0, 8, 4)).to_json(), "records": [], **broken}
    monkeypatch.setattr(Client, "get", lambda self, path: dict(whole))
    assert main(["--url", "http://somewhere", form]) == 2
    assert named in (error := capsys.readouterr().err) and "http://somewhere" in error and "Traceback" not in error


def test_a_source_keeps_up_with_its_server(speaker, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.page.server_source._POLL_S", 0.05)
    source = ServerSource(Client(speaker, "secret"))
    try:
        assert source.overview()["windows"]["window"] == [0, 1, 2] and source.overview()["live"]
        _Speaker.records = [*_Speaker.records, *make_window(3, 8, 4)]
        wait_until(lambda: source.overview()["findings"]["windows"] == 4, "the new window")
        record = make_window(3, 8, 4)[1]
        assert source.window(3).planes_PNN[0, 1].tolist() == [us / CALLS for us in record.dispatch_wait_us]
        assert source.experts(None)["experts"]["epoch"] == 1
        assert _Speaker.asked[0].endswith("since=-1") and _Speaker.asked[1].endswith("since=0"), "only what is new"
    finally:
        source.close()


def test_a_server_that_goes_away_is_told_and_waited_for(speaker, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.page.server_source._POLL_S", 0.05)
    source = ServerSource(Client(speaker, "secret"))
    try:
        monkeypatch.setattr(source._client, "_api_key", "wrong")
        wait_until(lambda: "401" in source.overview()["trouble"], "the trouble")
        assert source.overview()["findings"]["findings"], "what was known stays"
        monkeypatch.setattr(source._client, "_api_key", "secret")
        wait_until(lambda: not source.overview()["trouble"], "the end of the trouble")
    finally:
        source.close()


@pytest.mark.parametrize(("last", "words"), [(4, ", window 4, "), (6, ", windows 4..6, ")])
def test_the_windows_of_a_finding_are_counted(last, words):
    finding = {"kind": "column", "rank": 3, "src": None, "dst": None, "cause": "comp", "score": 9.0, "ratio": 4.0}
    more = {"first_window": 4, "last_window": last, "confidence": 1.0, "evidence": "e", "advice": "a"}
    text = to_text({"num_ranks": 8, "windows": 9, "findings": [{**finding, **more}]}, None, colour=False)
    assert words in text


def test_without_a_window_nothing_is_called_healthy():
    text = to_text({"num_ranks": 4, "windows": 0, "findings": []}, None, colour=False)
    assert "stands out" not in text and "one closes every few seconds while requests run" in text
