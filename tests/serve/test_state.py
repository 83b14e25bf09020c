"""What a running server tells of itself: load, placement, findings, metrics and health."""

from tests.serve.cases import ENDLESS, complete, wait_idle
from tests.serve.processes import wait_until


def test_load_placement_and_diagnosis(http, server):
    complete(http, max_tokens=8, **ENDLESS)

    def settled() -> dict | None:
        load = wait_idle(http)
        return load if sum(r["num_generated_tokens"] for r in load["ranks"]) >= 8 else None

    load = wait_until(settled, "eight tokens")
    assert load["schema"] == "eprt.load/1" and load["num_ranks"] == 4 and len(load["ranks"]) == 4
    assert [layer["layer"] for layer in load["layers"]] == [1, 2, 3]
    for layer in load["layers"]:
        assert len(layer["per_rank"]) == 4 and len(layer["per_expert"]) == load["num_experts"] == 32
        assert sum(layer["per_rank"]) == sum(layer["per_expert"]) > 0 and layer["skew"] >= 1
        # Every computed token goes to its top 4 experts.
        tokens = sum(r["num_prompt_tokens"] - r["num_cached_tokens"] + r["num_generated_tokens"] for r in load["ranks"])
        assert sum(layer["per_expert"]) <= 4 * tokens
    placement = http.get("/v1/eprt/placement").json()
    assert placement["epoch"] == 0 and placement["physical_to_logical_map"] == [list(range(32))] * 3
    findings = http.get("/v1/eprt/diagnose").json()
    assert findings["schema"] == "eprt.findings/1" and findings["num_ranks"] == 4
    assert isinstance(findings["findings"], list)


def read_metrics(http) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if line[0] != "#"]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def tokens_to(values: dict[str, float], whom: str) -> float:
    """Choices of layer 1, counted where they were made (expert) or where they arrived (rank)."""
    if whom == "expert":
        return sum(values.get(f'eprt_expert_tokens_total{{expert="{e}",layer="1"}}', 0) for e in range(32))
    return sum(values.get(f'eprt_rank_expert_tokens_total{{layer="1",rank="{r}"}}', 0) for r in range(4))


def are_settled(values: dict[str, float]) -> bool:
    no_page = not any(values.get(f'eprt_kv_pages_used{{rank="{rank}"}}', 1) for rank in range(4))
    arrived = 0 < tokens_to(values, "expert") == tokens_to(values, "rank")
    return no_page and arrived and values["eprt_sequences"] == 0


def test_metrics(http):
    complete(http, max_tokens=4, **ENDLESS)
    http.post("/v1/completions", content=b"{")
    # Ranks tell their statistics each by itself, a moment after the answer.
    values = wait_until(lambda: values if are_settled(values := read_metrics(http)) else None, "their statistics")
    assert values["eprt_up"] == 1 and values["eprt_sequences"] == 0
    assert values['eprt_requests_total{endpoint="completions",outcome="length"}'] >= 1
    assert values['eprt_requests_total{endpoint="completions",outcome="invalid_json"}'] >= 1
    assert (
        values["eprt_time_to_first_token_seconds_count"] >= 1 and values["eprt_inter_token_latency_seconds_count"] >= 3
    )
    assert values["eprt_e2e_request_latency_seconds_count"] >= 1 and values["eprt_faults_total"] == 0
    per_rank = [values[f'eprt_generated_tokens_total{{rank="{rank}"}}'] for rank in range(4)]
    assert sum(per_rank) >= 4


def test_health(http):
    health = http.get("/health").json()
    assert health["status"] == "ok" and [r["rank"] for r in health["ranks"]] == [0, 1, 2, 3]
    assert len({r["pid"] for r in health["ranks"]}) == 4
