"""What test_migration.py runs on every rank: migrations that fail leave the old placement, with every weight whole."""

import os
import signal
import time
import zlib
from unittest.mock import patch

import numpy as np

from eprt import EPGroup
from eprt.engine.engine import Engine
from eprt.ep.errors import EPError
from eprt.ep.migration import migrator as migration
from eprt.ep.migration.pace import Pace
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
from tests.ranks.moments import Moments
from tests.ranks.shared_copies import share_experts


def damage(group: EPGroup, directory: str) -> None:
    """A chunk that arrives damaged, be it in the weights or, one chunk for the whole expert, in their scales: all roll
    back, the old placement serves, and the next try succeeds."""
    engine = make_engine(group, directory)
    weights = everyones_digests(group, engine)
    pool = engine.model.moe_layers()[0].pool
    sizes = [part.shape[1] for part in pool.parts]
    assert len(sizes) == (2 if pool.weight_format == "same" else 4)
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


def rank_dies(group: EPGroup, directory: str, at_step: int) -> None:
    """Rank 1 is killed in the middle of a round. The others learn of it in the same step, and all hold the placement
    from before the round, with every weight of theirs whole."""
    engine, moments = make_engine(group, directory), Moments(group)
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
    moments.close_apart(lost=1)
    digest = zlib.crc32(str(engine.migrator.rows).encode())
    print(f"SURVIVED with epoch {status.epoch} placement {digest}", flush=True)
    os._exit(0)  # nothing collective any more
