"""eprt balance replay."""

import json
import sys

import pytest
from eprt.balancer.__main__ import main

from tests.unit.balancer.commands.cases import CLUSTER, check_refused


def test_replay_prints_tables_json_and_plots(load, tmp_path, capsys):
    assert main(["replay", "--load", str(load), *CLUSTER, "--windows", "4", "--plots", str(tmp_path / "plots")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["policy", "max/mean"] and lines[0].split()[-1] == "traffic/token"
    assert [line.split()[0] for line in lines[1:]] == ["none", "eplb", "incremental", "affinity"]
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"balance.png", "gpu_load.png", "moves.png", "traffic.png", "report.html"}
    html = (tmp_path / "plots" / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 4 and "max/mean" in html
    assert main(["replay", "--load", str(load), *CLUSTER, "--policies", "none,aligned", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in document["policies"]] == ["none", "aligned"]
    assert len(document["policies"][0]["max_over_mean"]) == 5


def test_plots_without_matplotlib_say_what_to_install(load, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["replay", "--load", str(load), *CLUSTER, "--plots", str(tmp_path / "plots")]) == 2
    assert "pip install 'eprt[plots]'" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists(), "it says so before the work, not after it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*CLUSTER, "--policies", "magic"], "unknown policy 'magic'; known are none, eplb"),
        (["--num-gpus", "8", "--policies", "affinity"], "affinity needs routing traces"),
        ([*CLUSTER, "--windows", "0"], "--windows 0: must be at least 1"),
        ([*CLUSTER, "--memory", "0"], "--memory 0: must be at least 1"),
        ([*CLUSTER, "--every", "-2"], "--every -2: must be at least 1"),
        ([*CLUSTER, "--windows", "1"], "1 window: a replay needs two or more"),
        ([*CLUSTER, "--masked-gpus", "7"], "gpu_speed: EPLB does not support it; leave out the policy eplb"),
    ],
)
def test_what_cannot_be_replayed_is_named(load, tmp_path, capsys, words, message):
    check_refused(load, tmp_path, capsys, ["replay", *words], message)
