"""The picture of generation's figures."""

import shutil
from pathlib import Path

import pytest

from benchmarks.serving.generation_picture import draw
from benchmarks.tools.report import RESULTS


def test_it_is_drawn_beside_the_figures(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = draw(Path(shutil.copy(RESULTS / "generation_61x64_2gpu.json", tmp_path)))
    assert drawn == tmp_path / "generation_61x64_2gpu.png"
    assert pyplot.imread(drawn).std() > 0.05, "nothing is to be seen"
