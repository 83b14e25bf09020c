"""Flags of the server's HTTP side: address, keys, origins, TLS, bounds on connections; and their checks.

Knows nothing of models and ranks.
"""

import argparse
import re

from eprt.serve.options import OptionError, ServeOptions

_INF = float("inf")
_MB = 1 << 20
_ORIGIN = re.compile(r"https?://[^/\s*]+")


def add_http_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default=ServeOptions.host, help="address to listen on, default %(default)s")
    add("--port", type=int, default=ServeOptions.port, help="default %(default)s; 0 picks a free one")
    _add_keys(group)
    text = "origins whose web pages may call the server (CORS), such as https://chat.example.org; *: all; default: none"
    add("--allowed-origins", nargs="+", default=(), metavar="ORIGIN", help=text)
    add("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate (PEM, with its chain)")
    add("--ssl-keyfile", metavar="FILE", help="the certificate's private key, where it is not in the same file")
    text = "seconds that a connection may wait for its next request"
    add_number(group, "--keep-alive", "keep_alive_s", "S", text)
    text = "log no line per request; errors inside the server are still logged"
    add("--no-request-log", dest="request_log", action="store_false", help=text)
    add_number(group, "--max-body-mb", "max_body_bytes", "MB", "largest request body (2**20 bytes)", _MB)
    add_number(group, "--body-timeout", "body_timeout_s", "S", "seconds that a request body may take to arrive")
    text = "seconds that running requests get to finish when the server stops"
    add_number(group, "--drain-timeout", "drain_timeout_s", "S", text)


def _add_keys(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "require `Authorization: Bearer KEY`; `ps` shows this flag: prefer --api-key-file or EPRT_API_KEY"
    add("--api-key", metavar="KEY", help=text)
    add("--api-key-file", metavar="FILE", help="file of API keys, one per line")
    text = (
        "require this key for requests that change the server (POST and DELETE under /v1/eprt); default: "
        "EPRT_ADMIN_KEY; without one only processes of this host may send them"
    )
    add("--admin-key", metavar="KEY", help=text)
    add("--admin-key-file", metavar="FILE", help="file of admin keys, one per line")


def add_number(group: argparse._ArgumentGroup, flag: str, name: str, unit: str, text: str, scale: int = 1) -> None:
    """A flag of the ServeOptions field `name`, which is `scale` times what is given."""
    default, text = getattr(ServeOptions, name) / scale, f"{text}, default %(default)g"
    group.add_argument(flag, dest=name, type=float, default=default, metavar=unit, help=text)


def check_http(args: argparse.Namespace) -> None:
    """OptionError with one line that names the flag, the value and the remedy."""
    for flag, value in (
        ("--host", args.host),
        ("--api-key-file", args.api_key_file),
        ("--admin-key-file", args.admin_key_file),
        ("--ssl-certfile", args.ssl_certfile),
        ("--ssl-keyfile", args.ssl_keyfile),
    ):
        if value == "":  # an unset variable of a shell
            raise OptionError(f"{flag} is empty: give it a value or leave it out")
    for flag, value, ok, want in (
        ("--port", args.port, 0 <= args.port <= 65535, "in 0..65535"),
        ("--drain-timeout", args.drain_timeout_s, 0 <= args.drain_timeout_s < _INF, "finite and at least 0"),
        ("--body-timeout", args.body_timeout_s, 0 < args.body_timeout_s < _INF, "finite and above 0"),
        ("--keep-alive", args.keep_alive_s, 0 <= args.keep_alive_s < _INF, "finite and at least 0"),
        ("--max-body-mb", args.max_body_bytes, 0 < args.max_body_bytes < _INF, "finite and above 0"),
    ):
        if not ok:
            raise OptionError(f"{flag} {value}: must be {want}")
    for flag, key in (("--api-key", args.api_key), ("--admin-key", args.admin_key)):
        if key is not None and not (key.isascii() and key.isprintable() and key):
            raise OptionError(f"{flag}: must be printable ASCII, not empty")
    for origin in args.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise OptionError(f"--allowed-origins {origin}: must be *, or http:// or https:// with a host, and no path")
    if args.ssl_keyfile is not None and args.ssl_certfile is None:
        raise OptionError(f"--ssl-keyfile {args.ssl_keyfile}: needs --ssl-certfile")
