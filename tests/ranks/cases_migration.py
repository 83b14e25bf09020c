"""What test_migration.py runs on every rank: experts that move while an engine generates, and what may go wrong."""

import os
import signal
import time
import zlib
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
from eprt.balancer.migration import Round, count_moves, schedule_rounds

from eprt import EPGroup, SamplingParams
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.tokenizer import Tokenizer
from eprt.ep.errors import EPError
from eprt.ep.migration import migrator as migration
from eprt.ep.migration.job import MigrationJob
from eprt.ep.migration.pace import Pace
from tests.ranks import cases_routing
from tests.ranks.shared_copies import share_experts

VOCAB = 128


def make_engine(group: EPGroup, directory: str, *, between_peers: bool = False, **options) -> Engine:
    """between_peers: experts travel as between GPUs."""
    options = {"kv_cache_gb": 0.01, "num_redundant_experts": 6, "chunk_size": 24, **options}
    engine = Engine(EngineConfig(directory, **options), group)
    if between_peers:
        share_experts(engine)
    return engine


def add_requests(engine: Engine, num_requests: int = 6, max_tokens: int = 80, texts: Sequence[str] = ()) -> None:
    """Greedy and sampled, with prompts that take several chunks. texts: the prompts, instead of random ones."""
    rng = np.random.default_rng(engine.group.rank)
    tokenizer = Tokenizer(engine.config.model_dir) if texts else None
    for i in range(num_requests):
        if tokenizer is not None:
            prompt = tokenizer.encode(texts[(i + engine.group.rank) % len(texts)])
        else:
            prompt = rng.integers(2, VOCAB, rng.integers(1, 60)).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        engine.add_request(f"{i}", prompt, params)


def run(engine: Engine, between: Callable[[int], None] = lambda step: None, max_steps: int = 5000) -> list:
    """(request, token) of every computing step; `between` is called before each."""
    steps = []
    for step in range(max_steps):
        between(step)
        result = engine.step()
        if result.outputs:
            steps.append(sorted((output.request_id, output.token_id) for output in result.outputs))
        if result.all_idle:
            return steps
    raise AssertionError(f"not idle after {max_steps} steps: {engine.migrator.status()}")


def random_target(rng: np.random.Generator, rows: list[list[int]]) -> np.ndarray:
    """Another valid placement of the same slots: permuted, with other replicas, sometimes with empty slots."""
    num_experts = max(map(max, rows)) + 1
    target = []
    for row in rows:
        spare = rng.integers(-1, num_experts, len(row) - num_experts)
        target.append(rng.permutation(np.concatenate([np.arange(num_experts), spare])))
    return np.array(target)


def make_job(engine: Engine, job_id: int, target_LP, spare: int = 2, **options) -> MigrationJob:
    migrator = engine.migrator
    rounds = schedule_rounds(np.array(migrator.rows), target_LP, engine.group.node_of_rank, spare)
    return MigrationJob(
        job_id, migrator.status().epoch, tuple(rounds), **{"chunk_bytes": 5000, "timeout_s": 20.0, **options}
    )


def digests(engine: Engine) -> dict:
    """(layer, expert) -> the bytes of the expert as this rank holds it; equal in all of its slots."""
    found = {}
    for row, layer in enumerate(engine.model.moe_layers()):
        for expert, buffer in zip(layer.expert_of_slot, layer.weight_buffers()):
            assert (expert >= 0) == (buffer >= 0)
            if expert >= 0:
                content = b"".join(part[buffer].cpu().numpy().tobytes() for part in layer.pool.parts)
                assert found.setdefault((row, expert), content) == content
    return found


def check_weights(engine: Engine, want: dict) -> None:
    for key, content in digests(engine).items():
        assert content == want[key], f"layer, expert {key} is damaged on rank {engine.group.rank}"


def check_memory(engine: Engine, spare: int) -> None:
    """Every weight buffer is used by a slot or free; as many are free as there are spare ones and slots without."""
    layers = engine.model.moe_layers()
    pool = layers[0].pool
    used = [{s for s in layer.weight_buffers() if s >= 0} for layer in layers]
    assert len(set().union(*used)) == sum(map(len, used)), "two layers share a weight buffer"
    num_slots = sum(len(layer.weight_buffers()) for layer in layers)
    assert pool.num_free + sum(map(len, used)) == num_slots + spare
    status = engine.migrator.status()
    assert status.used_bytes <= spare * pool.expert_bytes == status.cap_bytes < status.buffer_bytes


def everyones_digests(group: EPGroup, engine: Engine) -> dict:
    return {key: content for part in group.allgather(digests(engine)) for key, content in part.items()}


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


def damage(group: EPGroup, directory: str) -> None:
    """A chunk that arrives damaged, be it in the weights or, one chunk for the whole expert, in their scales: all roll
    back, the old placement serves, and the next try succeeds."""
    engine = make_engine(group, directory)
    weights = everyones_digests(group, engine)
    pool = engine.model.moe_layers()[0].pool
    sizes = [part.shape[1] for part in pool.parts]
    assert len(sizes) == (4 if pool.weight_format == "fp8" else 2)
    places = [(5000, 17)] + [(1 << 20, sum(sizes[: 1 + k]) + 3) for k in range(0, len(sizes) - 1, 2) if len(sizes) > 2]
    transport, before = engine.migrator._transport, engine.migrator.rows
    target = random_target(np.random.default_rng(3), before)
    receive = transport.receive
    add_requests(engine, 2)
    for job_id, (chunk_bytes, place) in enumerate(places, 1):
        num_taken = 0

        def receive_damaged(tick, tag, chunk, place=place):
            nonlocal num_taken
            num_taken += 1
            if group.rank == 1 and num_taken == 1:
                transport._chunk(tick, chunk.stream)[64 + place] ^= 1
            receive(tick, tag, chunk)

        transport.receive = receive_damaged
        engine.migrator._pace = Pace()  # as if idle for long: nothing makes the chunks smaller
        engine.migrator.offer(make_job(engine, job_id, target, chunk_bytes=chunk_bytes))
        run(engine)
        status = engine.migrator.status()
        assert status.state == "rolled_back" and "a chunk arrived damaged, says rank" in status.reason, status
        assert all(other == status.epoch for other in group.allgather(status.epoch))
        check_weights(engine, weights)
        check_memory(engine, 2)
    transport.receive = receive
    engine.migrator.offer(make_job(engine, 9, target))
    run(engine)
    assert engine.migrator.status().state == "done" and engine.migrator.rows == target.tolist()
    check_weights(engine, weights)
    engine.close()


def damage_between_peers(group: EPGroup, directory: str) -> None:
    """A copy that loses or changes a byte, or brings what was never announced: all roll back, and while the copies of
    the others are still under way nothing of them is used; the next try succeeds."""
    engine = make_engine(group, directory)
    copies = share_experts(engine)
    weights, migrator = everyones_digests(group, engine), engine.migrator
    target = random_target(np.random.default_rng(3), migrator.rows)
    num_fetched = 0

    def change_a_byte(fetches) -> None:
        nonlocal num_fetched
        num_fetched += 1
        if group.rank == 1 and num_fetched == 1:
            fetches[-1].to[-1] ^= 1

    def lose_a_piece(fetches) -> None:
        nonlocal num_fetched
        num_fetched += 1
        if group.rank == 1 and num_fetched == 1:
            fetches[0].to[: len(fetches[0].to) // 2] = 0

    for job_id, damage in enumerate((change_a_byte, lose_a_piece), 1):
        num_fetched, copies.damage = 0, damage
        migrator.offer(make_job(engine, job_id, target, chunk_bytes=None))
        run(engine)
        status = migrator.status()
        assert status.state == "rolled_back" and "a chunk arrived damaged, says rank 1" in status.reason, status
        assert group.allgather((status.epoch, migrator.rows)) == [(status.epoch, migrator.rows)] * group.size
        check_weights(engine, weights)
        check_memory(engine, 2)
    copies.damage = lambda fetches: None
    migrator.offer(make_job(engine, 9, target, chunk_bytes=None))
    run(engine)
    assert migrator.status().state == "done" and migrator.rows == target.tolist()
    check_weights(engine, weights)
    engine.close()


class StepClock:
    """The migrator's time: a millisecond passes with each step, so that a deadline passes in the same step on every
    rank, however crowded the machine. Messages get that millisecond too."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def step(self, step: int = 0) -> None:
        self.now_s += 0.001
        time.sleep(0.001)

    def __getattr__(self, name: str):
        return getattr(time, name)


def deadline_and_cancel(group: EPGroup, directory: str) -> None:
    clock = StepClock()
    with patch.object(migration, "time", clock):
        fails_in_time(group, directory, clock)


def fails_in_time(group: EPGroup, directory: str, clock: StepClock) -> None:
    """A rank whose chunks do not leave in time, a round that takes too long, a rank that is told to stop, a connection
    that breaks: all roll back in the same step, and say why."""
    engine = make_engine(group, directory)
    weights, migrator, before = everyones_digests(group, engine), engine.migrator, engine.migrator.rows
    transport, blamed = migrator._transport, 2 % group.size
    target = random_target(np.random.default_rng(4), before)
    is_done = transport.is_done

    def fails(job_id: int, reason: str, between=clock.step, **options) -> None:
        migrator.offer(make_job(engine, job_id, target, **options))
        run(engine, between)
        status = migrator.status()
        assert (status.job_id, status.state, status.epoch) == (job_id, "rolled_back", 0), status
        assert reason in status.reason and status.reason == group.allgather(status.reason)[0], status
        assert migrator.rows == before
        check_memory(engine, 2)

    if group.rank == blamed:
        transport.is_done = lambda: is_done() and not migrator._job
    start_s = clock.now_s
    fails(1, f"not left when the deadline passed, says rank {blamed}", timeout_s=0.3)
    assert 0.29 < clock.now_s - start_s < 0.5
    if group.rank == blamed:
        transport.is_done = lambda: broken() if migrator._job else is_done()
    fails(2, f"a connection between ranks broke, says rank {blamed} in round 1 of ")
    transport.is_done = is_done
    fails(3, "deadline", timeout_s=0.02, chunk_bytes=64)  # between nodes a chunk may be under way
    fails(4, "it was cancelled, says rank 0", lambda step: migrator.cancel(4 * (group.rank == 0 and step == 4)))
    never_begins(group, engine, target, clock)
    check_weights(engine, weights)
    add_requests(engine, 2)
    run(engine)
    engine.close()


def broken() -> bool:
    raise ConnectionError("broken on purpose")


def never_begins(group: EPGroup, engine: Engine, target: np.ndarray, clock: StepClock) -> None:
    """Offers that not all ranks can take up are given up by all, also by a rank that is told only afterwards."""
    migrator, last = engine.migrator, group.size - 1

    def given_up(job_id: int, reason: str) -> None:
        status = migrator.status()
        assert (status.job_id, status.state) == (job_id, "rolled_back") and reason in status.reason, status
        assert not migrator.active and status.epoch == 0

    if group.rank != last:
        migrator.offer(make_job(engine, 11, target, timeout_s=0.1))
    run(engine, clock.step)
    assert migrator.status().job_id == 11 - 7 * (group.rank == last)
    if group.rank == last:
        migrator.offer(make_job(engine, 11, target))
    given_up(11, f", having waited for rank {last}")
    if group.rank == 0:
        migrator.cancel(12)
    migrator.offer(make_job(engine, 12, target))
    run(engine)
    given_up(12, "it was cancelled, says rank 0")
    is_quiet = migrator._transport.is_quiet
    migrator._transport.is_quiet = lambda: group.rank == 0 and is_quiet()
    migrator.offer(make_job(engine, 13, target, timeout_s=0.1))
    run(engine, clock.step)
    given_up(13, "the deadline of the round passed, says rank")
    migrator._transport.is_quiet = lambda: is_quiet() if group.rank else broken()
    migrator.offer(make_job(engine, 14, target))
    run(engine)
    given_up(14, "a connection between ranks broke, says rank 0")
    migrator._transport.is_quiet = is_quiet


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


def rank_dies(group: EPGroup, directory: str, at_step: int) -> None:
    """Rank 1 is killed in the middle of a round. The others learn of it in the same step, and all hold the placement
    from before the round, with every weight of theirs whole."""
    engine = make_engine(group, directory)
    weights = everyones_digests(group, engine)
    target = random_target(np.random.default_rng(5), engine.migrator.rows)
    add_requests(engine, 3, max_tokens=100)
    engine.migrator.offer(make_job(engine, 1, target, chunk_bytes=500))
    error = None
    try:
        for step in range(60):
            if step == at_step and group.rank == 1:
                assert engine.migrator.status().state == "running"
                os.kill(os.getpid(), signal.SIGKILL)
            before = (engine.migrator.rows, engine.migrator.status().epoch)
            engine.step()
    except EPError as caught:
        error = caught
    assert error is not None and "rank 1" in str(error), error
    status = engine.migrator.status()
    assert (engine.migrator.rows, status.epoch) == before, "a half-made placement"
    assert status.state == "rolled_back" and "rank 1" in status.reason and not engine.migrator.active, status
    check_weights(engine, weights)
    check_memory(engine, 2)
    digest = zlib.crc32(str(engine.migrator.rows).encode())
    print(f"SURVIVED with epoch {status.epoch} placement {digest}", flush=True)
    os._exit(0)  # nothing collective any more
