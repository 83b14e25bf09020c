"""`eprt chat`: what a person types and sees, in a real terminal, with a server that answers as told."""

import http.server
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from eprt import chat

KEY = "the key"


@pytest.mark.parametrize(
    "url", ["a b", "http://a\x01", "http://h/\n", "ftp://h", "http://", "é\x7f", "http://[::1", "h:99999"]
)
def test_what_is_no_address_is_one_line(url, capsys):
    assert chat.main([url]) == 2
    error = capsys.readouterr().err
    assert "must be the address of a server" in error and error.count("\n") == 1 and error[:-1].isprintable()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the number of messages; "slow" never ends, "fail" fails, "think" reasons first."""

    asked: list[dict[str, Any]]
    gone: threading.Event

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "small"}, {"id": "other"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        question = body["messages"][-1]["content"]
        if question == "fail":
            return self._reply(400, {"error": {"message": "temperature=9: must be in 0..2"}})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        if question == "think":
            self._send({"reasoning_content": "let me see"})
        try:
            for word in ("answer", " to", f" {len(body['messages'])}"):
                self._send({"content": word})
            while question == "slow":
                self._send({"content": "."})
                time.sleep(0.01)
        except OSError:
            return self.gone.set()
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, delta: dict[str, str]) -> None:
        self.wfile.write(b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n")

    def _reply(self, status: int, document: Any) -> None:
        if self.headers["authorization"] != f"Bearer {KEY}":
            status, document = 401, {"error": {"message": "wrong or missing API key"}}
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given) -> None: ...


@pytest.fixture
def server() -> Iterator[Any]:
    handler = type("Server", (Handler,), {"asked": [], "gone": threading.Event()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        handler.url = f"http://127.0.0.1:{listening.server_address[1]}"  # type: ignore[attr-defined]
        yield handler
        listening.shutdown()


class Terminal:
    """eprt chat at the other end of a terminal."""

    def __init__(self, *arguments: str):
        self._master, slave = pty.openpty()
        variables = {**os.environ, "EPRT_API_KEY": KEY, "TERM": "dumb", "INPUTRC": "/dev/null"}
        command = [sys.executable, "-m", "eprt.cli", "chat", *arguments]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=variables, start_new_session=True, preexec_fn=_own
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, until_then: str = "") -> None:
        """Something that comes behind all that was waited for before. until_then: is typed again and again."""
        end_s = time.monotonic() + 60
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < end_s, (pattern, self.seen)
            if not select.select([self._master], [], [], 0.5)[0]:
                self.type(until_then)
            else:
                try:
                    self.seen += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    time.sleep(0.05)
        self.seen = self.seen[found.end() :]

    def end(self) -> int:
        status = self.process.wait(200)
        os.close(self._master)
        return status


def _own() -> None:
    """The terminal becomes the process's own, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which what runs in the background of a shell ignores
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_a_conversation_in_a_terminal(server):
    terminal = Terminal(server.url, "--system", "be brief", "--set", "temperature=0.5")
    terminal.wait_for("small at http://127.0.0.1:.*/help lists commands")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("answer to 2")
    terminal.type("slow\n")
    terminal.wait_for(r"answer to 4\.\.\.")
    terminal.type("\x03")
    terminal.wait_for("ended")
    assert server.gone.wait(200)  # the server was told
    terminal.type("fail\n")
    terminal.wait_for("eprt chat: http.* answers 400: temperature=9: must be in 0..2")
    terminal.type("think\n")
    terminal.wait_for("let me see")
    terminal.wait_for("answer to 6")
    terminal.type("/undo\n/undo\n/set max_tokens 7\n/set temperature\n/retry\n")
    terminal.wait_for("answer to 2")
    terminal.type("/nothing\n")
    terminal.wait_for("no command /nothing; /help")
    terminal.wait_for("> ")
    # Python notices a Ctrl-C that comes between its prompt and its wait for keys with the next key.
    terminal.wait_for("Ctrl-D or /quit ends", until_then="\x03")
    terminal.wait_for("> ")  # the terminal forgets a Ctrl-D that comes before readline has taken it over
    terminal.type("\x04")
    assert terminal.end() == 0
    first, last = server.asked[0], server.asked[-1]
    assert first["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (first["model"], first["stream"], first["temperature"]) == ("small", True, 0.5)
    assert last["max_tokens"] == 7 and "temperature" not in last
    assert last["messages"] == first["messages"]


def test_without_a_terminal_lines_are_questions(server, tmp_path):
    saved = tmp_path / "saved.json"
    lines = f"one\n\ntwo\n/save {saved}\n/clear\nthree\n/load {saved}\nfour\n/load {tmp_path}/none\n"
    command = [sys.executable, "-m", "eprt.chat", server.url + "/v1", "--model", "other", "--api-key", KEY]
    code = "import sys; from eprt.chat import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *command[3:]],
        input=lines,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    answers = ["answer to 1", "answer to 3", "answer to 1", "answer to 5"]
    assert done.returncode == 0 and done.stdout.split("\n")[:4] == answers, done
    assert f"{tmp_path}/none: No such file or directory" in done.stdout and not done.stderr
    assert json.loads(saved.read_text())[2] == {"role": "user", "content": "two"}
    assert {body["model"] for body in server.asked} == {"other"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["http://127.0.0.1:1"], "http://127.0.0.1:1: Connection refused"),
        (["ftp://x"], "ftp://x: must be the address of a server"),
        (
            ["{url}", "--api-key", "wrong"],
            "answers 401: wrong or missing API key; --api-key or EPRT_API_KEY gives the key",
        ),
        (["{url}", "--model", "x", "--set", "temperature"], "--set temperature: must be NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_one_line(server, capsys, arguments, words):
    assert chat.main([each.replace("{url}", server.url) for each in arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("eprt chat: ") and words in told and told.count("\n") == 1


def test_what_no_conversation_can_hold_is_one_line(server, tmp_path):
    """Files and values nested without end, a home of nobody, an answer that is none: the conversation goes on."""
    (tmp_path / "deep.json").write_text("[" * 200_000)
    lines = [f"/load {tmp_path}/deep.json", "/save ~nobody-of-this-name/a", f"/set x {'[' * 200_000}", "hello"]
    command = [sys.executable, "-m", "eprt.cli", "chat", server.url, "--api-key", KEY]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line[-30:] for line in done.stdout.splitlines()[:2]] == [
        f"{tmp_path}/deep.json: nested too deeply"[-30:],
        "Could not determine home directory."[-30:],
    ]
    assert "x: nested too deeply" in done.stdout and "answer to 1" in done.stdout


def test_input_that_is_no_text_is_one_line(server):
    """As a locale other than C has it."""
    command = [sys.executable, "-m", "eprt.cli", "chat", server.url, "--api-key", KEY]
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"\xff\xfe\n", capture_output=True, env=variables, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.decode() == "eprt chat: standard input is not text in utf-8: invalid start byte\n"


@pytest.mark.parametrize("event", [3, "x", [], None, {"choices": 3}, {"choices": [4]}, {"error": "text"}])
def test_an_event_that_is_none_is_named(event):
    with pytest.raises(chat.ChatError, match="h: not an answer of an OpenAI-compatible server: "):
        assert chat._deltas_of(event, "h")
