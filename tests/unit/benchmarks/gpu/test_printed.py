"""The pages' tables of transformers' block and of small operators, from rows as the benchmarks write them."""

from benchmarks.gpu.printed import hf_memory_table, hf_moe_table, small_operators_table


def row(
    what: str, us: float, speedup: float, tokens: int = 64, shape: str = "deepseek_v3", peak_MB: float = 500.0
) -> dict:
    sizes = {"weights_GB": 11.3 if "fp8" in what else 22.6, "peak_MB": peak_MB, "floor_us": 4000.0}
    return {"shape": shape, "tokens": tokens, "what": what, "layer_us": us, "speedup": speedup, **sizes}


CONTENT = {
    "config": {"gpus": 2},
    "rows": [
        row("transformers eager", 20000, 0.4),
        row("transformers grouped_mm", 9000, 0.9),
        row("transformers grouped_mm, graph", 8000, 1.0),
        row("eprt normal", 6000, 1.33),
        row("eprt low_latency, graph", 5000, 1.6),
        row("eprt fp8 normal", 2500, 3.2),
        row("transformers eager", 1, 1, shape="qwen3_235b"),
    ],
}


def test_one_shape_of_transformers():
    lines = hf_moe_table(CONTENT, "deepseek_v3").splitlines()
    assert lines[0].startswith("| tokens per GPU, DeepSeek-V3 on 2 | ")
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") and len(lines) == 3
    assert lines[2] == "| 64 | 20000, 9000, - | 8000 | 6000, -, 5000 | 1.60 | 2500, -, - | 3.20 | 4000 |"


def test_memory_is_that_of_the_largest_batch():
    rows = [
        row(name, 1, 1, tokens, peak_MB=tokens)
        for tokens in (1, 4096)
        for name in ("transformers grouped_mm", "eprt normal", "eprt fp8 normal")
    ]
    lines = hf_memory_table({"rows": rows}).splitlines()
    assert lines[2:] == ["| DeepSeek-V3, 4096 tokens | 22.6 GB, 4.10 GB | 22.6 GB, 4.10 GB | 11.3 GB, 4.10 GB |"]


def test_small_operators_have_a_column_per_size():
    rows = [
        {"what": what, "rows": size, "eprt_us": size / 100, "compiled_us": size / 50, "to_compiled": 0.5}
        for what in ("norm", "gate")
        for size in (100, 4000)
    ]
    assert small_operators_table({"rows": rows}).splitlines() == [
        "| operator | 100 rows | 4000 rows |",
        "|---|---|---|",
        "| norm | 1.0, 2.0, 0.50 | 40.0, 80.0, 0.50 |",
        "| gate | 1.0, 2.0, 0.50 | 40.0, 80.0, 0.50 |",
    ]
