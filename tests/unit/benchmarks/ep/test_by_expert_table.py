"""The page's table of rows by expert, from rows as the benchmark writes them."""

from benchmarks.ep.by_expert_table import page_table


def test_the_page_has_a_row_per_call():
    times = {"eprt_us": 300.4, "deep_ep_us": 400.0, "to_deep_ep": 0.75, "deep_ep_permute_us": 500.0}
    row = {"tokens": 512, "call": "combine bf16", "after": "fp8", "to_deep_ep_permute": 0.6, **times}
    lines = page_table({"rows": [row, {**row, "call": "dispatch fp8"}]}).splitlines()
    assert lines[2:] == [
        "| 512 | combine bf16, after fp8 | 300 | 400, 0.75 | 500, 0.60 |",
        "| 512 | dispatch fp8 | 300 | 400, 0.75 | 500, 0.60 |",
    ]
