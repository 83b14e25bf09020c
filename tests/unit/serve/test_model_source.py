"""Directories, names of repositories in the hub's cache, and what clients call the model by default."""

import os
import re

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.model_source import default_name, find_model_dir
from eprt.serve.options import OptionError
from tests.unit.cases import MODEL


def make_snapshot(cache, revision: str, main: bool = True):
    """Of org/demo-1.0, as the hub's own program lays it out."""
    folder = cache / "models--org--demo-1.0"
    (folder / "snapshots").mkdir(parents=True, exist_ok=True)
    (folder / "snapshots" / revision).symlink_to(MODEL)
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(revision)
    return folder / "snapshots" / revision


@pytest.mark.parametrize(
    "variable, below", [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_a_repository_is_the_snapshot_of_its_main_branch(tmp_path, monkeypatch, variable, below):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    cache = tmp_path / below
    make_snapshot(cache, "0a", main=False)
    newest = make_snapshot(cache, "0b")
    make_snapshot(cache, "0c", main=False)
    assert find_model_dir("org/demo-1.0") == str(newest)
    options = parse_options(["--model", "org/demo-1.0"])
    assert options.engine.model_dir == str(newest) and options.model_name == "org/demo-1.0"


def test_without_one_the_command_that_downloads_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    told = f"--model org/demo: no such directory, and the hub's cache ({tmp_path}) has no snapshot of it; "
    with pytest.raises(OptionError, match=re.escape(told + "download it with `hf download org/demo`")):
        parse_options(["--model", "org/demo"])
    for path in ("/no/such/place", "no-such-place", "a/b/c", "../no-such-place"):
        with pytest.raises(OptionError, match=f"^--model {path}: no such directory$"):
            parse_options(["--model", path])


def test_a_directory_is_called_as_it_was_given(tmp_path, monkeypatch):
    (tmp_path / "latest").symlink_to(MODEL)
    assert parse_options(["--model", str(tmp_path / "latest")]).model_name == "latest"
    assert default_name(f"{tmp_path}/latest/") == "latest"
    monkeypatch.chdir(tmp_path / "latest")
    assert default_name(".") == os.path.basename(os.getcwd())


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "demo").symlink_to(MODEL)
    assert find_model_dir("org/demo") == "org/demo" and default_name("org/demo") == "demo"


@pytest.mark.parametrize("given", ["9" * 5000, "a\0b", "\udcff", "/" + "x/" * 3000])
def test_what_is_no_path_is_no_directory(given):
    with pytest.raises(OptionError, match=r"no such directory$") as caught:
        parse_options(["--model", given])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_pipe_among_the_files_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    (tmp_path / "generation_config.json").symlink_to("/nowhere")
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        find_model_dir(str(tmp_path))
