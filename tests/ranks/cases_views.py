"""What test_views.py runs on every rank: ranks that are killed in the midst of a step, and one that enters later.

A folder stands in for the frontend: survivors put their states there, and each one reads all of them.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from eprt import EPGroup
from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.outputs import TokenOutput
from eprt.ep.errors import EPError, ViewChangedError
from eprt.ep.group.view import View
from tests.ranks.cases_engine import requests
from tests.ranks.migrating_engine import check_memory, check_weights, everyones_digests, make_job
from tests.ranks.moments import PATIENCE_S

# Call of the victim's -> what it is killed in, how often that has gone well before.
MOMENTS: dict[str, tuple[str, int]] = {
    "prefill": ("dispatch_recv", 1),
    "decode": ("combine_send", 21),
    "header": ("all_gather", 3),
    "combine": ("combine_recv", 18),
    "entries": ("_meet", 1),
}


class Folder:
    """Files that appear whole."""

    def __init__(self, path: str):
        self.path = Path(path)

    def put(self, name: str, value: object) -> None:
        partial = self.path / f".{name}.{os.getpid()}"
        partial.write_text(json.dumps(value))
        partial.rename(self.path / name)

    def wait(self, name: str):
        deadline_s = time.monotonic() + PATIENCE_S
        while not (self.path / name).exists():
            assert time.monotonic() < deadline_s, f"no {name} in {PATIENCE_S:g} s"
            time.sleep(0.001)
        return json.loads((self.path / name).read_text())


class ViewRank:
    """A rank's engine and what its requests have got so far."""

    def __init__(self, group: EPGroup, directory: str, folder: str, **options):
        self.group, self.folder = group, Folder(folder)
        self.engine = Engine(EngineConfig(directory, **{"kv_cache_gb": 0.01, "page_size": 4, **options}), group)
        self.num_experts = self.engine.model.moe_layers()[0].config.num_experts
        self.tokens: dict[str, list[int]] = {}
        self.all = {str(i): given for i, given in enumerate(zip(*requests()))}

    def add(self, request_id: str, generated: list[int]) -> None:
        prompt, params = self.all[request_id]
        self.tokens[request_id] = list(generated)
        self.engine.add_request(request_id, prompt, params, generated=generated)

    def add_own(self) -> None:
        for request_id in self.all:
            if int(request_id) % self.group.size == self.group.rank:
                self.add(request_id, [])
        self.keep([])

    def keep(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.token_id >= 0:
                self.tokens[output.request_id].append(output.token_id)
        self.folder.put(f"tokens-{self.group.rank}", self.tokens)

    def step(self) -> bool:
        """False once all ranks are idle."""
        result = self.engine.step()
        self.keep(result.outputs)
        return not result.all_idle

    def run(self) -> None:
        while self.step():
            pass

    def change_view(self, view: View) -> None:
        """Suspends, and enters the view with its other ranks."""
        state = self.engine.suspend()
        self.keep(state.outputs)
        self.engine.check_integrity()
        number = view.number
        self.folder.put(f"state-{number}-{self.group.rank}", [state.expert_of_slot, state.epoch, state.placement_epoch])
        states = {rank: self.folder.wait(f"state-{number}-{rank}") for rank in view.ranks}
        rows = place([states[rank][0] if rank in states else None for rank in range(self.group.size)], self.num_experts)
        epoch, placement = (max(state[i] for state in states.values()) + 1 for i in (1, 2))
        self.engine.enter_view(view, rows, epoch, placement)
        assert [layer.slot_map.expert_of_slot_S.tolist() for layer in self.engine.model.moe_layers()] == rows

    def permuted(self, seed: int) -> np.ndarray:
        """Another placement: the experts of all ranks that take part change slots."""
        target = np.array(self.engine.migrator.rows)
        slots = np.repeat(self.group.view.alive, target.shape[1] // self.group.size)
        for row in target:
            row[slots] = np.random.default_rng(seed).permutation(row[slots])
        return target

    def take_over(self, lost: int, first: int) -> None:
        """The survivors share what the lost rank has not finished. first: the survivor that begins."""
        left = self.folder.wait(f"tokens-{lost}")
        survivors = self.group.view.ranks
        for i, (request_id, generated) in enumerate(sorted(left.items())):
            _, params = self.all[request_id]
            stopped = generated[-1:] and generated[-1] in self.engine.model.config.eos_token_ids
            ended = len(generated) >= params.max_tokens or (stopped and not params.ignore_eos)
            if survivors[(i + first) % len(survivors)] == self.group.rank and not ended:
                self.add(request_id, generated)
            elif self.group.rank == survivors[0] and ended:
                self.tokens[request_id] = generated
        self.keep([])


def place(held: list[list[list[int]] | None], num_experts: int) -> list[list[int]]:
    """What the ranks hold stays; what is missing goes into empty slots, then in place of replicas."""
    (some,) = [held_by for held_by in held if held_by is not None][:1]
    num_layers, per_rank = len(some), len(some[0])
    rows = []
    for layer in range(num_layers):
        row = [expert for of in held for expert in (of[layer] if of is not None else [-2] * per_rank)]
        missing = [expert for expert in range(num_experts) if expert not in row]
        for expert in missing:
            spare = [slot for slot, old in enumerate(row) if old == -1]
            spare += [slot for slot, old in enumerate(row) if old >= 0 and row.count(old) > 1]
            row[spare[0]] = expert
        rows.append([max(expert, -1) for expert in row])
    return rows


def die_in(rank: ViewRank, moment: str) -> None:
    """This process kills itself at the moment."""
    call, left = MOMENTS[moment]
    owner = {"all_gather": rank.engine._headers._gather, "_meet": rank.engine.runner}.get(call)

    def arm(owner: object) -> None:
        original: Callable = getattr(owner, call)

        def count(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, call, count)

    for each in [owner] if owner is not None else rank.engine.model.exchange.values():
        arm(each)


def one_after_the_other(
    group: EPGroup, directory: str, folder: str, moments: list[str], num_redundant: int, migrates: bool, **options
) -> None:
    """The last rank dies, then the one before it, ... until one is left, which ends all requests. migrates: experts are
    on their way all the time."""
    rank = ViewRank(group, directory, folder, num_redundant_experts=num_redundant, **options)
    weights = everyones_digests(group, rank.engine)
    rank.add_own()
    for number, moment in enumerate(moments, 1):
        victim = group.view.ranks[-1]
        if migrates:
            rank.engine.migrator.offer(make_job(rank.engine, number, rank.permuted(number), chunk_bytes=2000))
        if group.rank == victim:
            die_in(rank, moment)
        try:
            rank.run()
        except EPError as error:
            assert f"rank {victim} died" in str(error), error
        else:
            raise AssertionError(f"all requests ended before rank {victim} was killed: {moment}")
        rank.change_view(group.view.without(victim))
        rank.take_over(victim, first=victim)
        check_weights(rank.engine, weights)
    rank.run()
    rank.engine.check_integrity()
    if rank.engine.migrator is not None:
        check_memory(rank.engine, rank.engine.config.spare_experts)
    stats = rank.engine.stats()
    assert stats.kv_pages_used_now == 0 and not rank.engine.has_work, stats
    print("TOKENS", json.dumps(rank.tokens), flush=True)
    rank.engine.close()


def enters_and_leaves(group: EPGroup, directory: str, folder: str, **options) -> None:
    """The last rank gets ready by itself while the others serve, enters at a step boundary, and retires at another."""
    last = group.size - 1
    others = View(0, tuple(rank != last for rank in range(group.size)))
    group.view = View.alone(last, group.size) if group.rank == last else others
    rank = ViewRank(group, directory, folder, num_redundant_experts=16, **options)
    if group.rank != last:
        rank.add_own()
        rank.change_view(View(1, others.alive))  # without the experts of the rank that is not there yet
        for _ in range(3):
            rank.step()
    full = View(2, (True,) * group.size)
    if group.rank != last:
        rank.engine.leave_at_boundary(full.number)
        preempted = rank.engine.stats().num_preemptions
        _step_until_leaving(rank)
        rank.change_view(full)
        assert rank.engine.stats().num_preemptions == preempted, "a boundary throws nothing away"
    else:
        rank.change_view(full)
        rank.add_own()
    for _ in range(2):
        rank.step()
    assert all(count > 0 for count in rank.engine.stats().slot_tokens), "the rank that entered computes for all"
    rank.engine.leave_at_boundary(3)
    _step_until_leaving(rank)
    if group.rank == last:
        rank.keep(rank.engine.suspend().outputs)
        print("LEFT", json.dumps(rank.tokens), flush=True)
    else:
        rank.change_view(View(3, others.alive))
        rank.take_over(last, first=0)
        rank.run()
        rank.engine.check_integrity()
        print("TOKENS", json.dumps(rank.tokens), flush=True)
    group.barrier()
    rank.engine.close()


def _step_until_leaving(rank: ViewRank) -> None:
    for _ in range(100):
        result = rank.engine.step()
        rank.keep(result.outputs)
        if result.leaves:
            return
    raise AssertionError("the ranks never left together")


def interrupted(group: EPGroup, directory: str, folder: str) -> None:
    """Rank 0 stops in the midst of a step; the others, who wait for it, are told, and the same ranks go on: no token is
    lost or doubled."""
    rank = ViewRank(group, directory, folder, num_redundant_experts=16)
    rank.add_own()
    num_calls = 0

    def stop_at(*arguments, original: Callable, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 21:
            rank.folder.put("stopped", True)
            raise ViewChangedError("told in a step")
        return original(*arguments, **options)

    def interrupt() -> None:
        if (rank.folder.path / "stopped").exists():
            raise ViewChangedError("told in a wait")

    if group.rank == 0:
        for backend in rank.engine.model.exchange.values():
            backend.combine_send = partial(stop_at, original=backend.combine_send)
    else:
        group.interrupt = interrupt
    with pytest.raises(ViewChangedError, match="told in a step" if group.rank == 0 else "told in a wait"):
        rank.run()
    with pytest.raises(RuntimeError, match="broken off by ViewChangedError"):
        rank.engine.step()
    group.interrupt = None
    rank.change_view(View(1, group.view.alive))
    rank.run()
    print("TOKENS", json.dumps(rank.tokens), flush=True)
    rank.engine.close()


def undisturbed(directory: str) -> dict[str, list[int]]:
    """What one rank by itself generates."""
    engine = Engine(EngineConfig(directory, kv_cache_gb=0.01))
    tokens: dict[str, list[int]] = {}
    for i, (prompt, params) in enumerate(zip(*requests())):
        engine.add_request(str(i), prompt, params)
        tokens[str(i)] = []
    idle = False
    while not idle:
        result = engine.step()
        idle = result.all_idle
        for output in result.outputs:
            if output.token_id >= 0:
                tokens[output.request_id].append(output.token_id)
    engine.close()
    return tokens
