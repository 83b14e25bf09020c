import json
from dataclasses import replace

import pytest

from eprt.cluster.__main__ import main
from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.cluster_plan import ClusterPlan
from eprt.cluster.model_cost import ModelCost
from eprt.cluster.step_time import Workload
from eprt.model_config import IndexerConfig
from tests.unit.cluster.cases import DEEPSEEK_V3, deepseek_v3


def plan(nodes: int = 18, **kwargs) -> ClusterPlan:
    work = kwargs.pop("work", Workload())
    return ClusterPlan(ClusterLayout(nodes, **kwargs), deepseek_v3(), work, redundant=32, usd_per_gpu_hour=2.0)


def test_rows_from_a_node_to_the_whole_cluster():
    rows = list(plan().rows())
    assert [row.num_ranks for row in rows] == [8, 16, 32, 64, 128, 144]
    assert [row.num_groups for row in rows] == [18, 9, 4, 2, 1, 1]


def test_memory_is_the_arithmetic_of_the_weights():
    model = deepseek_v3()
    row = plan().row(144)
    assert row.memory.slots == 2  # (256 + 32) / 144
    assert row.memory.experts_gb == pytest.approx(2 * 58 * 3 * 7168 * 2048 / 1e9)
    assert model.cache_bytes == 61 * 576 * 2
    assert row.memory.slots_without_a_node == 2 and row.memory.slots_with_every_expert_twice == 4
    assert plan().row(8).memory.slots_without_a_node is None


def test_fewer_requests_where_the_cache_is_short():
    row = plan(work=Workload(requests=500)).row(8)
    assert 0 < row.requests < 500
    assert row.requests == row.memory.cached_tokens // (4096 + 1024)


def test_weights_that_do_not_fit_have_no_step():
    row = plan(nodes=1, gpu="h800").row(8)
    assert row.step is None and row.decode_tokens_per_s == 0 and row.usd_per_million_output is None


def test_the_ratio_of_prefill_keeps_both_busy_and_the_price_has_both():
    row = plan().row(64)
    made, read = row.decode_tokens_per_s / 1024, row.prefill_tokens_per_s / 4096  # requests/s of a GPU of each kind
    assert row.prefill_per_decode == pytest.approx(made / read)
    gpu_seconds = 1e6 / row.decode_tokens_per_s * (1 + row.prefill_per_decode)
    assert row.usd_per_million_output == pytest.approx(2.0 * gpu_seconds / 3600)


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    arguments = ["--model", str(DEEPSEEK_V3), "--nodes", "4", "--json", str(tmp_path / "plan.json"), "--price", "2"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "EP32" in printed and "Predicted, not measured" in printed and "USD" in printed
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["predicted"] is True
    assert [row["num_ranks"] for row in written["rows"]] == [8, 16, 32]
    pytest.importorskip("matplotlib")
    assert main([*arguments, "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_groups_that_are_too_large_are_told(capsys):
    assert main(["--model", str(DEEPSEEK_V3), "--nodes", "40"]) == 0
    printed = capsys.readouterr().out
    assert "EP256" in printed and "EP320" not in printed and "64 of 320 GPUs are for further groups" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--nodes", "0"], "--nodes 0: must be at least 1"),
        (["--nodes", "2", "--nic", "0"], "--nic 0.0: must be above 0 GB/s"),
        (["--nodes", "2", "--redundant-experts", "-1"], "--redundant-experts -1: must be at least 0"),
        (["--nodes", "2", "--accepted", "0.5"], "--accepted 0.5: must be at least 1"),
        (["--nodes", "2", "--price", "0"], "--price 0.0: must be above 0"),
        (["--nodes", "9" * 400], "must be at most 1000000000"),
        (["--nodes", "18", "--nic", "400"], "must be at most 250; it is in GB/s; a card of 400 Gbit/s has --nic 50"),
        (["--nodes", "18", "--nic", "nan"], "--nic nan: must be above 0 GB/s"),
        (["--nodes", "2", "--nic", "1e-320"], "must be at least 1e-06"),
        (["--nodes", "2", "--accepted", "inf"], "--accepted inf: must be at most 1000000000"),
        (["--nodes", "2", "--prefill-tokens", "9" * 400], "must be at most 1000000000"),
        (["--nodes", "2", "--redundant-experts", "9" * 400], "must be at most 1000000000"),
        (["--nodes", "2", "--price", "inf"], "--price inf: must be at most 1000000000"),
        (["--nodes", "1", "--gpus-per-node", "512"], "512 GPUs a node are more than the model's experts"),
        (["--nodes", "2", "--model", "/nowhere"], "/nowhere"),
        (
            ["--nodes", "2", "--model", f"{DEEPSEEK_V3}/config.json"],
            "is a file; give the directory that its config.json is in",
        ),
        (
            ["--nodes", "2", "--plot", "/nowhere/a.png"],
            "--plot /nowhere/a.png: there is no directory /nowhere; make it",
        ),
        (["--nodes", "2", "--json", "/nowhere/a.json"], "--json /nowhere/a.json: there is no directory /nowhere"),
        (["--nodes", "2", "--plot", str(DEEPSEEK_V3)], "is a directory; name a file in it"),
    ],
)
def test_what_cannot_be_planned_is_one_line(arguments, message, capsys):
    model = [] if "--model" in arguments else ["--model", str(DEEPSEEK_V3)]
    assert main([*model, *arguments]) == 2
    printed, error = capsys.readouterr()
    assert message in error and error.count("\n") == 1 and not printed


def test_a_picture_of_no_known_kind_is_refused_before_anything_is_printed(capsys):
    pytest.importorskip("matplotlib")
    assert main(["--model", str(DEEPSEEK_V3), "--nodes", "2", "--plot", "x.txt"]) == 2
    printed, error = capsys.readouterr()
    assert "--plot x.txt: no picture is a .txt; it may be one of " in error and error.count("\n") == 1 and not printed


def test_models_whose_attention_is_not_counted_are_refused():
    sparse = IndexerConfig(num_heads=64, head_dim=128, top_k=2048)
    with pytest.raises(ValueError, match="model_type='deepseek_v32' is not planned"):
        ModelCost(replace(deepseek_v3().config, model_type="deepseek_v32", indexer=sparse))
