"""The rebalancer's flags, and the body of POST /v1/eprt/rebalance."""

import asyncio
import contextlib
import io
import json
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.controller import ServerSnapshot
from eprt.balancer.job import PlanRequest, solve
from eprt.balancer.migration import Round

from eprt.ep.migration.job import MigrationJob
from eprt.serve.errors import ApiError
from eprt.serve.flags import parse_options
from eprt.serve.ranks.messages import RoutingReply
from eprt.serve.rebalance import rebalancer as rebalance
from eprt.serve.rebalance.migration import placement_after
from eprt.serve.rebalance.rebalancer import Rebalancer
from eprt.serve.rebalance.request import RebalanceRequest, parse_rebalance
from tests.unit.cases import MODEL

CURRENT = Placement(np.array([[0, 1, 2, 0]]), num_gpus=2)
ROW = {"physical_to_logical_map": [[1, 2, 0, 2]]}


@pytest.mark.parametrize(
    "body, want",
    [
        (b"", RebalanceRequest()),
        (b"{}", RebalanceRequest()),
        (b'{"dry_run": true, "max_moves_per_layer": 3}', RebalanceRequest(dry_run=True, max_moves_per_layer=3)),
        (b'{"cancel": true}', RebalanceRequest(cancel=True)),
        (b'{"mode": "dry-run"}', RebalanceRequest(mode="dry-run")),
    ],
)
def test_what_can_be_asked(body, want):
    assert parse_rebalance(body, CURRENT) == want


def test_a_placement_file_is_a_body_with_or_without_its_options():
    rows = [[1, 2, 0, 1]]
    for body in ({"placement": {"physical_to_logical_map": rows}}, {"physical_to_logical_map": rows, "dry_run": True}):
        request = parse_rebalance(json.dumps(body).encode(), CURRENT)
        assert request.target is not None and request.target.physical_to_logical_map.tolist() == rows
        assert request.dry_run == ("dry_run" in body)


@pytest.mark.parametrize(
    "body, words",
    [
        ({"mode": "on"}, "mode='on': must be off, auto or dry-run"),
        ({"mode": ["auto"]}, "mode=['auto']: must be off, auto or dry-run"),
        ({"mode": "auto", "cancel": True}, "cancel stands alone"),
        ({"mode": "auto", "max_moves_per_layer": 2}, "mode stands alone"),
        ({"dry_run": 1}, "dry_run=1: must be true or false"),
        ({"max_moves_per_layer": True}, "max_moves_per_layer=True: must be an integer"),
        (
            {"placement": {"physical_to_logical_map": [[0, 1, 2, 3]]}},
            "slot 3] = 3: this model has experts 0..2",
        ),
        ({"placement": {"physical_to_logical_map": [[0, 1, 2, 0]], "epochs": 1}}, "unknown field 'epochs'"),
        ({"rank_speeds": [1, 0.5]}, "belongs to a placement"),
        ({"placement": {"physical_to_logical_map": [[1, 2, 0, 1]]}, "rank_speeds": [1]}, "a list of 2 numbers"),
        ({"placement": {"physical_to_logical_map": [[1, 2, 0, 1]]}, "rank_speeds": [1, 0]}, "rank_speeds[rank 1] = 0"),
        ({**ROW, "rank_speeds": [1, 10**400]}, "rank_speeds[rank 1] = 1000"),
        ({"max_moves_per_layer": 10**4000}, "max_moves_per_layer=1000"),
        ({**ROW, "slot_weight": [[1, 1, 1, 10**400]]}, "slot_weight must be equally long lists of numbers"),
        ({**ROW, "slot_weight": [["1", "0.5", "1", "0.5"]]}, "slot_weight must be equally long lists of numbers"),
        ({**ROW, "slot_weight": [[True, True, True, False]]}, "slot_weight must be equally long lists of numbers"),
        ({**ROW, "epoch": True}, "epoch=True: must be an integer"),
        ({**ROW, "max_moves_per_layer": 1}, "a posted placement is reached in full"),
        ({**ROW, "placement": ROW}, "placement and physical_to_logical_map"),
        ([], "must be a JSON object, not list"),
        (b'{"dry_run": true, "dry_run": false}', "twice in one object"),
        (b'{"mode": "\xff"}', "the body is not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_what_cannot_be_asked_is_named(body, words):
    with pytest.raises(ApiError) as caught:
        parse_rebalance(body if isinstance(body, bytes) else json.dumps(body).encode(), CURRENT)
    assert caught.value.status == 400 and words in caught.value.message


def snapshot(step: int) -> ServerSnapshot:
    """The counters as they are after so many steps, one a second."""
    return ServerSnapshot("server", float(step), np.full((2, 1, 3), 1000 * step), step, 0.0, 0, 0)


def observe(rebalancer: Rebalancer, step: int) -> None:
    rebalancer.controller.observe(snapshot(step))


def rebalancer_of(
    rows: Sequence[Sequence[int]] = ((0, 1), (2, 0)), node_of_rank=(0, 0), *, ask_routing=None, migrate=None
) -> Rebalancer:
    """Of ranks that serve CURRENT, or hold these experts."""
    shape = {"moe_layers": (0,), "node_of_rank": node_of_rank, "num_experts": 3, "expert_bytes": 1, "spare_experts": 1}
    infos = [SimpleNamespace(expert_of_slot=[row], **shape) for row in rows]
    stats = [
        SimpleNamespace(expert_tokens=np.ones((2, 1, 3), np.int64).tobytes(), num_steps=1, migration=None)
        for _ in infos
    ]
    pool = SimpleNamespace(
        infos=infos, stats=stats, state="serving", num_ranks=len(rows), ranks={}, check_open=lambda: None,
        ask_routing=ask_routing, migrate=migrate,
    )  # fmt: skip
    options = parse_options(["--model", str(MODEL), "--rebalance", "auto"])
    return Rebalancer(options, pool, lambda: np.ones(len(rows)))  # type: ignore[arg-type]


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


def test_a_layer_that_a_migration_did_not_come_to_keeps_its_weights():
    """Rolled back in its second round: the first layer is there, the second half way, the third as it was."""
    row, half, new = (0, 1, 0, 2), (1, 1, 0, 2), (1, 0, 0, 2)
    before = Placement(np.array([row] * 3), num_gpus=2, slot_weight=np.array([[0.9, 1, 0.1, 1]] * 3))
    target = Placement(np.array([new] * 3), num_gpus=2)
    rounds = (Round({0: new, 1: half}, ()), Round({1: new, 2: new}, ()))
    job = MigrationJob(1, 0, rounds, {layer: (1, 0.7, 0.3, 1) for layer in range(3)})
    for rounds_done, rows, weights in (
        (0, [row, row, row], [[0.9, 1, 0.1, 1]] * 3),
        (1, [new, half, row], [[1, 0.7, 0.3, 1], [0.5, 0.5, 1, 1], [0.9, 1, 0.1, 1]]),
        (2, [new, new, new], [[1, 0.7, 0.3, 1]] * 3),
    ):
        after = placement_after(before, job, rounds_done, target)
        assert after.physical_to_logical_map.tolist() == list(map(list, rows)) and after.epoch == rounds_done
        np.testing.assert_allclose(after.weight_LP, weights)
