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


def make_certificate(
    folder: Path, name: str, password: str | None = None, days: int = 2, extensions: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """A certificate for this host's loopback address, signed by itself, and its key."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", str(days), "-subj", "/CN=eprt", "-out", str(certificate), "-keyout", str(key)]
    for extension in ("subjectAltName=IP:127.0.0.1", *extensions):
        command += ["-addext", extension]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def make_expired_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """The same, whose only day was in 2020. `openssl req` makes none of the past."""
    certificate, key = make_certificate(folder, name)
    (folder / "index").touch()
    (folder / "ca.cnf").write_text(
        f"[ca]\ndefault_ca = own\n[own]\ndatabase = {folder}/index\nserial = {folder}/serial\n"
        f"new_certs_dir = {folder}\ndefault_md = sha256\n"
        "policy = any\nunique_subject = no\n[any]\ncommonName = supplied\n"
    )
    command = ["openssl", "ca", "-batch", "-notext", "-config", str(folder / "ca.cnf"), "-create_serial"]
    command += ["-ss_cert", str(certificate), "-cert", str(certificate), "-keyfile", str(key), "-out", str(certificate)]
    command += ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
