"""Plots: PNG files of the right kind, a page that holds them, and a remedy where matplotlib is missing."""

import sys

import numpy as np
import pytest
from eprt.balancer import plots
from eprt.balancer.replay import Replay

PNG = b"\x89PNG\r\n\x1a\n"


def replay(name: str, traffic: bool) -> Replay:
    load_VLG = np.random.default_rng(0).uniform(1, 2, (3, 2, 4))
    return Replay(name, load_VLG, np.array([4, 1, 0]), np.array([0.5, 0.4, 0.3]) if traffic else None)


@pytest.mark.parametrize("traffic", [True, False])
def test_a_replay_has_a_plot_of_each_figure(tmp_path, traffic):
    replays = [replay(name, traffic) for name in ("none", "eplb")]
    paths = plots.plot_replays(tmp_path / "new", replays, 1e6, "node_copies")
    assert [path.stem for path in paths] == ["balance", "gpu_load", "moves", *(["traffic"] if traffic else [])]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_a_plan_without_traffic_keeps_its_style_undrawn(tmp_path):
    paths = [
        plots.scatter(tmp_path / "a.png", {"one": (1.2, None), "two": (1.1, 0.5)}, "title", "label"),
        plots.bars(tmp_path / "b.png", {f"policy {k}": 1.2 for k in range(10)}, "title", "label"),  # more than styles
    ]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_the_page_holds_text_and_plots_and_escapes_them(tmp_path):
    png = plots.bars(tmp_path / "a.png", {"one": 1.0}, "title", "label")
    html = plots.write_page(tmp_path, "<title>", "a < b", [png, png]).read_text()
    assert html.count("data:image/png;base64,") == 2 and "&lt;title&gt;" in html and "a &lt; b" in html


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'eprt\[plots\]'"):
        plots.pyplot()
