"""A server over HTTPS with keys of its own: who gets in, from a page too, and what its log keeps."""

import ssl

import httpx
import psutil
import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL
from tests.serve.processes import PATIENCE_S, family
from tests.unit.serve.http.cases import make_certificate

ORIGIN = "https://chat.example.org"
HI = {"prompt": "Tell me", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The server, its certificate, and where it was told of it all: in a file of flags."""
    folder = tmp_path_factory.mktemp("guarded")
    certificate, key = make_certificate(folder, "server")
    (folder / "keys").write_text("first\nsecond\n")
    (folder / "latest").symlink_to(MODEL)
    (folder / "serve.yaml").write_text(
        f"allowed-origins: [{ORIGIN}]\napi-key-file: {folder}/keys\nno-request-log: true\nkeep-alive: 0.2\n"
        f"ssl-certfile: {certificate}\nssl-keyfile: {key}\n"
    )
    flags = ("--config", str(folder / "serve.yaml"))
    variables = {"EPRT_ADMIN_KEY": "root"}
    trusts = ssl.create_default_context(cafile=str(certificate))
    with (
        RunningServer(folder / "latest", 1, *flags, variables=variables) as server,
        # A connection for each request: an idle one is closed so soon that a request may be on its way just then.
        httpx.Client(
            base_url=server.url, verify=trusts, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0)
        ) as client,
    ):
        yield server, client
    assert server.process.returncode == 0


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_https_and_each_of_the_keys(guarded):
    server, client = guarded
    assert server.url.startswith("https://127.0.0.1:") and server.model == "latest"
    for key, status in (("first", 200), ("second", 200), ("root", 200), ("third", 401)):
        answer = client.post("/v1/completions", json=HI, headers=bearer(key))
        assert answer.status_code == status, (key, answer.text)
    health = client.get("/health")
    assert health.status_code == 200
    for rank in health.json()["ranks"]:
        assert rank["loaded"] and rank["bytes_read"] == rank["bytes_to_read"] > 10**5


def test_only_the_admin_key_changes_the_server(guarded):
    _, client = guarded
    for key, status, code in (("first", 403, "admin_key_required"), ("none", 401, "invalid_api_key")):
        refused = client.post("/v1/eprt/rebalance", json={}, headers=bearer(key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert client.post("/v1/eprt/ranks/0/retire", headers=bearer("root")).json()["error"]["code"] == "not_elastic"
    assert client.get("/v1/eprt/rebalance", headers=bearer("first")).status_code == 200


def test_pages_of_the_origin_may_call(guarded):
    _, client = guarded
    answer = client.get("/v1/models", headers={**bearer("first"), "origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert (
        "access-control-allow-origin" not in client.get("/v1/models", headers={"origin": "https://x.example"}).headers
    )


def test_neither_log_nor_list_of_processes_tells_keys_or_requests(guarded):
    server, client = guarded
    assert client.post("/v1/completions", json=HI, headers=bearer("first")).status_code == 200
    assert "completions length" not in server.output()
    listed = [word for process in family(psutil.Process(server.process.pid)) for word in process.cmdline()]
    assert listed and not {"root", "first", "second"} & set(listed)
