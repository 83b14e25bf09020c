"""Steps without some experts: what they compute, who is told, what is kept; experts that are read beside steps."""

from collections.abc import Iterator

import pytest

from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.group.view import View
from tests import tiny
from tests.ranks.migrating_engine import digests
from tests.unit.engine.cases import run

GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=0, ignore_eos=True)
PROMPT = [(7 * i) % 90 + 3 for i in range(21)]
LOST = (1, 4, 6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny.save(tiny.make_model("v3"), tmp_path_factory.mktemp("deferred")))


@pytest.fixture
def engine(checkpoint) -> Iterator[Engine]:
    made = Engine(EngineConfig(checkpoint, kv_cache_gb=0.01, page_size=4, chunk_size=9))
    yield made
    made.close()


def rows_of(engine: Engine) -> list[list[int]]:
    return [layer.slot_map.expert_of_slot_S.tolist() for layer in engine.model.moe_layers()]


def change_view(engine: Engine, rows: list[list[int]] | None = None, lacks_experts: bool = False) -> list:
    """rows: default what the engine says that it holds, as a frontend without other ranks would have it."""
    state = engine.suspend()
    rows = state.expert_of_slot if rows is None else rows
    engine.enter_view(View(1, (True,)), rows, state.epoch + 1, lacks_experts=lacks_experts)
    return state.outputs


def lose(engine: Engine) -> list[list[int]]:
    """The engine goes on without LOST; returns the whole rows."""
    whole = rows_of(engine)
    reduced = [[-1 if expert in LOST else expert for expert in row] for row in whole]
    with pytest.raises(ValueError, match="no slot holds expert 1"):
        change_view(engine, reduced)
    change_view(engine, reduced, lacks_experts=True)
    return whole


def ask(engine: Engine, request_id: str) -> tuple[list[int], bool, int]:
    """Tokens of the prompt's answer, whether an output told of missing experts, and how many tokens were cached."""
    engine.add_request(request_id, PROMPT, GREEDY)
    outputs = run(engine)[request_id]
    assert len({output.lacked_experts for output in outputs}) == 1
    return [output.token_id for output in outputs], outputs[0].lacked_experts, outputs[0].num_cached_tokens


def test_lost_experts_add_nothing_and_answers_say_so(engine, checkpoint):
    whole, *_ = ask(engine, "whole")
    lose(engine)
    reduced, told, _ = ask(engine, "reduced")
    zeroed = Engine(EngineConfig(checkpoint, kv_cache_gb=0.01, page_size=4, chunk_size=9, enable_prefix_cache=False))
    for layer in zeroed.model.moe_layers():
        for expert, buffer in zip(layer.expert_of_slot, layer.weight_buffers()):
            if expert in LOST:
                layer.pool.w2.data[buffer] = 0
    assert told and reduced != whole
    engine.scheduler.pool.forget_cached()  # the prefix cache has the prompt as it was computed with all experts
    assert ask(engine, "again")[0] == ask(zeroed, "zeroed")[0]
    zeroed.close()


def test_what_was_computed_without_experts_is_for_its_own_request_alone(engine):
    whole = lose(engine)
    ask(engine, "reduced")
    assert ask(engine, "reduced, too")[2] == 0
    engine.add_request("under way", PROMPT[::-1], GREEDY)
    engine.step()
    change_view(engine, whole)
    outputs = run(engine)["under way"]
    assert all(output.lacked_experts for output in outputs)
    fresh, told, num_cached = ask(engine, "fresh")
    assert not told and num_cached == 0
    engine.add_request("reversed", PROMPT[::-1], GREEDY)
    assert run(engine)["reversed"][0].num_cached_tokens == 0
    assert ask(engine, "known")[2] > 0 and ask(engine, "known, too")[0] == fresh
    engine.check_integrity()


def test_a_request_that_was_known_before_keeps_what_it_had(engine):
    expected, _, _ = ask(engine, "before")
    lose(engine)
    reduced, told, num_cached = ask(engine, "reduced")
    assert told and num_cached == 20  # the prompt's full pages but for the last token
    assert reduced != expected


@pytest.mark.parametrize("stops", [False, True])
def test_experts_are_read_beside_steps(engine, stops):
    weights, free = digests(engine), len(engine.model.moe_layers()[0].pool._free)
    whole = lose(engine)
    deferred, woken = engine.membership.deferred, []
    deferred.wake = lambda: woken.append(True)
    assert not deferred.take_end()
    deferred.begin(whole)
    if stops:  # another rank is lost: what was read counts, the rest is read again
        change_view(engine, lacks_experts=True)
        assert not deferred.take_end()
        deferred.begin(whole)
    engine.add_request("beside", PROMPT, GREEDY)
    while not deferred.take_end():
        engine.step()
    assert woken and not deferred.take_end()
    change_view(engine)
    assert rows_of(engine) == whole and digests(engine) == weights
    assert len(engine.model.moe_layers()[0].pool._free) == free
    run(engine)
    assert not ask(engine, "after")[1]


def test_a_checkpoint_that_is_gone_ends_the_rank_with_its_name(engine):
    whole = lose(engine)

    def fail(places):
        raise FileNotFoundError("model.safetensors is gone")

    engine.model.load_experts = fail
    engine.membership.deferred.begin(whole)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is gone"):
        while not engine.membership.deferred.take_end():
            pass
    with pytest.raises(FileNotFoundError):
        engine.suspend()
    engine.membership.deferred._thread = None  # the process would have ended
