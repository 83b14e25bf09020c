"""The noise of simulated serving jobs, and that its generator shares nothing with the detector but a line's format."""

import ast
from pathlib import Path

import numpy as np
import pytest

from benchmarks.diagnosis.serving_noise import SEEN, UNSEEN, autoregressive, draw_usual

ROOT = Path(__file__).resolve().parents[4]
GENERATOR = [ROOT / "benchmarks" / "diagnosis" / name for name in ("serving_noise.py", "serving_job.py")]


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}


def test_generator_and_detector_share_no_code():
    allowed = {"dataclasses", "collections.abc", "numpy", "eprt.diagnostics.log.events"}
    for path in GENERATOR:
        assert imports_of(path) <= allowed | {"benchmarks.diagnosis.serving_noise"}, path
    for path in (ROOT / "diagnostics").rglob("*.py"):
        assert not any(name.startswith("benchmarks") for name in imports_of(path)), path


def test_the_specification_names_every_family():
    text = (ROOT / "docs" / "diagnosis-noise.md").read_text()
    assert not set(SEEN) & set(UNSEEN)
    for family in (*SEEN, *UNSEEN):
        assert f"| `{family}` |" in text


@pytest.mark.parametrize("family", [*SEEN, *UNSEEN])
def test_a_family_is_drawn_by_its_seed(family):
    nodes = np.repeat(np.arange(2), 4)
    one, again, other = (draw_usual(family, 12, nodes, np.random.default_rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.latency_us_WNN, again.latency_us_WNN)
    assert (one.latency_us_WNN != other.latency_us_WNN).any()
    assert (one.attention_us_WN > 100).all() and (one.experts_us_WN > 60).all() and (one.tokens_WNN > 0).all()
    far = nodes[:, None] != nodes
    assert 2 < np.median(one.latency_us_WNN[:, far]) / np.median(one.latency_us_WNN[:, ~far]) < 5


def test_a_family_that_does_not_exist():
    with pytest.raises(ValueError, match="family 'calm': one of steady, "):
        draw_usual("calm", 12, np.zeros(4), np.random.default_rng(0))


def test_autoregressive_noise_keeps_its_variance_and_its_memory():
    values = autoregressive(np.random.default_rng(0), 0.9, (400, 200))
    assert values.std() == pytest.approx(1, rel=0.05)
    assert np.corrcoef(values[1:].ravel(), values[:-1].ravel())[0, 1] == pytest.approx(0.9, abs=0.02)
