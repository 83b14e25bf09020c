"""bench_http_gpu against a server on CPU ranks: rows, picture, flags."""

import json

import pytest

from benchmarks.serving import bench_http_gpu
from benchmarks.serving.open_loop import TIERS
from tests.paths import DEMO


def test_a_server_is_asked_at_every_rate(tmp_path):
    pytest.importorskip("matplotlib")
    flags = f"--model {DEMO} --device cpu --ranks 1 --chunk-size 64 --rate 4 8 --seconds 1 --input-tokens 24"
    bench_http_gpu.main([*flags.split(), "--output-tokens", "8", "--kv-cache-gb", "0.02"], tmp_path)
    content = json.loads((tmp_path / "http_1cpu.json").read_text())
    rows = content["rows"]
    assert [(row["chunk_size"], row["rate"]) for row in rows] == [(64, 4), (64, 8)]
    for row in rows:
        assert row["failed"] == 0 < row["requests"] and row["tokens_s_gpu"] == row["tokens_s"]
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p95_ms"] <= row["ttft_p99_ms"] and row["itl_p99_ms"] > 0
        assert sum(name.startswith("goodput_") for name in row) == len(TIERS)
    head, _, *lines = bench_http_gpu.page_table(content).splitlines()
    assert all(line.count("|") == head.count("|") for line in lines) and lines[1].startswith("| 64 | 8 | ")
    assert content["config"]["layers"] is None and (tmp_path / "http_1cpu.png").stat().st_size > 10_000


def test_on_gpus_the_shape_comes_with_dummy_weights():
    args = bench_http_gpu.parse(["--max-num-seqs", "96", "--layers", "13"])
    flags = " ".join(bench_http_gpu.server_flags(args, 2048))
    assert "--device cuda --chunk-size 2048 --max-num-seqs 96" in flags and "--num-hidden-layers 13" in flags
    assert "--load-format dummy" in flags and flags.endswith("--graph-sizes 8 16 32 64")
