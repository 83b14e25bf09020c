"""A server that answers as eprt's does, from records that a test gives it."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from eprt.diagnostics import Report

from tests.web.logs import make_window


class Speaker(BaseHTTPRequestHandler):
    """Answers /v1/eprt/diagnose as a server with the windows in `records` does."""

    records: list = []  # noqa: RUF012
    asked: list[str] = []  # noqa: RUF012
    refusal: dict[str, str] | None = None  # of every GET

    def do_GET(self):
        self.asked.append(self.path)
        if self.headers.get("authorization") != "Bearer secret":
            self.send_error(401)
            return
        if self.refusal is not None:
            data = json.dumps({"error": self.refusal}).encode()
            self.send_response(400)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
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

    def do_POST(self):
        """/v1/eprt/diagnose/mutes: "secret" is the admin key."""
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(f"{self.path} {fields['place']} {fields['until'] is None} {fields.get('note')}")
        allowed = self.headers.get("authorization") == "Bearer secret"
        reply = {"changed": True} if allowed else {"error": {"message": "it needs the admin key"}}
        data = json.dumps(reply).encode()
        self.send_response(200 if allowed else 403)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def speaker() -> Iterator[str]:
    Speaker.records = [record for window in range(3) for record in make_window(window, 8, 4)]
    Speaker.asked, Speaker.refusal = [], None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Speaker)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.05))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
