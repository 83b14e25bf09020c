"""The recipes of examples/deploy say what the server does: its flags, paths, ports, times and statuses."""

import copy
import importlib
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from eprt.serve import __main__ as program
from eprt.serve.flags import parse_options
from eprt.serve.http.entrance import OPEN_PATHS
from eprt.serve.options import ServeOptions
from eprt.serve.ranks import host_launch
from tests.unit.cases import MODEL, ROOT

DEPLOY = ROOT / "examples" / "deploy"
LEAVES_S = host_launch.LEAVE_S


def options_of(flags: dict[str, Any], folder: Path) -> ServeOptions:
    """The flags of a file, of which the paths of another host are replaced."""
    (folder / "keys").write_text("key\n")
    known = {**flags, "model": str(MODEL)}
    if "api-key-file" in known:
        known["api-key-file"] = str(folder / "keys")
    (folder / "serve.yaml").write_text(yaml.safe_dump(known))
    return parse_options(["--config", str(folder / "serve.yaml")])


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict]:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "eprt.yaml").read_text()))
    assert all({"apiVersion", "kind", "metadata"} <= set(each) for each in documents)
    return {each["kind"]: each for each in documents}


@pytest.fixture(scope="module")
def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "eprt.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def as_kubernetes_reads_it(manifest: dict) -> dict:
    """By the API's types, of which lightkube has a class each: fields that they lack are left out, a field that is
    missing or of another type raises."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    types = importlib.import_module(f"lightkube.models.{group.partition('.')[0] or 'core'}_{version}")
    return msgspec.convert(manifest, getattr(types, manifest["kind"])).to_dict()


def test_the_manifests_are_what_kubernetes_knows(manifests):
    for manifest in manifests.values():
        assert as_kubernetes_reads_it(manifest) == manifest
    manifests = copy.deepcopy(manifests)
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    container["livenesProbe"] = container.pop("livenessProbe")
    (read,) = as_kubernetes_reads_it(manifests["Deployment"])["spec"]["template"]["spec"]["containers"]
    assert container.keys() - read.keys() == {"livenesProbe"}
    container["ports"][0]["containerPort"] = "http"
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`, got `str` - at .*containers\[0\].ports\[0\]"):
        as_kubernetes_reads_it(manifests["Deployment"])
    del container["ports"], container["name"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `name`"):
        as_kubernetes_reads_it(manifests["Deployment"])


def test_a_pods_probes_ask_what_the_server_answers(manifests, tmp_path):
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = options_of(yaml.safe_load(manifests["ConfigMap"]["data"]["serve.yaml"]), tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": options.port} and options.host == "0.0.0.0"
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert all(probe["port"] == "http" and probe["path"] in OPEN_PATHS for probe in probes.values())
    assert probes["startup"]["path"] == probes["readiness"]["path"] == "/health" != probes["liveness"]["path"]
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind, path in (("Service", ("selector",)), ("Deployment", ("selector", "matchLabels"))):
        selector: Any = manifests[kind]["spec"]
        for step in path:
            selector = selector[step]
        assert selector.items() <= labels.items()


def test_a_pod_has_the_time_to_drain(manifests, tmp_path):
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    options = options_of(yaml.safe_load(manifests["ConfigMap"]["data"]["serve.yaml"]), tmp_path)
    waits_s = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > options.drain_timeout_s + LEAVES_S + waits_s
    assert pod["enableServiceLinks"] is False  # EPRT_SERVICE_HOST would be refused


def test_a_pods_mounts_and_secrets_are_there(manifests):
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {"/dev/shm", "/models", "/etc/eprt"} <= mounts
    assert container["args"] == ["--config", "/etc/eprt/serve.yaml"]
    assert {each["name"] for each in container["env"]} == {"EPRT_API_KEY", "EPRT_ADMIN_KEY"}


def test_the_unit_waits_to_be_told_that_the_model_is_loaded(unit):
    """tests/serve/test_deploy.py runs it."""
    assert (unit["Type"], unit["NotifyAccess"], unit["TimeoutStartSec"]) == (["notify"], ["all"], ["infinity"])


def test_the_unit_drains_and_does_not_start_again_after_a_mistake(unit, tmp_path):
    options = options_of(yaml.safe_load((DEPLOY / "serve.yaml").read_text()), tmp_path)
    assert int(unit["TimeoutStopSec"][0]) > options.drain_timeout_s + LEAVES_S
    assert unit["KillMode"] == ["mixed"] and unit["KillSignal"] == ["SIGTERM"]
    assert unit["RestartPreventExitStatus"] == ["2"] and program.main(["--model", "/nowhere"]) == 2
    assert shlex.split(unit["ExecStart"][0])[1:] == ["serve", "--config", "/etc/eprt/serve.yaml"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    (tmp_path / "eprt").write_text("#!/bin/sh\n")
    (tmp_path / "eprt").chmod(0o755)
    text = (DEPLOY / "eprt.service").read_text().replace("/opt/eprt/bin/eprt", str(tmp_path / "eprt"))
    (tmp_path / "eprt.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "eprt.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = [line for line in (done.stdout + done.stderr).splitlines() if "eprt.service" in line]
    assert not told, told


def test_the_image_serves_with_the_flags_that_follow_its_name(monkeypatch):
    text = (DEPLOY / "Containerfile").read_text()
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.M)
    words = json.loads(entry)
    assert words[:2] == ["eprt", "serve"]
    options = parse_options([*words[2:], "--model", str(MODEL), "-n", "4"])
    assert options.host == "0.0.0.0" and re.findall(r"^EXPOSE (\d+)$", text, re.M) == [str(options.port)]
    assert f"http://127.0.0.1:{options.port}/health" in text
    froms = re.findall(r"^FROM (\S+)", text, re.M)
    assert froms == ["${BASE}", "${BASE}"] and "USER 10001" in text
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (ROOT / source).exists()
