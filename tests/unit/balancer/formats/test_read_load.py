"""read_load: which reader a path gets, and damage of any kind is named."""

import json
import zipfile

import numpy as np
import pytest
import torch
from eprt.balancer import read_load
from eprt.balancer.__main__ import main

from tests.unit.balancer.formats.cases import PASS, SLOTS, server, stat_dump, tensorrt_dump


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json: not JSON: Expecting"),
        ("a.json", "[]", "expected an object with a field 'load'"),
        ("a.json", '{"load": [[1, 2], [3]]}', "equally long lists"),
        ("a.json", '{"load": [[1, -2]]}', r"window 0: load\[layer 0, expert 1\] = -2.0"),
        ("a.json", '{"load": []}', "shape"),
        ("a.pt", "", "not a complete torch.save file"),
        ("a.npz", "not a zip", "a.npz"),
    ],
)
def test_a_bad_load_file_is_named(tmp_path, capsys, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_load(tmp_path / name)
    assert main(["plan", "--load", str(tmp_path / name), "--num-gpus", "1"]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    "head",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000, 1000000000)}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1, 4)}",
        b"(" * 5000,
        b"__import__('os').abort()",
        b"\xff" * 50,
    ],
)
def test_a_damaged_head_of_an_array_is_one_line(tmp_path, capsys, head):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("load.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    for arguments in (
        ["plan", "--load", str(tmp_path / "a.npz"), "--num-gpus", "1"],
        ["show", str(tmp_path / "a.npz")],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"eprt balance: {tmp_path}/a.npz: ") and error.count("\n") == 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"physical_to_logical_map": [[9223372036854775806]], "num_gpus": 1}'])
def test_a_placement_nobody_can_have_is_one_line(tmp_path, capsys, text):
    (tmp_path / "a.json").write_text(text)
    assert main(["show", str(tmp_path / "a.json"), "--num-gpus", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_be_read_says_what_can(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(ValueError, match=r"cannot read .csv; use .npz, .pt, .json"):
        read_load(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"neither meta_info.json \(TensorRT-LLM\) nor \*.pt \(SGLang\)"):
        read_load(tmp_path)
    assert main(["show", str(tmp_path / "missing.npz")]) == 2
    assert "missing.npz: no such file" in capsys.readouterr().err


def test_damaged_bytes_are_refused_or_read_and_nothing_else(tmp_path):
    """One byte changed or the end cut off, anywhere: never another error than the one that names the file."""
    rng = np.random.default_rng(0)
    np.savez_compressed(tmp_path / "a.npz", load=rng.integers(0, 9, (2, 3, 4)), topk_idx=rng.integers(0, 4, (3, 5, 2)))
    stat_dump(tmp_path / "b.pt", rng.integers(0, 50, size=(2, 3, 4)).astype(np.int32))
    torch.save({"records": [PASS], "last_physical_to_logical_map": torch.tensor(SLOTS)}, tmp_path / "c.pt")
    (tmp_path / "d.jsonl").write_text(json.dumps(server([[1, 2]])) + "\n" + json.dumps(server([[3, 4]])))
    tensorrt_dump(tmp_path / "e")
    refused = 0
    for path in (*tmp_path.glob("*.*"), tmp_path / "e" / "rank0.safetensors", tmp_path / "e" / "meta_info.json"):
        whole = path.read_bytes()
        for _ in range(60):
            at = int(rng.integers(len(whole)))
            path.write_bytes(whole[:at] + (b"" if rng.random() < 0.3 else bytes([rng.integers(256)]) + whole[at + 1 :]))
            try:
                read_load(path)
            except ValueError as error:
                assert str(error).startswith(str(path))
                refused += 1
        path.write_bytes(whole)
        read_load(path)
    assert refused > 100
