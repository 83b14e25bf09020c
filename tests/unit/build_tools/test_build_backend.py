"""An isolated build without torch ends before anything is downloaded, and says what to install."""

import importlib.util
import sysconfig
import tomllib

import pytest

from tests.unit.cases import ROOT

SOURCE = ROOT / "build_tools" / "build_backend.py"


@pytest.fixture
def backend():
    pytest.importorskip("scikit_build_core")
    spec = importlib.util.spec_from_file_location("build_backend", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_torch_comes_first(backend, kind, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    asked = getattr(backend, f"get_requires_for_build_{kind}")
    assert isinstance(asked(), list), "this environment has torch"
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: str(tmp_path))
    with pytest.raises(SystemExit, match=r"pip install torch==2\.13\.0.*then run the same command again"):
        asked()


def test_the_other_hooks_are_scikit_build_cores(backend):
    from scikit_build_core import build

    for hook in ("build_wheel", "build_sdist", "build_editable", "prepare_metadata_for_build_wheel"):
        assert getattr(backend, hook) is getattr(build, hook)


def test_it_is_what_pyproject_names():
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert (system["build-backend"], system["backend-path"]) == (SOURCE.stem, [SOURCE.parent.name])
