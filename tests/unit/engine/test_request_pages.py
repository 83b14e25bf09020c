"""Tails and bookmarks of requests: accounted for exactly under random requests, also where pages are short."""

import random

import pytest
import torch

from eprt import EngineConfig, SamplingParams
from eprt.engine.engine import Engine
from tests import tiny_v4

SIZES = {"chunk_size": 300, "max_num_seqs": 4, "max_model_len": 1024}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    model = tiny_v4.make_model(num_hidden_layers=2, compress_ratios=[4, 128], num_hash_layers=0)
    return tiny_v4.save(model, tmp_path_factory.mktemp("v4"))


def make_engine(directory, num_pages: int, **options) -> Engine:
    page_bytes = 32768
    config = EngineConfig(str(directory), kv_cache_gb=num_pages * page_bytes / 2**30, **SIZES, **options)
    engine = Engine(config)
    assert engine._pool.num_pages == num_pages
    return engine


def run_requests(engine: Engine, prompts: list[list[int]], num_new: int, abort_at: int = -1) -> dict[str, list[int]]:
    """Every token, checking the accounts after each step. abort_at: the step after which the first request goes."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_new)
        engine.add_request(str(i), prompt, params)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    step = 0
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id].append(output.token_id)
        engine.check_integrity()
        if step == abort_at:
            engine.abort("0")
            engine.check_integrity()
        step += 1
    assert engine._pool.num_owned == 0, "nothing stays owned"
    return tokens


def random_prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Some with a common beginning, around the ends of pages."""
    common = [rng.randrange(2, 128) for _ in range(600)]
    lengths = [rng.choice((1, 100, 254, 255, 256, 257, 300, 511, 513, 560)) for _ in range(num)]
    return [common[:n] if rng.random() < 0.6 else [rng.randrange(2, 128) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("seed", range(4))
def test_preemption_sharing_and_eviction_change_no_token(directory, seed):
    rng = random.Random(seed)
    prompts = random_prompts(rng, 6)
    roomy = make_engine(directory, 120)
    want = run_requests(roomy, prompts, 5)
    assert run_requests(roomy, prompts, 5) == want
    assert (roomy.stats().num_cached_tokens > 0) == any(len(prompt) > 256 for prompt in prompts)
    # As few pages as one request of 600 tokens needs, and some.
    short = make_engine(directory, roomy._pool.num_needed(600) + 4)
    roomy.close()
    assert run_requests(short, prompts, 5) == want
    run_requests(short, prompts[::-1], 5, abort_at=2)
    short.close()


def test_pages_are_those_of_the_positions_and_a_tail(directory):
    """However long a request has decoded: nothing stays of what lies behind its windows."""
    engine = make_engine(directory, 120, enable_prefix_cache=False)
    engine.add_request("a", [5] * 500, SamplingParams(temperature=0, ignore_eos=True, max_tokens=20))
    seen = set()
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            length = int(engine._rows.length_M[request.row])
            assert engine._pool.num_owned == engine._pool.num_needed(length - 1)
            seen.add(engine._pool.num_owned)
    assert len(seen) == 2
    engine.close()


def test_without_a_prefix_cache_no_bookmark_is_written(directory):
    engine = make_engine(directory, 60, enable_prefix_cache=False)
    engine.add_request("a", [7] * 513, SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert not engine.scheduler.running[0].bookmarks
    assert engine._pool.num_owned == engine._pool.num_needed(513)
    engine.close()


def test_a_bookmark_that_was_evicted_is_a_shorter_hit(directory):
    engine = make_engine(directory, 60)
    prompt = torch.randint(2, 128, (560,), generator=torch.Generator().manual_seed(0)).tolist()
    run_requests(engine, [prompt], 1)
    pool = engine._pool
    pages, node = pool.match_prefix(engine._rows.tokens_ML[0, :560], 559)
    assert len(pages) == 2 and len(pool.find_bookmark(node)) == pool.num_bookmark
    pool.forget(pool.find_bookmark(node)[0])
    pages, _ = pool.match_prefix(engine._rows.tokens_ML[0, :560], 559)
    assert len(pages) == 1
    engine.close()
