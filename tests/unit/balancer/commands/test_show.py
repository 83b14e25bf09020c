"""eprt balance show."""

import numpy as np
from eprt.balancer import plan
from eprt.balancer.__main__ import main


def test_show(load, tmp_path, capsys):
    assert main(["show", str(load)]) == 0
    text = capsys.readouterr().out
    assert "6 windows, 2 layers, 32 experts" in text and "1024 tokens of each layer" in text and "drift" in text
    out = tmp_path / "p.json"
    plan(np.ones((20, 32)), num_gpus=8, num_slots=40).save(out)
    assert main(["show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "40 slots on 8 GPUs" in text and "8 more layers; --all-layers shows them" in text
    assert main(["show", str(out), "--plots", str(tmp_path)]) == 2
    assert "--plots needs a placement and --load" in capsys.readouterr().err


def test_a_placement_of_another_model_is_named_with_the_load(load, tmp_path, capsys):
    out = tmp_path / "p.json"
    plan(np.ones((20, 16)), num_gpus=8, num_slots=40).save(out)
    assert main(["show", str(out), "--load", str(load)]) == 2
    message = f"{out}: 20 layers of 16 experts, {load} has 2 of 32: a placement of another model"
    assert message in capsys.readouterr().err


def test_files_nested_without_end_are_named(tmp_path, capsys):
    path = tmp_path / "deep.json"
    path.write_text('{"physical_to_logical_map": ' + "[" * 100_000)
    assert main(["show", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"eprt balance: {path}: lists or objects nested too deep")


def test_flags_that_would_be_ignored_are_refused(load, tmp_path, capsys):
    out = tmp_path / "p.json"
    plan(np.ones((2, 32)), num_gpus=8, num_slots=40).save(out)
    for words, message in (
        ([str(load), "--num-gpus", "8"], f"--num-gpus 8 is for a placement; {load} is none"),
        ([str(load), "--load", str(load)], f"--load {load} is for a placement; {load} is none"),
        ([str(out), "--num-gpus", "4"], f"--num-gpus 4: {out} says 8; leave the flag out"),
        ([str(out), "--num-nodes", "2"], f"--num-nodes 2: {out} says 1; leave the flag out"),
    ):
        assert main(["show", *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["show", str(out), "--num-gpus", "8"]) == 0
