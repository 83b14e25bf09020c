"""eprt balance compare."""

import json
import sys

import pytest
from eprt.balancer.__main__ import main

from tests.unit.balancer.commands.cases import CLUSTER, check_refused


def test_compare_prints_tables_and_plots(load, tmp_path, capsys):
    out = tmp_path / "mine.json"
    assert main(["plan", "--load", str(load), *CLUSTER, "--out", str(out)]) == 0
    assert main(["compare", "--load", str(load), *CLUSTER, str(out), "--plots", str(tmp_path / "plots")]) == 0
    rows = {line[:14].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    assert {"none", "eplb", "plan", "affinity 0", "affinity 0.2", "mine"} <= set(rows)
    assert rows["mine"][1:] == rows["plan"][1:]
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"balance.png", "gpu_load.png", "trade.png", "report.html"}


def test_compare_loses_no_placement_of_an_equal_name(load, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "plan.json", tmp_path / "mine.json", tmp_path / "other" / "mine.json"]
    for seed, path in enumerate(paths):
        assert main(["plan", "--load", str(load), *CLUSTER, "--seed", str(seed), "--out", str(path)]) == 0
    assert main(["compare", "--load", str(load), *CLUSTER, *map(str, paths), "--json"]) == 0
    names = [row["plan"] for row in json.loads(capsys.readouterr().out)["plans"]]
    assert {"plan", str(paths[0]), "mine", str(paths[2])} <= set(names) and len(names) == len(set(names))


def test_a_placement_of_another_model_is_named(load, tmp_path, capsys):
    message = r"other.json: \d+ layers of 16 experts, .*load.npz has \d+ of 32: a placement of another model"
    check_refused(load, tmp_path, capsys, ["compare", *CLUSTER, "OTHER"], message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*CLUSTER[2:], "--num-gpus", "4", "OTHER"], "other.json: a placement on 8 GPUs, --num-gpus is 4"),
        ([*CLUSTER, "--masked-gpus", "0,1,2,3,4,5,6,7"], "every GPU is masked: none is left to hold experts"),
        ([*CLUSTER, "--gpu-speed", "1"], "--gpu-speed has 1 numbers: must be one for each of 8 GPUs"),
        ([*CLUSTER, "--plots", "/dev/null"], "--plots /dev/null: must name a directory that can be written"),
        ([*CLUSTER, sys.executable], "not text in UTF-8; a placement is a JSON file"),
    ],
)
def test_what_cannot_be_compared_is_named(load, tmp_path, capsys, words, message):
    check_refused(load, tmp_path, capsys, ["compare", *words], message)
