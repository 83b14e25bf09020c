"""Metrics of the ranks: a series per rank and layer, and per expert as long as there are few."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from eprt.config import EngineConfig
from eprt.engine.outputs import EngineStats
from eprt.serve.ranks import metrics
from eprt.serve.ranks.metrics import RankCollector
from eprt.serve.ranks.request_metrics import RequestMetrics

ENGINE = EngineConfig("model", page_size=16, attention_tp=2, attention_tp_form="reduce")
# What the frontend has counted: nothing yet.
FRONTEND = {"num_ranks": 2, "limits": None, "metrics": RequestMetrics()}


def shown(pool: Any) -> dict[str, float]:
    registry = CollectorRegistry()
    options: Any = SimpleNamespace(model_name="demo", engine=ENGINE)
    registry.register(RankCollector(pool, options))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def pool(state: str = "serving") -> Any:
    info = SimpleNamespace(moe_layers=(1,), num_experts=2)
    tokens = np.array([[[3, 0]], [[1, 4]]], np.int64).tobytes()
    stats = [
        EngineStats(rank, 10 + rank, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, expert_tokens=tokens, slot_tokens=[6 + 4 * rank])
        for rank in range(2)
    ]
    return SimpleNamespace(state=state, num_sequences=5, infos=[info] * 2, stats=stats, **FRONTEND)


def test_every_rank_and_expert_has_its_series():
    values = shown(pool())
    assert values["eprt_up"] == 1 and values["eprt_sequences"] == 5
    assert values['eprt_attention_tp_ranks{form="reduce"}'] == 2
    assert values['eprt_steps_total{rank="0"}'] == 10 and values['eprt_steps_total{rank="1"}'] == 11
    assert values['eprt_last_step_seconds{rank="1"}'] == 0.5 and values['eprt_kv_pages{rank="0"}'] == 8
    assert values['eprt_rank_expert_tokens_total{layer="1",rank="1"}'] == 10
    assert values['eprt_expert_tokens_total{expert="1",layer="1"}'] == 8
    assert values['eprt_expert_skew{layer="1"}'] == 10 / 8


def test_a_server_that_takes_no_requests_is_not_up():
    assert shown(pool("draining"))["eprt_up"] == 0


def test_the_same_counts_stand_under_vllms_names():
    values = shown(pool())
    of_rank = '{engine="1",model_name="demo"}'
    assert values[f"vllm:num_requests_running{of_rank}"] == 6 and values[f"vllm:num_requests_waiting{of_rank}"] == 7
    assert values[f"vllm:kv_cache_usage_perc{of_rank}"] == 9 / 8
    assert values[f"vllm:prompt_tokens_total{of_rank}"] == 2 and values[f"vllm:generation_tokens_total{of_rank}"] == 3


def test_before_the_ranks_have_reported_there_are_no_series_of_them():
    loading = SimpleNamespace(state="loading", num_sequences=0, infos=[], stats=[], **FRONTEND)
    values = shown(loading)
    of_flags = values.pop('eprt_attention_tp_ranks{form="reduce"}')
    assert {name for name in values if name.startswith("eprt_")} == {"eprt_up", "eprt_sequences"}
    assert of_flags == 2 and not any(values.values())


def test_a_model_of_many_experts_has_no_series_per_expert(monkeypatch):
    monkeypatch.setattr(metrics, "_MAX_EXPERT_SERIES", 1)
    values = shown(pool())
    assert not any(name.startswith("eprt_expert_tokens") for name in values) and 'eprt_expert_skew{layer="1"}' in values
