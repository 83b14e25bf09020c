"""Measured tilings: kept by GPU and shape, found again, and what was not measured is told."""

import pytest
import torch

from eprt.ops import tuning
from eprt.ops.tuning import ProductShape, Tiling


def test_products_that_were_not_measured_are_told_once(caplog, monkeypatch, tmp_path):
    caplog.set_level("INFO")
    monkeypatch.setattr(tuning, "_device_name", lambda index: "NVIDIA H900")
    shape = ProductShape(32, 2048, 7168, "fp8", True)
    for _ in range(3):
        assert tuning.tuned(torch.device("cuda", 0), shape, 8, tmp_path) is None
    (record,) = caplog.records
    assert "32 experts" in record.message and "2048 x 7168" in record.message and "NVIDIA H900" in record.message
    assert "tune_grouped_gemm" in record.message
    tuning.read.cache_clear()


def test_tilings_are_kept_by_gpu_and_shape_and_found_again(tmp_path):
    shape, other = ProductShape(32, 2048, 7168, "fp8", True), ProductShape(32, 7168, 2048, "fp8", False)
    small, large = Tiling(16, 128, 128, 4, 4, 2), Tiling(64, 128, 128, 8, 4, 2)
    assert tuning.read("NVIDIA H200", tmp_path) == {}
    path = tuning.write("NVIDIA H200", {shape: {8: small}}, tmp_path)
    assert path.name == "NVIDIA_H200.json"
    tuning.write("NVIDIA H200", {shape: {8: small, 64: large}, other: {64: large}}, tmp_path)
    table = tuning.read("NVIDIA H200", tmp_path)
    assert [tuning.lookup(table, shape, rows) for rows in (1, 8, 9, 64, 500)] == [small, small, large, large, large]
    assert tuning.lookup(table, other, 8) == large and tuning.read("NVIDIA H100", tmp_path) == {}
    # Another number of experts finds the nearest; another size or kind finds nothing.
    more = {ProductShape(128, 2048, 7168, "fp8", True): {8: large}, **table}
    assert [tuning.lookup(more, ProductShape(n, 2048, 7168, "fp8", True), 8) for n in (64, 100)] == [small, large]
    assert tuning.lookup(table, ProductShape(32, 2048, 7168, "same", True), 8) is None
    assert tuning.lookup(table, ProductShape(32, 1024, 7168, "fp8", True), 8) is None
    assert tuning.tuned(torch.device("cpu"), shape, 8, tmp_path) is None
    # Dense products: null where cuBLAS was faster, which also takes more rows than any measured.
    tuning.write(
        "NVIDIA H200", {ProductShape(1, 2112, 7168, "dense", False): {16: small, 32: None, 64: large}}, tmp_path
    )
    table = tuning.read("NVIDIA H200", tmp_path)
    found = [tuning.lookup_dense(table, 2112, 7168, rows) for rows in (1, 17, 64, 65)]
    assert found == [(True, small), (True, None), (True, large), (True, None)]
    assert tuning.lookup_dense(table, 2048, 7168, 1) == (False, None)
    assert tuning.lookup_dense(table, 2112, 7168, 1, "dense int8") == (False, None)
    tuning.write("NVIDIA H200", {ProductShape(1, 2112, 7168, "dense int8", False): {16: large}}, tmp_path)
    table = tuning.read("NVIDIA H200", tmp_path)
    found = [tuning.lookup_dense(table, 2112, 7168, 1, kind) for kind in ("dense", "dense int8")]
    assert found == [(True, small), (True, large)], "fp8 and int8 of one shape stand beside each other"
    path.write_text('[{"experts": 1}]')
    tuning.read.cache_clear()
    with pytest.raises(ValueError, match=r"NVIDIA_H200\.json: not a file of tilings"):
        tuning.read("NVIDIA H200", tmp_path)


def test_the_tilings_that_are_kept_can_be_read():
    files = list(tuning.FOLDER.glob("*.json"))
    assert files
    for path in files:
        for shape, tilings in tuning.read(path.stem).items():
            assert shape.kind in ("fp8", "same", "int8", "fp4", "dense", "dense int8") and tilings
