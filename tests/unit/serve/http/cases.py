"""Requests as Starlette has them, without a connection."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

from starlette.requests import Request

BODY = json.dumps({"prompt": "x" * 30_000}).encode()


def make_request(
    gone: bool = False,
    pieces: tuple[bytes, ...] = (BODY,),
    length: int | None = None,
    encoding: bytes | None = None,
    ends: bool = True,
) -> Request:
    """gone: its client has left by the time it is read. pieces: of its body, which may not be all. length: as told in
    the head."""
    messages = [
        {"type": "http.request", "body": piece, "more_body": i > 0 or not ends} for i, piece in enumerate(pieces[::-1])
    ]
    headers = [] if length is None else [(b"content-length", b"%d" % length)]
    headers += [] if encoding is None else [(b"content-encoding", encoding)]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        if not gone:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": headers, "eprt.request_id": "r", "eprt.key_tier": None}, receive)


def make_certificate(folder: Path, name: str, password: str | None = None) -> tuple[Path, Path]:
    """A certificate for this host's loopback address, signed by itself, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += [
        "-days",
        "2",
        "-subj",
        "/CN=eprt",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        str(certificate),
        "-keyout",
        str(key),
    ]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
