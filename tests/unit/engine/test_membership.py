"""Whatever is lost, moved or suspended: every request gets exactly the tokens it would get alone, each of them once."""

import contextlib
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.errors import EPError, RankLostError, ViewChangedError
from eprt.ep.group.view import View
from eprt.gpu.driver import CudaError
from tests.unit.cases import MODEL
from tests.unit.engine.cases import expected, make_engine, run, tokens_of

GREEDY = SamplingParams(max_tokens=6, temperature=0, seed=0, ignore_eos=True)
prompt_strategy = st.lists(st.integers(6, 7), min_size=1, max_size=24)
params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 20),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.booleans(),
    stop_token_ids=st.sampled_from([(), (7, 30)]),
    bad_word_ids=st.sampled_from([(), ((9,), (6, 7), (6, 6, 7))]),
    priority=st.integers(0, 1),
)
event_strategy = st.one_of(
    st.tuples(st.just("add"), prompt_strategy, params_strategy),
    st.tuples(st.just("abort"), st.integers(0, 6)),
    st.tuples(st.just("move"), st.integers(0, 6)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("lose"), st.sampled_from(["header", "forward", "check", "boundary"])),
)


class LosingEngine:
    """An engine whose step can be made to fail, as when another rank dies in it."""

    def __init__(self, engine: Engine):
        self.engine, self.epoch = engine, 0
        self.cache = engine.runner.cache_L[0].latents.view(-1, 2)
        self.slots: list = []  # of the latest steps, the newest last
        self.forward, engine.model.forward = engine.model.forward, self.compute

    def compute(self, batch, cache_L):
        self.slots = [*self.slots[-1:], batch.kv_slot_T.clone()]
        return self.forward(batch, cache_L)

    def lose(self, where: str) -> list:
        """A step that fails; what it has left in the cache is nothing to rely on. Returns what was finished before."""
        engine, model = self.engine, self.engine.model
        error = RankLostError(0, 1, 0, "a test")

        def fail_in_forward(batch, cache_L):
            self.cache[batch.kv_slot_T] = -1.0
            raise error

        with contextlib.ExitStack() as stack:
            if where == "header":
                stack.enter_context(patch.object(engine._headers, "agree", side_effect=error))
            elif where == "forward":
                model.forward = fail_in_forward
            elif where == "check":
                stack.enter_context(patch.object(model.exchange, "check", side_effect=error))
            else:
                engine.leave_at_boundary(1)
            outputs = []
            try:
                result = engine.step()
                outputs += result.outputs
                assert result.leaves == (where == "boundary")
            except EPError:
                with pytest.raises(RuntimeError, match="broken off by RankLostError"):
                    engine.step()
            if where == "check":
                for slots in self.slots[-len(engine._launched) :] if engine._launched else ():
                    self.cache[slots] = -1.0
            if engine.runner.last_token_M is not None:  # what a step that is thrown away may have sampled
                engine.runner.last_token_M.fill_(5)
            state = engine.suspend()
            assert engine.suspend().outputs == []
            model.forward = self.compute
        with pytest.raises(RuntimeError, match="suspended: call enter_view"):
            engine.step()
        engine.check_integrity()
        self.epoch = state.epoch + 1
        engine.enter_view(View(1, (True,)), [], self.epoch)
        return outputs + state.outputs


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(event_strategy, min_size=1, max_size=25),
    num_pages=st.integers(3, 24),
    page_size=st.sampled_from([1, 4]),
    chunk_size=st.sampled_from([1, 3, 8, 64]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    enable_prefix_cache=st.booleans(),
    overlap_schedule=st.booleans(),
)
def test_every_request_gets_its_own_tokens(events, num_pages, page_size, **options):
    engine = make_engine(num_pages, page_size=page_size, **options)
    losing = LosingEngine(engine)
    cases, outputs, aborted = {}, {}, set()

    def take(new: list) -> None:
        for output in new:
            outputs[output.request_id].append(output)
        engine.check_integrity()

    for event in events:
        request_id = str(event[1])
        if event[0] == "add":
            _, prompt, params = event
            if len(prompt) + bool(params.max_tokens) <= engine.limits.max_model_len:
                request_id = str(len(cases))
                engine.add_request(request_id, prompt, params)
                cases[request_id], outputs[request_id] = (prompt, params), []
        elif event[0] == "abort" and request_id in cases:
            if engine.abort(request_id):
                aborted.add(request_id)
        elif event[0] == "move" and request_id in cases and engine.abort(request_id):
            # As if another rank had had it so far.
            engine.add_request(request_id, *cases[request_id], generated=tokens_of(outputs[request_id]))
        elif event[0] == "lose":
            take(losing.lose(event[1]))
        elif event[0] == "step":
            for _ in range(event[1]):
                take(engine.step().outputs)
    for request_id, rest in run(engine).items():
        outputs[request_id] += rest
    for request_id, (prompt, params) in cases.items():
        want, reason = expected(prompt, params, max_model_len=engine.limits.max_model_len)
        got = outputs[request_id]
        if request_id in aborted:
            assert tokens_of(got) == want[: len(got)]
        else:
            assert tokens_of(got) == want
            assert [o.finish_reason for o in got] == [None] * (len(got) - 1) + [reason]


def test_outputs_of_a_moved_request_repeat_nothing():
    params = SamplingParams(max_tokens=5, temperature=0, seed=0, ignore_eos=True, prompt_logprobs=True, logprobs=1)
    outputs = []
    for generated in ([], expected([6, 7, 8], params)[0][:3]):
        engine = make_engine()
        engine.add_request("a", [6, 7, 8], params, generated=generated)
        outputs.append(run(engine)["a"])
    whole, rest = outputs
    assert whole[0].prompt_logprobs is not None and rest == whole[3:]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 7, "page_size": 4}, {"num_speculative_tokens": 2}])
def test_a_moved_request_goes_on_to_the_bit_in_bfloat16(options):
    """On the demo model, whose prompts' attention rounds otherwise than its decodes'; random prompts, so that tokens
    are almost equally likely. As on another rank, nothing is in the cache."""
    rng, requests = np.random.default_rng(0), {}
    for i in range(8):
        prompt = rng.integers(2, 600, rng.integers(1, 40)).tolist()
        params = SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=2)
        requests[str(i)] = (prompt, params)

    def generate(num_known: dict[str, list[int]]) -> dict[str, list]:
        engine = Engine(EngineConfig(str(MODEL), kv_cache_gb=0.01, **options))
        for request_id, (prompt, params) in requests.items():
            engine.add_request(request_id, prompt, params, generated=num_known.get(request_id, []))
        outputs = run(engine)
        engine.close()
        return {key: [replace(output, num_cached_tokens=0) for output in outputs[key]] for key in outputs}

    whole = generate({})
    cut = {key: tokens_of(outputs)[: 1 + 3 * int(key) % 11] for key, outputs in whole.items()}
    assert generate(cut) == {key: whole[key][len(cut[key]) :] for key in whole}


@pytest.mark.parametrize("num", [6, 9])
def test_a_request_that_has_all_its_tokens_is_refused(num):
    engine = make_engine()
    with pytest.raises(ValueError, match=f"{num} tokens are generated already, and no more than 6"):
        engine.add_request("a", [6], GREEDY, generated=[7] * num)
    with pytest.raises(ValueError, match="generated token 5000 is outside the vocabulary"):
        engine.add_request("a", [6], GREEDY, generated=[5000])
    assert not engine.has_work


@pytest.mark.parametrize(
    ("view", "rows", "epoch", "message"),
    [
        (View(1, (True, True)), [], 9, "ranks (0, 1) take part, of 2"),
        (View(1, (False,)), [], 9, "this rank must"),
        (View(1, (True,)), [[0]], 9, "1 rows of experts for 0 MoE layers"),
        (View(1, (True,)), [], 2, "epoch 2 was used already: it must be above 2"),
    ],
)
def test_a_view_that_does_not_fit_changes_nothing(view, rows, epoch, message):
    engine = make_engine()
    engine.add_request("a", [6, 7], GREEDY)
    engine.step(), engine.step()
    before = engine.suspend()
    with pytest.raises(ValueError) as caught:
        engine.enter_view(view, rows, epoch)
    assert message in str(caught.value)
    assert engine.suspend() == before and before.epoch == 2
    engine.enter_view(View(1, (True,)), [], 3)
    assert len(run(engine)["a"]) == 4


def test_an_engine_that_failed_otherwise_is_not_resumed():
    engine = make_engine()
    engine.add_request("a", [6, 7], GREEDY)
    with patch.object(engine.model, "forward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(RuntimeError, match="broken off by KeyboardInterrupt: make a new one"):
        engine.suspend()
    assert issubclass(ViewChangedError, EPError)


@pytest.mark.parametrize("where", ["forward", "check"])
@pytest.mark.parametrize("ahead", [False, True])
def test_nobody_reads_pages_of_a_step_that_was_thrown_away(where, ahead):
    """The second request shares pages that the first one was to fill; a third one comes when the first is gone."""
    prompt, params = [6, 7, 8, 9] * 4, SamplingParams(max_tokens=4, temperature=0, seed=0, ignore_eos=True)
    engine = make_engine(overlap_schedule=ahead)
    losing = LosingEngine(engine)
    engine.add_request("a", prompt, params)
    engine.add_request("b", prompt, params)
    assert losing.lose(where) == []
    engine.abort("a")
    engine.add_request("c", prompt, params)
    outputs = run(engine)
    assert tokens_of(outputs["b"]) == tokens_of(outputs["c"]) == expected(prompt, params)[0]


def test_a_page_that_a_lost_decode_was_to_fill_is_not_found():
    """Where steps are launched ahead, a page is known before the decode that fills it is done."""
    prompt, params = [6, 7, 8], SamplingParams(max_tokens=12, temperature=0, seed=0, ignore_eos=True)
    want = expected(prompt, params)[0]
    for num_steps in range(2, 9):
        engine = make_engine(overlap_schedule=True)
        losing = LosingEngine(engine)
        engine.add_request("a", prompt, params)
        got = [output for _ in range(num_steps) for output in engine.step().outputs]
        got += losing.lose("check")
        assert tokens_of(got) == want[: len(got)]
        engine.abort("a")
        engine.add_request("b", prompt + want[:8], SamplingParams(max_tokens=4, temperature=0, seed=0, ignore_eos=True))
        assert tokens_of(run(engine)["b"]) == want[8:]


def test_pages_that_a_lost_step_left_behind_are_not_found():
    """The request was aborted while its prompt was computed."""
    prompt, params = [6, 7, 8, 9] * 4, SamplingParams(max_tokens=4, temperature=0, seed=0, ignore_eos=True)
    engine = make_engine(overlap_schedule=True)
    losing = LosingEngine(engine)
    engine.add_request("a", prompt, params)
    engine.step()
    engine.abort("a")
    assert losing.lose("check") == []
    engine.add_request("b", prompt, params)
    assert tokens_of(run(engine)["b"]) == expected(prompt, params)[0]


def test_a_prompt_that_is_aborted_before_its_broken_step_is_thrown_away_is_not_found():
    prompt, params = [6, 7, 8, 9] * 4, SamplingParams(max_tokens=4, temperature=0, seed=0, ignore_eos=True)
    engine = make_engine()
    engine.add_request("a", prompt, params)
    gone = ViewChangedError("another rank is gone")
    with patch.object(engine.model, "forward", side_effect=gone), pytest.raises(ViewChangedError):
        engine.step()
    engine.abort("a")
    engine.enter_view(View(1, (True,)), [], engine.suspend().epoch + 1)
    engine.add_request("b", prompt, params)
    outputs = run(engine)["b"]
    assert outputs[0].num_cached_tokens == 0 and tokens_of(outputs) == expected(prompt, params)[0]


def test_a_rank_that_is_lost_while_a_view_begins_is_named_and_the_next_view_can_begin():
    engine = make_engine()
    error = CudaError("importing another process's GPU memory: invalid handle")
    with patch.object(engine.model.exchange, "restart", side_effect=error):
        epoch = engine.suspend().epoch + 1
        with pytest.raises(CudaError):
            engine.enter_view(View(1, (True,)), [], epoch)
        with (
            patch.object(engine.group, "lost_ranks", lambda: (0,)),
            pytest.raises(RankLostError, match="rank 0 died during the change of the view"),
        ):
            engine.enter_view(View(1, (True,)), [], epoch)
    with pytest.raises(RuntimeError, match="suspended: call enter_view"):
        engine.step()
    engine.enter_view(View(2, (True,)), [], engine.suspend().epoch + 1)
    engine.add_request("a", [6, 7], GREEDY)
    assert tokens_of(run(engine)["a"]) == expected([6, 7], GREEDY)[0]
