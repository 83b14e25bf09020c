"""Fingerprint: the same for the same model wherever it lies, another one for other weights of the same shape."""

import json
import shutil
from pathlib import Path

import pytest

import eprt
from eprt.serve import fingerprint as module
from eprt.serve.fingerprint import begin_fingerprint, fingerprint, why_not_alike
from tests.unit.cases import MODEL


@pytest.fixture(params=["whole", "sampled"])
def copy(request, tmp_path, monkeypatch) -> Path:
    """Of a checkpoint, which counts as small or as large."""
    if request.param == "sampled":
        monkeypatch.setattr(module, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(module, "_SAMPLE_BYTES", 64)
    for file in [MODEL / "config.json", *MODEL.glob("*.safetensors")]:
        shutil.copy(file, tmp_path)
    return tmp_path


def weight_file(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.safetensors"))))


def change(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def places(path: Path) -> tuple[int, dict[str, list[int]]]:
    """Where the tensors begin, and from where to where each lies behind that."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return 8 + length, {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}


def test_a_copy_has_the_same_and_other_files_count_nothing(copy):
    (copy / "notes.txt").write_text("no part of the model")
    assert fingerprint(str(copy)) == fingerprint(str(MODEL)) == begin_fingerprint(str(copy)).result()


def test_other_weights_of_any_expert_show(copy):
    before, path = fingerprint(str(copy)), weight_file(copy)
    first, place_of = places(path)
    experts = [name for name in place_of if ".experts." in name]
    for name in (experts[0], experts[-1]):
        start, end = place_of[name]
        change(path, first + (start + end) // 2)
        assert fingerprint(str(copy)) != before, name
        change(path, first + (start + end) // 2)
    assert fingerprint(str(copy)) == before


def test_every_byte_of_a_small_checkpoint_counts(tmp_path):
    for file in [MODEL / "config.json", *MODEL.glob("*.safetensors")]:
        shutil.copy(file, tmp_path)
    path = weight_file(tmp_path)
    change(path, path.stat().st_size - 1)
    assert fingerprint(str(tmp_path)) != fingerprint(str(MODEL))


@pytest.mark.parametrize("what", ["config", "name", "size", "missing"])
def test_configuration_names_and_sizes_count(copy, what):
    before, path = fingerprint(str(copy)), weight_file(copy)
    if what == "config":
        (copy / "config.json").write_text("{}")
    elif what == "name":
        path.rename(path.with_name("other.safetensors"))
    elif what == "size":
        path.write_bytes(path.read_bytes() + b"0")
    else:
        path.unlink()
    assert fingerprint(str(copy)) != before


@pytest.mark.parametrize(
    "content", [b"", b"12", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{]"]
)
def test_a_file_that_is_none_of_safetensors_has_one_too(tmp_path, monkeypatch, content):
    monkeypatch.setattr(module, "_WHOLE_BYTES", -1)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(content)
    assert len(fingerprint(str(tmp_path))) == 64


def test_a_directory_that_cannot_be_read_has_none(tmp_path):
    with pytest.raises(OSError):
        fingerprint(str(tmp_path / "nowhere"))
    assert begin_fingerprint(str(tmp_path / "nowhere")).result() == ""


def test_who_asks_to_join_must_have_the_version_and_the_model():
    def never() -> str:
        raise AssertionError("waits for the server's fingerprint, which nobody needs")

    assert why_not_alike(eprt.__version__, None, "/model", never) is None
    words = f"the server runs eprt {eprt.__version__}, this is eprt 0.0"
    assert why_not_alike("0.0", "abc", "/model", never) == words
    assert why_not_alike(eprt.__version__, "abc", "/model", lambda: "abc") is None
    assert why_not_alike(eprt.__version__, "abc", "/model", lambda: "") is None, "not known"
    assert "server's (/model)" in (why_not_alike(eprt.__version__, "abc", "/model", lambda: "def") or "")
