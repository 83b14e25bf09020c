"""A cluster to plan for, and how a refusal looks."""

import re
from pathlib import Path

import numpy as np
from eprt.balancer import plan
from eprt.balancer.__main__ import main

CLUSTER = ["--num-gpus", "8", "--num-nodes", "4", "--num-slots", "40"]


def check_refused(load: Path, folder: Path, capsys, words: list[str], message: str) -> None:
    """The command ends with status 2 and the message. OTHER in words: a placement of another model."""
    other = folder / "other.json"
    plan(np.ones((2, 16)), num_gpus=8, num_nodes=4, num_slots=40).save(other)
    words = [str(other) if word == "OTHER" else word for word in words]
    assert main([words[0], "--load", str(load), *words[1:]]) == 2
    assert re.search(message, capsys.readouterr().err)
