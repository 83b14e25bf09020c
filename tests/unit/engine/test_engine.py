"""What one engine accepts, refuses, reports and frees."""

import logging
import math
from dataclasses import replace

import pytest
import torch

from eprt.config import EngineConfig
from eprt.engine.engine import Engine
from eprt.engine.request import QueueFullError
from eprt.engine.sampling_params import SamplingParams
from tests.unit.engine.cases import EOS, expected, make_engine, run, tokens_of
from tests.unit.engine.recall_model import VOCAB, RecallModel, context_logits

GREEDY = SamplingParams(max_tokens=6, temperature=0, seed=0, ignore_eos=True)


# -- refusals --


@pytest.mark.parametrize(
    "prompt, params, message",
    [
        ([], GREEDY, "the prompt is empty"),
        ([1, VOCAB], GREEDY, f"prompt token {VOCAB} is outside the vocabulary 0..{VOCAB - 1}"),
        ([1, -1], GREEDY, "prompt token -1 is outside"),
        ([1] * 64, GREEDY, "64 tokens; with at least 1 generated it exceeds max_model_len 64 .*raise --max-model-len"),
        ([1], SamplingParams(stop_token_ids=(200,)), "stop_token_ids: token 200 is outside"),
        ([1], SamplingParams(logit_bias={300: 1.0}), "logit_bias: token 300 is outside"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt, params, message):
    engine = make_engine(max_model_len=64)
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, params)
    assert not engine.has_work


def test_a_cache_smaller_than_the_model_length_bounds_requests(caplog):
    with caplog.at_level(logging.WARNING):
        engine = make_engine(num_pages=5, max_model_len=512)
    assert "holds 20 tokens per rank" in caplog.text and "instead of 512" in caplog.text
    with pytest.raises(ValueError, match=r"max_model_len 20 .the KV cache holds 20 tokens; raise --kv-cache-gb"):
        engine.add_request("a", [1] * 20, GREEDY)
    engine.add_request("b", [1] * 19, GREEDY)
    assert run(engine)["b"][-1].finish_reason == "length"


def test_pages_longer_than_requests_bound_nobody():
    """The cache is made no larger than requests can use, and each uses a page at least."""
    config = EngineConfig("recall", max_model_len=8, page_size=64, max_num_seqs=32, kv_cache_gb=0.01)
    engine = Engine(config, model=RecallModel(eos_token_ids=(EOS,)))
    for i in range(32):
        engine.add_request(str(i), [1, 2], GREEDY)
    engine.step()
    assert engine.stats().num_running_now == 32


def test_max_model_len_beyond_the_model_is_refused():
    config = EngineConfig("recall", max_model_len=5000, kv_cache_gb=0.001)
    with pytest.raises(ValueError, match=r"--max-model-len 5000: .*up to 4096"):
        Engine(config, model=RecallModel(max_position_embeddings=4096))


def test_a_full_queue_and_a_used_id_are_refused():
    engine = make_engine(max_queue=2)
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="request id 'a' is already in use"):
        engine.add_request("a", [1], GREEDY)
    engine.add_request("b", [1], GREEDY)
    with pytest.raises(QueueFullError, match=r"\[rank 0/1\] 2 requests are waiting, max_queue is 2"):
        engine.add_request("c", [1], GREEDY)
    assert set(run(engine)) == {"a", "b"}
    engine.add_request("a", [1], GREEDY)  # its id is free again


# -- ends --


def test_it_ends_at_max_tokens_at_max_model_len_and_at_stop_tokens():
    engine = make_engine(max_model_len=32)
    tokens, _ = expected([9, 8], GREEDY)
    cases = {
        "max_tokens": (GREEDY, tokens, "length"),
        "one": (SamplingParams(max_tokens=1, temperature=0), tokens[:1], "length"),
        "stop": (SamplingParams(max_tokens=6, temperature=0, stop_token_ids=(90, tokens[3])), tokens[:4], "stop"),
    }
    for name, (params, _, _) in cases.items():
        engine.add_request(name, [9, 8], params)
    engine.add_request("max_model_len", [9] * 28, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    outputs = run(engine)
    for name, (_, want, reason) in cases.items():
        assert (tokens_of(outputs[name]), outputs[name][-1].finish_reason) == (want, reason), name
    assert len(outputs["max_model_len"]) == 4 and outputs["max_model_len"][-1].finish_reason == "length"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_it_unless_ignored(ignore_eos):
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=ignore_eos, logit_bias={EOS: 100.0})
    engine = make_engine()
    engine.add_request("a", [9], params)
    outputs = run(engine)["a"]
    assert tokens_of(outputs) == [EOS] * (8 if ignore_eos else 1)
    assert outputs[-1].finish_reason == ("length" if ignore_eos else "stop")


def test_more_stop_tokens_than_usual():
    tokens, _ = expected([9, 8], GREEDY)
    others = tuple(t for t in range(VOCAB) if t not in tokens)
    engine = make_engine()
    engine.add_request("few", [9, 8], GREEDY)
    engine.step()
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, stop_token_ids=(*others, tokens[2]))
    engine.add_request("many", [9, 8], params)
    outputs = run(engine)
    assert tokens_of(outputs["many"]) == tokens[:3] and outputs["many"][-1].finish_reason == "stop"
    assert tokens_of(outputs["few"]) == tokens[1:]


@pytest.mark.parametrize("chunk_size", [3, 64])
def test_prompt_logprobs_and_no_token_at_all(chunk_size):
    """What echo with max_tokens=0 needs."""
    prompt = [10, 20, 30, 10, 20, 30, 40, 50]
    params = SamplingParams(max_tokens=0, prompt_logprobs=True, logprobs=3)
    engine = make_engine(chunk_size=chunk_size)
    for name in ("first", "with the prefix cached"):
        engine.add_request(name, prompt, params)
        (output,) = run(engine)[name]
        assert (output.token_id, output.finish_reason, output.logprob) == (-1, "length", None)
        logprob_TV = context_logits(prompt).log_softmax(dim=-1)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt) - 1
        for i, (value, top, rank) in enumerate(output.prompt_logprobs):
            assert rank == logprob_TV[i].argsort(descending=True).tolist().index(prompt[i + 1]) + 1
            assert value == pytest.approx(float(logprob_TV[i, prompt[i + 1]]), abs=1e-5)
            assert [t for t, _ in top] == logprob_TV[i].topk(3).indices.tolist()
    assert engine.stats().num_generated_tokens == 0


def test_bad_logits_end_their_request_with_an_error():
    engine = make_engine()
    forward = engine.model.forward

    def with_nan(batch, cache_L):
        logits_XV = forward(batch, cache_L)
        for row, token_id in enumerate(batch.token_id_T[batch.logits_idx].tolist()):
            if token_id == 13:
                logits_XV[row, 0] = math.nan
        return logits_XV

    engine.model.forward = with_nan
    engine.add_request("good", [9], GREEDY)
    engine.add_request("bad", [12, 13], GREEDY)
    outputs = run(engine)
    assert tokens_of(outputs["good"]) == expected([9], GREEDY)[0]
    (bad,) = outputs["bad"]
    assert (bad.token_id, bad.finish_reason) == (-1, "abort")
    assert bad.error == "the model's logits at output position 0 are not numbers"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory is left")])
def test_after_a_step_that_broke_off_nothing_is_served_from_pages_it_should_have_filled(overlap, error):
    engine = make_engine(overlap_schedule=overlap)
    forward, prompt = engine.model.forward, list(range(20, 34))

    def break_off(*args):
        engine.model.forward = forward
        raise error

    engine.model.forward = break_off
    engine.add_request("a", prompt, GREEDY)
    with pytest.raises(type(error)):
        engine.step()
    engine.abort("a")
    engine.add_request("the same again", prompt, GREEDY)
    with pytest.raises(RuntimeError, match=f"was broken off by {type(error).__name__}.*: make a new one"):
        engine.step()


# -- aborts, sleep, statistics --


def test_abort_frees_the_pages_at_once():
    engine = make_engine(num_pages=40, chunk_size=16, max_num_seqs=2)
    for name in ("decoding", "prefilling", "waiting"):
        engine.add_request(name, [ord(name[0]) % VOCAB] * 30, GREEDY)
    for _ in range(2):
        engine.step()
    assert [r.decoding for r in engine.scheduler.running] == [True, False] and len(engine.scheduler.waiting) == 1
    used = engine.stats().kv_pages_used_now
    for name, freed in (("prefilling", 8), ("waiting", 0), ("decoding", 8)):
        assert engine.abort(name)
        assert not engine.abort(name)
        engine.check_integrity()
        assert engine.stats().kv_pages_used_now == used - freed
        used -= freed
    assert not engine.has_work and engine.step().outputs == []
    assert engine.step().all_idle


def test_modes_and_idle_steps():
    """Prefill is normal mode, decodes of few enough tokens are low latency; idle steps compute nothing."""
    engine = make_engine(low_latency_max_tokens=2)
    for i in range(3):
        engine.add_request(str(i), [7 + i], SamplingParams(max_tokens=3 + i, temperature=0, ignore_eos=True))
    modes = [(engine.step().mode, engine.model.num_tokens[-1]) for _ in range(5)]
    assert modes == [("normal", 3), ("normal", 3), ("normal", 3), ("low_latency", 2), ("low_latency", 1)]
    assert engine.step().all_idle and engine.stats().num_steps == 5


def test_with_overlap_tokens_come_a_step_later_and_none_is_computed_in_vain():
    """but for the one behind a stop token: that a request will end at its length is known beforehand."""
    outputs = []
    for overlap in (False, True):
        engine = make_engine(overlap_schedule=overlap)
        engine.add_request("length", [7, 8], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
        steps = []
        while engine.has_work:
            steps.append([output.token_id for output in engine.step().outputs])
        assert sum(engine.model.num_tokens) == 2 + 2
        outputs.append(steps)
    assert outputs[1] == [[], *outputs[0]]


def test_an_abort_frees_what_a_step_under_way_still_computes():
    engine = make_engine(overlap_schedule=True)
    params = SamplingParams(max_tokens=30, temperature=0, seed=0, ignore_eos=True)
    for request_id in ("gone", "stays"):
        engine.add_request(request_id, [9, 10, 11], params)
    engine.step()
    engine.step()
    assert engine.abort("gone")
    engine.add_request("next", [9, 10, 12], params)  # takes the row and the pages of the one that has gone
    outputs = run(engine)
    assert set(outputs) == {"stays", "next"}
    assert tokens_of(outputs["next"]) == expected([9, 10, 12], params)[0]
    engine.add_request("alone", [9], params)
    engine.step()
    assert engine.abort("alone") and engine.has_work
    assert not engine.step().outputs and engine.step().all_idle


def test_a_top_k_of_any_size_keeps_all():
    engine = make_engine()
    all_tokens = SamplingParams(max_tokens=6, temperature=1, seed=0, ignore_eos=True)
    for top_k in (VOCAB, 1 << 40, 1 << 80):
        engine.add_request(str(top_k), [9, 8], replace(all_tokens, top_k=top_k))
    assert [tokens_of(outputs) for outputs in run(engine).values()] == [expected([9, 8], all_tokens)[0]] * 3


def test_statistics():
    engine = make_engine(num_pages=100)
    engine.add_request("a", [9] * 10, GREEDY)
    run(engine)
    engine.add_request("b", [9] * 10, GREEDY)
    engine.step()
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generated_tokens) == (20, 8, 7)
    assert (stats.num_running_now, stats.num_waiting_now, stats.kv_pages_used_now) == (1, 0, 3)
    assert (stats.rank, stats.kv_pages_total, stats.num_preemptions, stats.num_steps) == (0, 100, 0, 7)
    assert stats.last_step_s > 0 and stats.slot_tokens == [0] and stats.migration is None


def test_a_seed_is_drawn_from_the_engine_where_none_is_given():
    params = SamplingParams(max_tokens=10, temperature=1, ignore_eos=True)
    results = []
    for seed in (1, 1, 2):
        engine = make_engine(seed=seed)
        engine.add_request("a", [9], params)
        engine.add_request("b", [9], params)
        outputs = run(engine)
        results.append([tokens_of(outputs[name]) for name in ("a", "b")])
    assert results[0] == results[1] != results[2] and results[0][0] != results[0][1]
