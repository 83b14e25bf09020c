"""A certificate that cannot be served is told before anything starts."""

import re
from pathlib import Path
from typing import Any

import pytest

from eprt.serve.certificate import check_certificate, tell_refused_certificate
from eprt.serve.options import OptionError, ServeOptions
from tests.unit.serve.http.cases import make_certificate, make_expired_certificate


def options(certificate: Path | None, key: Path | None = None) -> ServeOptions:
    engine: Any = None
    paths = [None if path is None else str(path) for path in (certificate, key)]
    return ServeOptions(engine, "demo", ssl_certfile=paths[0], ssl_keyfile=paths[1])


def check(certificate: Path | None, key: Path | None = None) -> None:
    check_certificate(options(certificate, key))


def test_a_certificate_with_its_key_is_taken(tmp_path):
    certificate, key = make_certificate(tmp_path, "one")
    check(None)
    check(certificate, key)
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    check(both)


def test_what_cannot_be_served_is_named(tmp_path):
    certificate, _ = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "two")
    for files, why in (
        ((tmp_path / "none",), "cannot be read: No such file"),
        ((certificate,), "--ssl-keyfile names the key's own file"),
        ((certificate, other), "the key is another certificate's"),
        ((certificate, make_certificate(tmp_path, "three", password="x")[1]), "the key is encrypted"),
    ):
        with pytest.raises(OptionError, match=f"--ssl-certfile {re.escape(str(files[0]))}.*{why}") as caught:
            check(*files)
        assert "\n" not in str(caught.value)


def test_a_certificate_that_clients_refuse_is_told_and_served(tmp_path, capfd):
    good = make_certificate(tmp_path, "good", days=30)
    soon = make_certificate(tmp_path, "soon", days=2)
    expired = make_expired_certificate(tmp_path, "expired")
    of_clients = make_certificate(tmp_path, "of_clients", days=30, extensions=("extendedKeyUsage=clientAuth",))
    for (certificate, key), said in (
        (good, ""),
        (soon, "expires in 48 hours; a new one needs a restart"),
        (expired, "clients will refuse it: certificate has expired"),
        (of_clients, "clients will refuse it: unsuitable certificate purpose"),
    ):
        check(certificate, key)
        tell_refused_certificate(options(certificate, key))
        told = capfd.readouterr().err
        assert (said in told and f"--ssl-certfile {certificate}: " in told) if said else not told, told
    tell_refused_certificate(options(None))
    chain = tmp_path / "chain.pem"  # with its key in the same file
    chain.write_bytes(good[0].read_bytes() + good[1].read_bytes())
    tell_refused_certificate(options(chain))
    assert not capfd.readouterr().err
