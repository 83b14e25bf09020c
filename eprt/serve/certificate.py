"""The server's certificate, tried before anything is started. Knows nothing of connections."""

import ssl
import time

from eprt.serve.errors import print_line
from eprt.serve.options import OptionError, ServeOptions

_SOON_S = 7 * 86400.0


def check_certificate(options: ServeOptions) -> None:
    """OptionError where HTTPS is wanted and the files do not make a certificate with its key."""
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None:
        return
    given = f"--ssl-certfile {certificate}" + ("" if key is None else f" --ssl-keyfile {key}")

    def no_password() -> bytes:
        raise OptionError(f"{given}: the key is encrypted; give one without a password")

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, no_password)
    except OptionError:
        raise
    except ssl.SSLError as error:
        why = {"KEY_VALUES_MISMATCH": "the key is another certificate's"}.get(error.reason or "", str(error))
        if key is None and error.reason is None:
            why = "is no certificate with its private key; --ssl-keyfile names the key's own file"
        raise OptionError(f"{given}: {why}") from None
    except OSError as error:
        raise OptionError(f"{given}: cannot be read: {error.strerror or error}") from None


def tell_refused_certificate(options: ServeOptions) -> None:
    """Says why clients will refuse the certificate, or that they soon will. The server starts all the same: a client
    may have been told to look away."""
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None:
        return
    given = f"eprt: --ssl-certfile {certificate}"
    try:
        left_s = ssl.cert_time_to_seconds(_end_of(certificate, key)) - time.time()
    except ssl.SSLCertVerificationError as error:
        print_line(f"{given}: clients will refuse it: {error.verify_message}; start the server with another one")
    else:
        if left_s < _SOON_S:
            print_line(f"{given}: expires in {left_s / 3600:.0f} hours; a new one needs a restart")


def _end_of(certificate: str, key: str | None) -> str:
    """When it expires, as seen by a client that trusts it: OpenSSL judges dates and purposes in a handshake, here
    between two ends in memory. SSLCertVerificationError as the client has it."""
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever has signed it
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = served.wrap_bio(to_server, to_client, server_side=True)
    client = trusting.wrap_bio(to_client, to_server)
    for end in (client, server, client):  # TLS 1.3: the client has verified after the server's one flight
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    subject = client.getpeercert()
    assert subject is not None
    return str(subject["notAfter"])
