"""DeepSeek V4's steps of decodes as they are recorded on GPUs, here replayed on a CPU: not a bit is another.

With drafts, prefixes that are gone on from, chunks between the decodes, preemptions, and contexts on both sides of what
the indexer chooses.
"""

from typing import Any

import pytest

from eprt import EngineConfig, SamplingParams
from eprt.engine.engine import Engine
from tests import tiny_v4
from tests.recorded import steps_recorded

NUM_NEW = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """All three kinds of layers, and an MTP layer."""
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1, index_topk=64)
    more = tiny_v4.mtp_tensors(model)
    return tiny_v4.save(model, tmp_path_factory.mktemp("v4"), more=more, num_nextn_predict_layers=1)


def make_engine(directory, **options: Any) -> Engine:
    sizes = {"chunk_size": 160, "kv_cache_gb": 0.01, "max_num_seqs": 4, "max_model_len": 1024} | options
    return Engine(EngineConfig(str(directory), **sizes))


def answers(engine: Engine, prompts: list[list[int]], num_new: int = NUM_NEW) -> list[Any]:
    """(tokens, log-probabilities, how many of the prompt were known) of each. They come one after another, so that
    decodes and chunks share steps."""
    got: list[Any] = [[] for _ in prompts]
    waiting = list(enumerate(prompts))
    while waiting or engine.has_work:
        if waiting:
            i, prompt = waiting.pop(0)
            params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=num_new, ignore_eos=True, logprobs=1)
            engine.add_request(str(i), prompt, params)
        for output in engine.step().outputs:
            got[int(output.request_id)].append((output.token_id, output.logprob, output.num_cached_tokens))
        engine.check_integrity()
    return got


def prompts_of(*lengths: int, shared: int = 0) -> list[list[int]]:
    return [[(7 * i * i + 3 * max(0, k) * (i >= shared)) % 120 + 2 for i in range(n)] for k, n in enumerate(lengths)]


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_recorded_steps_give_the_same_bits(directory, num_drafts, kind):
    """Windows, entries and bookmarks end within the answers; the last prompts go on from what decodes left."""
    options = {"num_speculative_tokens": num_drafts, "kv_cache_dtype": kind}
    prompts = [*prompts_of(250, 119, 123, 1, 509, 300), *prompts_of(258, 300, 520, shared=258)]
    plain, recorded = make_engine(directory, **options), make_engine(directory, **options)
    want = answers(plain, prompts)
    with steps_recorded(recorded):
        got = answers(recorded, prompts)
        assert got == want
        longer = [
            [*prompts[0], *(token for token, _, _ in want[0]), 5, 6],
            [*prompts[4], *(t for t, _, _ in want[4]), 9],
        ]
        again = [answers(engine, longer) for engine in (plain, recorded)]
    assert again[0] == again[1]
    assert [each[0][2] for each in again[1]] == [256, 512], "decodes left bookmarks, which are gone on from"
    assert recorded.stats().num_accepted_tokens == plain.stats().num_accepted_tokens
    for engine in (plain, recorded):
        engine.close()


def test_short_and_long_contexts_have_recordings_of_their_own(directory):
    """64 entries of 4 tokens are one page."""
    engine = make_engine(directory)
    with steps_recorded(engine):
        answers(engine, prompts_of(40))
        assert engine.runner.graphs is not None
        short = engine.runner.graphs.num_replays_by_context
        answers(engine, prompts_of(600))
        long = engine.runner.graphs.num_replays_by_context
    assert short[0] > 0 and short[1] == 0 and long[0] == short[0] and long[1] > 0
    engine.close()


def test_requests_that_are_preempted_go_on_with_the_same_bits(directory):
    prompts = prompts_of(250, 240, 245)
    roomy, narrow = make_engine(directory), make_engine(directory, kv_cache_gb=16.5 * 2**-15, max_model_len=768)
    want = answers(roomy, prompts, 275)
    with steps_recorded(narrow):
        got = answers(narrow, prompts, 275)
    assert narrow.stats().num_preemptions > 0
    assert [[token[:2] for token in each] for each in got] == [[token[:2] for token in each] for each in want]
    for engine in (roomy, narrow):
        engine.close()
