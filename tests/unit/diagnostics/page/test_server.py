"""What the page's server gives away and what it refuses, asked over sockets."""

import http.client
import ipaddress
import json
from pathlib import Path

import pytest
from eprt.diagnostics import WindowWriter
from eprt.diagnostics.mutes import mutes_beside
from eprt.diagnostics.page.server import PageServer

from tests.web.conftest import open_log, served, wait_until
from tests.web.logs import make_window, write_log


def ask(
    server: PageServer,
    path: str,
    method: str = "GET",
    host: str | None = None,
    body: bytes | None = None,
    **headers: str,
):
    """The path goes out as it stands, dots and all."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=100)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    reply = connection.getresponse()
    reply.data = reply.read()  # type: ignore[attr-defined]
    connection.close()
    return reply


def get(server: PageServer, path: str):
    reply = ask(server, path)
    assert reply.status == 200, (path, reply.status)
    return json.loads(reply.data)


# ---- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/../../pyproject.toml",
        "/js/../../__main__.py",
        "/%2e%2e/server.py",
        "/..%2fserver.py",
        "/js/%2e%2e%2f%2e%2e%2fserver.py",
        "//etc/passwd",
        "/..\\server.py",
        "/js",
        "/js/",
        "/web/index.html",
        "/index.html/",
        "/base.css%00.png",
        "/api",
        "/api/",
        "/api/windows",
        "/api/windows/",
        "/api/windows/99",
        "/api/windows/-1",
        "/api/windows/1e0",
        "/api/windows/all/",
        "/api/ranks/8",
        "/api/ranks/x",
        "/api/timeline/__class__",
        "/api/close",
        "/api/lock",
    ],
)
def test_only_its_own_files_and_entries(server_8, path):
    reply = ask(server_8, path)
    assert reply.status == 404 and len(reply.data) < 150
    assert json.loads(reply.data)["error"]["message"].startswith("no such")


def test_nothing_but_reading(server_8):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        reply = ask(server_8, "/api/overview", method, body=b"{}")
        assert reply.status == 405 and reply.headers["allow"] == "GET, HEAD"
    head = ask(server_8, "/", "HEAD")
    assert head.status == 200 and head.data == b"" and int(head.headers["content-length"]) > 1000


def test_a_change_comes_from_this_page_and_this_machine(tmp_path, monkeypatch):
    body = b'{"place": "column:5", "until": "12h"}'
    with served(open_log(write_log(tmp_path, 8, 6, 4))) as server:
        own = f"http://127.0.0.1:{server.server_port}"

        def post(**headers: str) -> int:
            return ask(
                server, "/api/mutes", "POST", body=body, **{"content_type": "application/json", **headers}
            ).status

        refused = [post(origin="https://evil.example"), post(origin="null"), post(host="evil.example")]
        assert refused == [403, 403, 403]
        assert post(content_type="text/plain") == 415, "what a foreign page may send unasked"
        assert ask(server, "/api/mutes", "POST", content_type="application/json").status == 413
        assert ask(server, "/api/mutes", "POST", body=b" " * 20_000, content_type="application/json").status == 413
        assert not (tmp_path / "mutes.json").exists()
        assert post(origin=own) == 200 and post() == 200
        monkeypatch.setattr(ipaddress.IPv4Address, "is_loopback", False)
        assert post(origin=own) == 403
    assert [mute.place for mute in mutes_beside(tmp_path)] == ["column:5"]


def test_foreign_names_are_refused(log_8):
    """DNS rebinding: a name of somebody else's that leads to this machine."""
    with served(open_log(log_8), allowed_hosts=("Mine.example",)) as server:
        for host in ("evil.example", "evil.example:8321", "localhost.evil.example", "[", ""):
            assert ask(server, "/", host=host or " ").status == 403, host
        # Any port: an SSH forwarding has its own.
        for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:80", "192.0.2.7:8321", "MINE.example:1"):
            assert ask(server, "/api/state", host=host).status == 200, host


def test_it_listens_on_this_machine_unless_told(log_8):
    with served(open_log(log_8)) as server:
        assert server.server_address[0] == "127.0.0.1" and server.url.startswith("http://127.0.0.1:")


def test_every_answer_carries_the_protecting_headers(server_8):
    for path in ("/", "/js/main.js", "/api/overview", "/nothing"):
        headers = ask(server_8, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


# ---- its files ------------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(server_8):
    html = ask(server_8, "/").data.decode()
    assert ask(server_8, "/index.html").data.decode() == html
    web = Path(__file__).parents[4] / "diagnostics" / "page" / "web"
    for path in sorted(p for p in web.rglob("*") if p.is_file()):
        reply = ask(server_8, f"/{path.relative_to(web)}")
        assert reply.status == 200 and reply.data == path.read_bytes(), path
        text = reply.data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, f"{path} reaches out"
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text, f"{path} puts text in as markup"
    assert ask(server_8, "/js/main.js").headers["content-type"] == "text/javascript; charset=utf-8"


# ---- its data -------------------------------------------------------------------------------------------------------


def test_data_come_as_the_page_gives_them(server_8):
    reply = ask(server_8, "/api/timeline/waits")
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.data == server_8.page.reply("api/timeline/waits").body
    assert get(server_8, "/api/ranks/0") == json.loads(server_8.page.reply("api/ranks/0").body)


def test_events_tell_of_new_windows(tmp_path):
    write_log(tmp_path, 4, 2, 4)
    with served(open_log(tmp_path)) as server:
        connection = http.client.HTTPConnection(*server.server_address[:2], timeout=100)
        connection.request("GET", "/api/events")
        stream = connection.getresponse()
        assert stream.headers["content-type"] == "text/event-stream"
        first = json.loads(stream.readline().removeprefix(b"data: "))
        assert first["windows"] == 2
        for record in make_window(2, 4, 4):
            WindowWriter(tmp_path).write(record)
        while True:
            line = stream.readline()
            if line.startswith(b"data: ") and json.loads(line.removeprefix(b"data: "))["windows"] == 3:
                break
        wait_until(lambda: get(server, "/api/overview")["findings"]["windows"] == 3, "a new analysis")
        assert ask(server, "/api/windows/2").data.startswith(b'{"window":2,')
        connection.close()


def test_an_address_that_is_taken_is_refused(server_8):
    with pytest.raises(OSError):
        PageServer(server_8.page, port=server_8.server_port)
