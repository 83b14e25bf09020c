"""The recipes of examples/deploy with a server: the systemd unit says when it serves and when it drains, and a pod's
probes see the same."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from eprt import env
from tests.serve.conftest import MODEL
from tests.serve.processes import PATIENCE_S, held, ranks_of, wait_until
from tests.unit.cases import ROOT

DEPLOY = ROOT / "examples" / "deploy"
KEY = {"authorization": "Bearer secret"}
LONG = {"prompt": "Tell me", "max_tokens": 300, "ignore_eos": True, "stream": True}


def unit_command(config: Path) -> list[str]:
    """ExecStart, with this installation's program and this file of flags."""
    (line,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "eprt.service").read_text(), re.M)
    program, *words = shlex.split(line)
    assert Path(program).name == "eprt"
    return [str(Path(sys.executable).with_name("eprt")), *(str(config) if "/" in word else word for word in words)]


def flag_file(folder: Path) -> Path:
    """serve.yaml, for the demo model on a free port of this host."""
    (folder / "keys").write_text("secret\n")
    flags = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    flags |= {"model": str(MODEL), "served-model-name": "demo", "ranks": 2, "host": "127.0.0.1", "port": 0}
    flags |= {"api-key-file": str(folder / "keys"), "drain-timeout": PATIENCE_S}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(flags))
    return path


def probes() -> dict[str, str]:
    """A pod's probe -> its path."""
    (deployment,) = [
        one
        for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "eprt.yaml").read_text())
        if one["kind"] == "Deployment"
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}


class Manager:
    """What systemd hears of a service of Type=notify."""

    def __init__(self, folder: Path):
        self.path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(PATIENCE_S)

    def next(self) -> dict[str, str]:
        lines = self._socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def service(tmp_path):
    manager = Manager(tmp_path)
    variables = {**env.without_mpi(), "NOTIFY_SOCKET": manager.path}
    variables.pop("HOME", None)  # systemd gives services none
    command = unit_command(flag_file(tmp_path))
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    yield manager, process
    manager.close()
    for _ in range(3):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)


def test_the_unit_serves_drains_and_says_so_to_systemd_and_to_probes(service):
    manager, process = service
    ready = manager.next()
    assert ready["READY"] == "1"
    url = re.fullmatch(r"serving demo on (http://127\.0\.0\.1:\d+), 2 ranks", ready["STATUS"])
    assert url is not None, ready
    with httpx.Client(base_url=url[1], timeout=PATIENCE_S) as http:

        def answers() -> dict[str, int]:
            return {name: http.get(path).status_code for name, path in probes().items()}  # without a key

        assert answers() == {"startup": 200, "readiness": 200, "liveness": 200}
        assert http.get("/v1/models").status_code == 401
        events: list[Any] = []
        begun = threading.Event()

        def ask() -> None:
            with httpx.stream("POST", f"{url[1]}/v1/completions", json=LONG, headers=KEY, timeout=PATIENCE_S) as stream:
                for line in stream.iter_lines():
                    events.append(line)
                    begun.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(PATIENCE_S)
        with held(ranks_of(url[1])[1]):  # the answer goes on when the probes have been asked
            process.send_signal(signal.SIGTERM)  # KillMode=mixed: the main process alone
            stopping = manager.next()
            assert stopping["STOPPING"] == "1" and "SIGTERM" in stopping["STATUS"]
            # Not ready, and yet alive: Kubernetes must not kill what finishes its answers.
            assert answers() == {"startup": 503, "readiness": 503, "liveness": 200}
        asking.join(PATIENCE_S)
    data = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
    wait_until(lambda: process.poll() is not None, "the server's end")
    assert process.returncode == 0
