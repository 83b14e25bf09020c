"""What test_migration.py runs on every rank: experts that move while an engine generates."""

from collections.abc import Sequence

import numpy as np
from eprt.balancer.migration import Round, count_moves

from eprt import EPGroup
from eprt.engine.engine import Engine
from eprt.ep.migration.job import MigrationJob
from eprt.ep.migration.pace import Pace
from tests.ranks import cases_routing
from tests.ranks.cases_migration_failures import damage, damage_between_peers, deadline_and_cancel
from tests.ranks.migrating_engine import (
    add_requests,
    check_memory,
    check_weights,
    everyones_digests,
    make_engine,
    make_job,
    random_target,
    run,
)


def same_tokens(
    group: EPGroup,
    directory: str,
    exact: bool,
    texts: Sequence[str] = (),
    num_requests: int = 6,
    max_tokens: int = 80,
    num_layers: int = 2,
    **options,
) -> None:
    """The tokens of every step are those of a run without migrations, whatever moves: all of num_layers layers."""
    engine = make_engine(group, directory, **options)
    add_requests(engine, num_requests, max_tokens, texts)
    want = run(engine)
    engine.close()
    engine = make_engine(group, directory, **options)
    weights = everyones_digests(group, engine)
    add_requests(engine, num_requests, max_tokens, texts)
    assert len(engine.migrator.rows) == num_layers
    expert_bytes = engine.model.moe_layers()[0].pool.expert_bytes
    engine.migrator._pace = Pace(share=100.0)  # chunks as large as the job says, however fast the machine
    rng = np.random.default_rng(7)  # the same on all ranks
    num_jobs = 0

    def between(step: int) -> None:
        nonlocal num_jobs
        migrator = engine.migrator
        if not migrator.active and engine.has_work_anywhere and step % 3 == 0:
            num_jobs += 1
            target = random_target(rng, migrator.rows)
            if num_jobs % 2:  # few moves: many jobs, each soon done
                target[1:] = np.array(migrator.rows)[1:]
            chunk_bytes = (1 << 20, expert_bytes, expert_bytes // 3 + 1)[num_jobs % 3]
            speeds = tuple(0.5 + 0.5 * ((num_jobs + rank) % 3 > 0) for rank in range(group.size))
            migrator.offer(make_job(engine, num_jobs, target, chunk_bytes=chunk_bytes, rank_speeds=speeds))

    engine.has_work_anywhere = True
    got = run_in_step(engine, group, between)
    status = engine.migrator.status()
    assert num_jobs >= 2 and status.epoch >= 5, (num_jobs, status)
    assert status.state == "done" and (status.received_bytes > 0 or group.size == 1), status
    assert not exact or got == want, "tokens changed"
    if engine._router is not None:
        speeds = group.allgather(engine._router.rank_speeds)
        assert set(speeds[0]) == {0.5, 1.0} and len(set(speeds)) == 1, speeds
    check_weights(engine, weights)
    check_memory(engine, 2)
    assert len({str(rows) for rows in group.allgather(engine.migrator.rows)}) == 1
    engine.close()


def run_in_step(engine: Engine, group: EPGroup, between) -> list:
    """run(), with the ranks agreeing on whether any has work, so that all offer in the same steps."""

    def agreed(step: int) -> None:
        engine.has_work_anywhere = any(group.allgather(engine.has_work))
        between(step)

    return run(engine, agreed)


def idle_ranks_move_too(group: EPGroup, directory: str) -> None:
    """Without a single request: the ranks stay awake for the migration, and only for it. Nothing travels twice: a node
    gets an expert in one message, whatever number of its ranks want it."""
    engine = make_engine(group, directory)
    weights, migrator = everyones_digests(group, engine), engine.migrator
    target = random_target(np.random.default_rng(1), migrator.rows)
    job = make_job(engine, 1, target, chunk_bytes=1 << 20)
    isend, num_messages = group.isend, 0

    def counted(buffer, peer, tag):
        nonlocal num_messages
        num_messages += tag == migrator._transport._tag
        return isend(buffer, peer, tag)

    group.isend = counted
    migrator.offer(job)
    run(engine)
    group.isend = isend
    assert migrator.status().state == "done" and engine.stats().num_steps == 0
    assert migrator.rows == target.tolist() and engine.step().all_idle
    moves, expert_bytes = count_moves(job.rounds, group.node_of_rank), engine.model.moe_layers()[0].pool.expert_bytes
    assert (moves["network"] > 0) == (group.num_nodes > 1)
    assert sum(group.allgather(num_messages)) == moves["network"]
    assert sum(group.allgather(migrator.status().received_bytes)) == sum(moves.values()) * expert_bytes
    check_weights(engine, weights)
    engine.close()


def memory_cap(group: EPGroup, directory: str) -> None:
    """With room for one expert only one arrives at a time; a job that needs more is refused by every rank alike."""
    engine = make_engine(group, directory, spare_experts=1, num_redundant_experts=0)
    target = random_target(np.random.default_rng(2), engine.migrator.rows)
    engine.migrator.offer(make_job(engine, 1, target, spare=3))
    run(engine)
    status = engine.migrator.status()
    assert status.state == "refused" and "experts at once and has room for 1" in status.reason, status
    assert status.epoch == 0 and not status.used_bytes
    engine.migrator.offer(make_job(engine, 2, target, spare=1))
    run(engine)
    assert engine.migrator.status().state == "done" and engine.migrator.rows == target.tolist()
    check_memory(engine, 1)
    engine.close()


def refusals(group: EPGroup, directory: str) -> None:
    """Jobs for another placement, or that would lose an expert, change nothing."""
    engine = make_engine(group, directory)
    rows = engine.migrator.rows
    lost = [list(row) for row in rows]
    lost[1][lost[1].index(3)] = 4
    no_way = [list(row) for row in rows]
    no_way[0][-1] = 0
    for job_id, (job, reason) in enumerate(
        (
            (MigrationJob(1, 5, ()), "starts from placement 5, but 0 serves"),
            (MigrationJob(2, 0, (Round({1: tuple(lost[1])}, ()),)), "layer 1: expert 3 has no slot"),
            (
                MigrationJob(3, 0, (Round({0: tuple(no_way[0])}, ()),)),
                f"layer 0: expert 0 does not reach rank {group.size - 1}",
            ),
            (MigrationJob(4, 0, (Round({9: tuple(rows[0])}, ()),)), "layer 9 is not one of the 2 MoE layers"),
            (MigrationJob(5, 0, (Round({0: (0, 1)}, ()),)), "layer 0 has 2 slots"),
            (MigrationJob(6, 0, (), chunk_bytes=0), "chunk_bytes=0: must be in 1.."),
            (MigrationJob(7, 0, (), chunk_bytes=1 << 40), "chunk_bytes=1099511627776: must be in 1.."),
        ),
        1,
    ):
        engine.migrator.offer(job)
        run(engine)
        status = engine.migrator.status()
        assert (status.job_id, status.state, status.epoch) == (job_id, "refused", 0), status
        assert reason in status.reason, status
        assert engine.migrator.rows == rows
    engine.close()


def one_way(group: EPGroup, directory: str, exact: bool = True) -> None:
    same_tokens(group, directory, exact)
    same_tokens(group, directory, exact, replica_routing="local", num_redundant_experts=9)
    if group.size == 4:  # routing.py's own cases run on any number
        same_tokens(group, directory, exact, replica_routing="batch", num_redundant_experts=9)
    if group.size > 1:
        idle_ranks_move_too(group, directory)
        memory_cap(group, directory)
        refusals(group, directory)
        damage(group, directory)
        if group.num_nodes == 1 and directory.endswith("fp8"):  # scales travel too
            same_tokens(group, directory, exact, between_peers=True)
            same_tokens(group, directory, exact, between_peers=True, quantization="int8")
            damage_between_peers(group, directory)
        deadline_and_cancel(group, directory)


def demo_model(group: EPGroup, directory: str, texts: Sequence[str], num_drafts: int) -> None:
    """The demo model; with drafts the MTP layer's experts move too, and all ranks' counts choose among replicas."""
    num_layers, routing = 3 + (num_drafts > 0), "batch" if num_drafts else "weights"
    options = {
        "replica_routing": routing,
        "num_requests": 3,
        "max_tokens": 30 * (1 + num_drafts),
        "num_speculative_tokens": num_drafts,
    }
    same_tokens(group, directory, True, texts, num_layers=num_layers, num_redundant_experts=4, **options)


def run_all(
    group: EPGroup,
    directories: list[str],
    exact: bool = True,
    demo: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> None:
    """demo: the demo model in bf16, whose drafts are used, and in fp8, whose are not."""
    cases_routing.all_cases(group)
    for directory in directories:
        one_way(group, directory, exact)
    for directory, num_drafts in zip(demo, (2, 0)):
        demo_model(group, directory, texts, num_drafts)
