"""Metrics of placements and migrations."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest

from eprt.ep.migration.job import MigrationStatus
from eprt.serve.errors import ApiError
from eprt.serve.rebalance.metrics import RebalanceCollector
from eprt.serve.rebalance.migration import Migration
from eprt.serve.rebalance.rebalancer import Rebalancer
from tests.unit.serve.rebalance.cases import observe, rebalancer_of


def shown(rebalancer: Rebalancer) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RebalanceCollector(rebalancer))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_before_anything_moved_there_are_zeros():
    values = shown(rebalancer_of())
    assert values["eprt_placement_epoch"] == values["eprt_migration_active"] == values["eprt_migration_progress"] == 0
    assert values['eprt_migrations_total{outcome="done"}'] == values['eprt_migrated_experts_total{way="local"}'] == 0
    assert "eprt_rank_load_max_over_mean" not in values, "no load was measured"


def test_a_migration_under_way_shows_its_progress_and_its_cost_by_rank(monkeypatch):
    rebalancer = rebalancer_of()
    rebalancer.migration = Migration(1, "running", "", 0, 0, 4, 1, {}, 0.0, 0.0)
    for rank, stats in enumerate(rebalancer._pool.stats):
        status = replace(MigrationStatus(), sent_bytes=10 + rank, work_s=0.5, max_work_s=0.25)
        monkeypatch.setattr(stats, "migration", status)
    for step in (1, 2, 3):
        observe(rebalancer, step)
    values = shown(rebalancer)
    assert values["eprt_migration_active"] == 1 and values["eprt_migration_progress"] == 0.25
    assert values['eprt_migration_sent_bytes_total{rank="1"}'] == 11
    assert values['eprt_migration_seconds_total{rank="0"}'] == 0.5
    assert values['eprt_migration_max_step_seconds{rank="0"}'] == 0.25
    assert values["eprt_rank_load_max_over_mean"] >= 1


def test_a_model_without_experts_has_none(monkeypatch):
    rebalancer = rebalancer_of()
    for info in rebalancer._pool.infos:
        monkeypatch.setattr(info, "moe_layers", ())
    assert shown(rebalancer) == {}
    try:
        _ = rebalancer.placement
    except ApiError as error:
        assert error.code == "no_experts"
