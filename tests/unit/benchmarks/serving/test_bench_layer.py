"""`eprt bench layer` on one CPU rank: the tables, and a timeline whose stages come in the schedule's order."""

import json
from itertools import pairwise

import pytest
import torch

from benchmarks.serving import bench_layer
from benchmarks.serving.bench_layer import LayerBench
from benchmarks.serving.layer_timeline import Span, draw, exposed_us, period_us, stage_us
from eprt import EPGroup
from eprt.layers.schedules import PAUSE, PLAIN, TWO_BATCH


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--requests 4 0", "--requests 4 0: must be at least 1"),
        ("--samples 0", "--samples 0: must be at least 1"),
        ("-n 0", "--ranks 0: must be at least 1"),
        ("--prefill -1", "--prefill -1: must be at least 0"),
        ("--device cpu --sms 4", "--sms: divides a GPU"),
        ("--payload fp4", "argument --payload: invalid choice: 'fp4'"),
        ("--layers 2", "--layers 2: at least 3"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        bench_layer.parse(flags.split())
    assert message in capsys.readouterr().err


def test_tables_and_timelines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_layer, "RESULTS", tmp_path)
    small = "--device cpu --experts-per-rank 8 --requests 2 3 --context 64 --prefill 12 24 --prompt 10 --samples 3"
    arguments = bench_layer.parse([*small.split(), "--payload", "same", "--layers", "5"])
    alone = bench_layer.parse([*small.split(), "--payload", "same", "--moe-only", "--prefill", "0", "--requests", "2"])
    with torch.inference_mode():
        bench = LayerBench(EPGroup.single(), alone)
        bench_layer._bench(bench, bench.decodes, "requests", alone.requests, ["none", "tbo"])
        bench.close()
        bench = LayerBench(EPGroup.single(), arguments)
        bench_layer._bench(bench, bench.decodes, "requests", arguments.requests, ["none", "sbo", "tbo"])
        bench_layer._bench(bench, bench.prompts, "tokens", arguments.prefill, ["none", "tbo"])
        bench.close()
    assert (tmp_path / "layer_decode_1cpu_moe_only.json").exists()
    decode = json.loads((tmp_path / "layer_decode_1cpu.json").read_text())
    assert [row["requests"] for row in decode["rows"]] == [2, 3] and decode["config"]["ranks"] == 1
    for row in decode["rows"]:
        assert 0 < row["tbo_p10_us"] <= row["tbo_us"] <= row["tbo_p90_us"]
        assert row["none_exposed_us"] > 0 and row["sbo_hidden"] <= 1
        assert "none_shared_us" not in row, "one operator computes all experts of a decode"
    prefill = json.loads((tmp_path / "layer_prefill_1cpu.json").read_text())["rows"]
    assert [row["tokens"] for row in prefill] == [12, 24] and alone.prefill == []
    for row in prefill:
        assert row["tbo_tokens_per_s"] > 0 and row["tbo_rested_us"] > 0 and row["none_shared_us"] > 0
        computed_us = row["halves_period_us"] - row["halves_exposed_us"]
        assert row["tbo_least_us"] == pytest.approx(computed_us, abs=0.2), "no GPU, no SMs lost"
    timeline = json.loads((tmp_path / "layer_timeline_prefill_1cpu.json").read_text())["panels"]
    in_order = [[Span(**span) for span in timeline[name]] for name in ("none", "tbo")]
    assert [s.stage for s in in_order[0] if s.layer == 1] == [stage.name for stage in PLAIN]
    for microbatch in (0, 1):
        own = [s for s in in_order[1] if s.layer == 1 and s.microbatch == microbatch]
        assert [s.stage for s in own] == [stage.name for stage in TWO_BATCH if stage is not PAUSE]
        assert all(a.end_us <= b.begin_us for a, b in pairwise(own))
    assert (tmp_path / "layer_timeline_decode_1cpu.png").stat().st_size > 10_000
    assert "sbo_saves" in capsys.readouterr().out
    assert draw(tmp_path / "layer_timeline_prefill_1cpu.json", layer=0).exists()


def test_what_is_exposed_of_a_layer():
    """Exchange on the compute lane and its idleness, inside the layer's own time; not what runs beside it."""
    rows = [
        ("attention", "compute", 0, 100),
        ("dispatch_send", "compute", 100, 120),
        ("experts", "compute", 130, 200),
        ("combine_start", "comm", 150, 260),
        ("combine_recv", "compute", 200, 205),
    ]
    spans = [Span(*row[:2], 0, layer, 300 * layer + row[2], 300 * layer + row[3]) for layer in range(3) for row in rows]
    assert exposed_us(spans) == exposed_us(spans, 1) == 300 - 100 - 70
    assert stage_us(spans, "experts") == 70 and stage_us(spans, "shared") is None and period_us(spans) == 300
