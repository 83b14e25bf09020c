"""The rebalancer: when it plans, what it moves, and the files that it gives."""

import asyncio
import contextlib
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.job import PlanRequest, solve

from eprt.ep.migration.job import MigrationJob
from eprt.serve.errors import ApiError
from eprt.serve.flags import parse_options
from eprt.serve.ranks.messages import RoutingReply
from eprt.serve.ranks.roster import NewView
from eprt.serve.rebalance import rebalancer as rebalance
from eprt.serve.rebalance.migration import placement_after
from tests.unit.cases import MODEL
from tests.unit.serve.rebalance.cases import CURRENT, observe, rebalancer_of, snapshot


def test_a_load_file_has_the_windows_that_its_sample_speaks_of():
    """A window that ends while the ranks are asked for their samples is in all parts of the file, or in none."""

    async def ask_routing() -> list[RoutingReply]:
        observe(rebalancer, 4)
        chosen_LAK, step_A = np.array([[[0], [-1]]], np.int8), np.array([2, 4])
        return [RoutingReply(chosen_LAK.shape, 1, chosen_LAK.tobytes(), step_A.tobytes())] * 2

    rebalancer = rebalancer_of(ask_routing=ask_routing)
    for step in (1, 2, 3):
        observe(rebalancer, step)
    with np.load(io.BytesIO(asyncio.run(rebalancer.load_file()))) as file:
        assert len(file["load"]) == len(file["load_prefill"]) == len(file["load_decode"]) == 3
        assert file["topk_idx"].tolist() == [[[0], [-1], [0], [-1]]]
        assert file["topk_window"].tolist() == [[0, 2, 0, 2]] and file["topk_step"].tolist() == [[2, 4, 2, 4]]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_what_is_planned_when_balancing_is_switched_off_is_not_carried_out(monkeypatch, mode):
    jobs = []
    rebalancer = rebalancer_of(migrate=jobs.append)

    async def plan_apart(request: PlanRequest):
        if mode != "auto":
            await rebalancer.post(json.dumps({"mode": mode}).encode())
        return solve(request)

    async def decide(*_):
        return SimpleNamespace(migrate=True)

    monkeypatch.setattr(rebalance, "solve_apart", plan_apart)
    monkeypatch.setattr(rebalancer, "_decide", decide)
    target = Placement(np.array([[1, 0, 2, 1]]), num_gpus=2)
    controller = rebalancer.controller
    monkeypatch.setattr(controller, "due", lambda now_s: True)
    monkeypatch.setattr(controller, "plan_request", lambda placement, trace: PlanRequest(placement, target))

    async def close_window() -> None:
        await rebalancer._close_window()
        if rebalancer._following is not None:
            rebalancer._following.cancel()

    asyncio.run(close_window())
    assert len(jobs) == (mode == "auto")


def test_nodes_of_unequal_sizes_are_planned_as_one():
    """A placement's nodes all have equally many ranks: of others it would tell the wrong ones."""
    rows = ((0, 1), (2, 0), (1, 2), (0, 1))
    for node_of_rank, num_nodes in (((0, 0, 1, 1), 2), ((0, 0, 0, 1), 1), ((0, 1, 0, 1), 1), ((0, 0, 0, 0), 1)):
        assert rebalancer_of(rows, node_of_rank).placement.num_nodes == num_nodes


def test_a_dry_run_needs_no_room_to_move(monkeypatch):
    rebalancer = rebalancer_of()
    for info in rebalancer._pool.infos:
        monkeypatch.setattr(info, "spare_experts", 0)
    monkeypatch.setattr(rebalancer.controller, "due", lambda now_s: True)
    for step in (1, 2, 3, 4):
        observe(rebalancer, step)
    monkeypatch.setattr(rebalancer, "_snapshot", lambda: snapshot(5))

    async def solve_here(request: PlanRequest):
        return solve(request)

    monkeypatch.setattr(rebalance, "solve_apart", solve_here)

    async def looks() -> None:
        for mode in ("dry-run", "auto"):
            rebalancer._set_mode(mode)
            await rebalancer._close_window()
        await rebalancer.post(b'{"dry_run": true}')
        with pytest.raises(ApiError, match="--spare-experts 0"):
            await rebalancer.post(b"{}")

    asyncio.run(looks())
    assert [decision["asked_by"] for decision in rebalancer.decisions] == ["dry-run", "posted"]


def test_after_a_plan_that_failed_the_next_waits_longer(monkeypatch):
    rebalancer, asked = rebalancer_of(), []
    for step in (1, 2, 3, 4):
        observe(rebalancer, step)

    async def fails(request: PlanRequest):
        asked.append(clock[0])
        raise ApiError(500, "no plan within 120 s", code="planning_failed")

    clock = [0.0]
    monkeypatch.setattr(rebalance, "solve_apart", fails)
    monkeypatch.setattr(rebalance.time, "monotonic", lambda: clock[0])
    snapshots = iter(range(5, 100))
    monkeypatch.setattr(rebalancer, "_snapshot", lambda: snapshot(next(snapshots)))

    async def looks() -> None:
        for clock[0] in range(16):
            with contextlib.suppress(ApiError):
                await rebalancer._close_window()

    asyncio.run(looks())
    assert asked == [0, 1, 3, 7, 15]


@pytest.mark.parametrize("routing, num_jobs", [("batch", 1), ("weights", 0)])
def test_new_speeds_for_the_placement_that_serves_reach_the_ranks_that_split_by_them(monkeypatch, routing, num_jobs):
    jobs: list[MigrationJob] = []
    rebalancer = rebalancer_of(migrate=jobs.append)
    rebalancer._options = parse_options(["--model", str(MODEL), "--replica-routing", routing])

    async def solve_here(request: PlanRequest):
        return solve(request)

    monkeypatch.setattr(rebalance, "solve_apart", solve_here)

    async def posts() -> None:
        serves = {"physical_to_logical_map": CURRENT.physical_to_logical_map.tolist()}
        await rebalancer.post(json.dumps(serves).encode())
        assert not jobs and rebalancer.status()["migration"]["state"] == "done"
        await rebalancer.post(json.dumps({**serves, "rank_speeds": [1, 0.5]}).encode())
        state = rebalancer.status()["migration"]["state"]
        assert (len(jobs), state) == (num_jobs, "running" if num_jobs else "done")
        if rebalancer._following is not None:
            rebalancer._following.cancel()

    asyncio.run(posts())
    for job in jobs:
        assert job.rank_speeds == (1.0, 0.5) and job.weights == {0: (0.5, 1.0, 1.0, 0.5)}
        after = placement_after(CURRENT, job, 1, CURRENT)
        np.testing.assert_array_equal(after.physical_to_logical_map, CURRENT.physical_to_logical_map)
        np.testing.assert_array_equal(after.weight_LP, CURRENT.weight_LP)


def test_a_view_ends_the_migration_under_way_and_its_placement_serves():
    async def run() -> None:
        rebalancer = rebalancer_of(migrate=lambda job: None)
        target = Placement(np.array([[1, 0, 2, 1]]), num_gpus=2)
        rebalancer._start_migration(solve(PlanRequest(CURRENT, target)), rebalancer.placement)
        assert rebalancer.is_migrating
        before, view = rebalancer.server_id, NewView(3, (True, False), (), [[0, 1, 2, 0]], 8)
        rebalancer.enter_view(view)
        migration = rebalancer.migration
        assert migration is not None and (migration.state, migration.reason) == ("rolled_back", "view 3 began")
        assert rebalancer.placement.epoch == migration.epoch == 8 and rebalancer.ended["rolled_back"] == 1
        assert rebalancer.placement.physical_to_logical_map.tolist() == [[0, 1, 2, 0]]
        assert rebalancer.server_id == before
        await rebalancer.close()  # the task that followed the migration does not break the stop
        rebalancer.enter_view(NewView(4, (True, True), (1,), [[0, 1, 2, 0]], 9))
        assert rebalancer.server_id != before, "a returned rank counts from 0"

    asyncio.run(run())


def test_experts_do_not_move_while_a_rank_is_missing():
    rebalancer = rebalancer_of(migrate=None)
    rebalancer._pool.roster.is_whole = False  # type: ignore[misc]
    with pytest.raises(ApiError, match="when every rank takes part") as caught:
        asyncio.run(rebalancer.post(b"{}"))
    assert caught.value.code == "ranks_missing" and not rebalancer._may_plan


def test_a_plan_for_ranks_that_have_changed_since_is_not_carried_out():
    rebalancer = rebalancer_of(migrate=None)
    target = Placement(np.array([[1, 0, 2, 1]]), num_gpus=2)
    answer, before = solve(PlanRequest(CURRENT, target)), rebalancer.placement
    rebalancer.enter_view(NewView(1, (True, True), (1,), [[0, 1, 2, 0]], 1))
    with pytest.raises(ApiError, match="the ranks have changed"):
        rebalancer._start_migration(answer, before)


def test_a_rank_that_leaves_hands_its_experts_over_first(monkeypatch):
    """Others get what only it holds; where experts cannot move now, it leaves all the same."""
    jobs: list[MigrationJob] = []
    rebalancer = rebalancer_of(((0, 1, -1), (2, 0, -1)), migrate=jobs.append)
    monkeypatch.setattr(rebalancer, "_follow", lambda job, target: asyncio.sleep(0))

    async def plan_apart(request: PlanRequest):
        return solve(request)

    monkeypatch.setattr(rebalance, "solve_apart", plan_apart)
    asyncio.run(rebalancer.hand_over(1))
    (job,) = jobs
    assert job.rounds[-1].rows == {0: (0, 1, 2, 2, 0, -1)}
    rebalancer.enter_view(NewView(1, (True, True), (), [[0, 1, 2, 2, 0, -1]], 9))
    asyncio.run(rebalancer.hand_over(1))
    rebalancer._pool.roster.is_whole = False  # type: ignore[misc]
    rebalancer.enter_view(NewView(2, (True, True), (), [[0, 1, -1, 2, 0, -1]], 10))
    asyncio.run(rebalancer.hand_over(1))
    assert len(jobs) == 1
