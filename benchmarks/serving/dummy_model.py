"""Models of DeepSeek-V3's width with fewer experts or layers, for dummy weights."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.shapes import DEEPSEEK_V3


@contextmanager
def shape_with(num_experts: int) -> Iterator[Path]:
    """DeepSeek-V3's config.json with so many experts."""
    config = json.loads((DEEPSEEK_V3 / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, "n_routed_experts": num_experts}))
        yield Path(folder)


def of_depth(model, num_layers: int):
    """The model's first layers: shares all weights with it."""
    shallow = object.__new__(type(model))
    shallow.__dict__.update(model.__dict__)
    shallow.layers = model.layers[:num_layers]
    shallow.config = replace(model.config, num_hidden_layers=num_layers)
    return shallow
