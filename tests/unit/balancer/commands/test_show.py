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
