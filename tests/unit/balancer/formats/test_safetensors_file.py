"""safetensors files, read without their library."""

import json

import numpy as np
import pytest
from eprt.balancer.formats import safetensors_file
from safetensors.numpy import save_file


@pytest.mark.parametrize("dtype", ["i8", "i4", "i2", "i1", "u1", "f8", "f4", "f2"])
def test_every_type_of_number_is_read(tmp_path, dtype):
    tensors = {
        "a": np.arange(6, dtype=dtype).reshape(2, 3),
        "b": np.zeros(0, dtype=dtype),
        "c": np.array(3, dtype=dtype),
    }
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "np"})
    read = safetensors_file.load(tmp_path / "a.safetensors")
    assert set(read) == set(tensors), "metadata is no tensor"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor)
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape


def written(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not a safetensors file: its header is incomplete"),
        (b"[1]", "not a safetensors file: its header is incomplete"),
        ({"a": {"dtype": "I64", "shape": [1]}}, "damaged: the header's entry 'a' is"),
        ({"a": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}}, "damaged: the header's entry 'a' is"),
        (
            {"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}},
            "a has dtype BF16; it must be one of I64, I32",
        ),
        ({"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}, "cut off: a ends at byte 16, the file has 8"),
        ({"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}}, r"a has 1 values, but its shape is \[2\]"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        safetensors_file.load(written(tmp_path / "a.safetensors", header, bytes(8)))


def test_a_file_shorter_than_its_header_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(ValueError, match="cut off, or not a safetensors file"):
        safetensors_file.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize("offsets", [["0", "16"], [0.0, 16.0], [float("inf"), float("inf")], [True, 16]])
def test_offsets_that_are_no_integers_are_named(tmp_path, offsets):
    header = {"counts": {"dtype": "I32", "shape": [4], "data_offsets": offsets}}
    with pytest.raises(ValueError, match="damaged: the header's entry 'counts'"):
        safetensors_file.load(written(tmp_path / "a.safetensors", header, b"\0" * 16))
