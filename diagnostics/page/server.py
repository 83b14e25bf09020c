"""PageServer: serves the page to this machine's browsers, with the standard library alone. Knows no data."""

import contextlib
import ipaddress
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from .page import EVENT_POLL_S, EVENTS, HEADERS, KEEP_ALIVE_S, MUTES, Page, Reply

DEFAULT_PORT = 8321
_MOST_BODY = 16_384  # bytes


class PageServer(ThreadingHTTPServer):
    """OSError when it cannot listen on the address. allowed_hosts: further names under which the page is served."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, page: Page, host: str = "127.0.0.1", port: int = DEFAULT_PORT, allowed_hosts: tuple = ()):
        self.page, self.closing = page, False
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._allowed_hosts = {"localhost", host.lower(), socket.gethostname().lower(), *map(str.lower, allowed_hosts)}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of the host's full name, which may hang without a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(str(host), str(host))
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def is_own_name(self, host_header: str) -> bool:
        """Whether a request's Host names this server. A foreign site that points its own name at this address (DNS
        rebinding) cannot read the page, as its requests carry that name. Any port: an SSH forwarding has its own."""
        try:
            name = urlsplit(f"//{host_header}").hostname or ""
            return name in self._allowed_hosts or bool(ipaddress.ip_address(name))
        except ValueError:  # not an address either
            return False

    def handle_error(self, request, client_address) -> None:
        """Nothing is printed: a browser may leave in the middle of an answer."""

    def shutdown(self) -> None:
        self.closing = True
        super().shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60
    server_version, sys_version = "eprt", ""

    def do_GET(self) -> None:
        if not self.server.is_own_name(self.headers.get("host", "")):
            message = "this address is not among the names the page is served under; --allow-host NAME adds one"
            self._refuse(403, message)
            return
        path = self._path()
        if path == EVENTS and self.command == "GET":
            self._send_events()
        else:
            self._send(self.server.page.reply(path))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        if self._path() != MUTES:
            self._refuse_method()
        elif why := self._why_foreign():
            self._refuse(403, why)
        elif self.headers.get_content_type() != "application/json":
            self._refuse(415, "the body must be application/json")
        elif not (length := self.headers.get("content-length", "")).isdecimal() or int(length) > _MOST_BODY:
            self._refuse(413, f"the body must have a content-length of at most {_MOST_BODY} bytes")
        else:
            self._send(self.server.page.change_mutes(self.rfile.read(int(length))))

    def _why_foreign(self) -> str:
        """Why a change is not taken from this client; empty: it is."""
        host = self.headers.get("host", "")
        if not self.server.is_own_name(host):
            return "this address is not among the names the page is served under; --allow-host NAME adds one"
        if self.headers.get("origin", f"http://{host}") != f"http://{host}":
            return "the request comes from another site's page"
        if not ipaddress.ip_address(self.client_address[0].partition("%")[0]).is_loopback:
            return "findings are muted from the machine that serves this page, or through an SSH forwarding"
        return ""

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/")

    def _refuse_method(self) -> None:
        self.close_connection = True  # its body was not read
        self._send(Reply(405, "text/plain; charset=utf-8", b"only GET and HEAD\n"), allow="GET, HEAD")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True
        self._send(Reply(status, "text/plain; charset=utf-8", f"{message}\n".encode()))

    def _send(self, reply: Reply, **more_headers: str) -> None:
        self.send_response(reply.status)
        length = str(len(reply.body))
        self._send_headers({"content-type": reply.media_type, "content-length": length, **more_headers})
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _send_headers(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)

    def end_headers(self) -> None:
        self._send_headers(HEADERS)
        super().end_headers()

    def _send_events(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self._send_headers({"content-type": "text/event-stream"})
        self.end_headers()
        sent, sent_s = b"", 0.0
        with contextlib.suppress(OSError):  # the browser left
            while not self.server.closing:
                event = self.server.page.event()
                if event != sent or time.monotonic() - sent_s > KEEP_ALIVE_S:
                    self.wfile.write(event if event != sent else b": nothing new\n\n")
                    self.wfile.flush()
                    sent, sent_s = event, time.monotonic()
                time.sleep(EVENT_POLL_S)

    def log_message(self, format: str, *args) -> None:
        """Nothing is printed: the user sees what the page loads."""
