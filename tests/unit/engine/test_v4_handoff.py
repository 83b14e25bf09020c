"""Requests of DeepSeek V4 that go on in another engine: window, open entries and pages come along, and nothing is lost.

Tokens and log-probabilities are those of one engine, to the bit.
"""

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from eprt import EngineConfig, SamplingParams
from eprt.engine.engine import Engine
from eprt.engine.outputs import HandoffEvent
from eprt.kv.reader import HeldPages
from tests import tiny_v4

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu13", "nixl_cu12"))
NUM_NEW = 6
LENGTHS = (1, 127, 128, 129, 255, 256, 257, 511, 512, 513)
Answer = list[tuple[int, float | None]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """All three kinds of layers, and an MTP layer."""
    model = tiny_v4.make_model(num_hidden_layers=3, compress_ratios=[0, 4, 128], num_hash_layers=1)
    more = tiny_v4.mtp_tensors(model)
    return tiny_v4.save(model, tmp_path_factory.mktemp("v4"), more=more, num_nextn_predict_layers=1)


class Pair:
    """A prefill and a decode instance of one rank each, and one that does both."""

    def __init__(self, directory, num_drafts: int = 0, reader: str = "memory", **options):
        self.reader = reader

        def make(**more: Any) -> Engine:
            sizes = {"chunk_size": 160, "kv_cache_gb": 0.01, "max_num_seqs": 4, "max_model_len": 1024}
            sizes |= options | more
            return Engine(EngineConfig(str(directory), num_speculative_tokens=num_drafts, **sizes))

        self.first, self.second, self.alone = make(hands_over=True), make(hands_over=True), make()
        if reader != "memory":
            self.first.handoff.require_cache().open_to_hosts("127.0.0.1", reader)

    def close(self) -> None:
        for engine in (self.first, self.second, self.alone):
            engine.check_integrity()
            engine.close()

    def prefill(self, request_id: str, prompt: list[int], params: SamplingParams) -> tuple[Answer, HeldPages]:
        self.first.add_request(request_id, prompt, params, hands_over=True)
        first_token = run(self.first)[request_id]
        (event,) = wait_events(self.first)
        assert event.held is not None
        return first_token, self._as_read(event.held)

    def _as_read(self, held: HeldPages) -> HeldPages:
        """The pages, as ranks of another host find them."""
        if held.source.address is None:
            return held
        far = msgspec.structs.replace(held.source, host="another", address=("127.0.0.1", held.source.address[1]))
        return msgspec.structs.replace(held, source=far)

    def offer(self, request_id: str, prompt: list[int], params: SamplingParams, first: Answer, held: HeldPages) -> None:
        self.second.intake.offer_request(request_id, prompt, params, 0, [token for token, _ in first], held)

    def adopt(
        self, request_id: str, prompt: list[int], params: SamplingParams, first: Answer, held: HeldPages
    ) -> HandoffEvent:
        self.offer(request_id, prompt, params, first, held)
        (event,) = wait_events(self.second)
        self.first.abort(request_id)
        if not event.error:
            assert self.second.handoff.start_request(request_id)
        return event

    def ask(self, request_id: str, prompt: list[int], params: SamplingParams) -> tuple[Answer, HandoffEvent]:
        """The answer of both, and what was pulled for it."""
        first, held = self.prefill(request_id, prompt, params)
        event = self.adopt(request_id, prompt, params, first, held)
        assert not event.error, event.error
        return [*first, *run(self.second)[request_id]], event


def run(engine: Engine) -> dict[str, Answer]:
    """Tokens and log-probabilities by request, until nothing runs."""
    answers: dict[str, Answer] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            answers.setdefault(output.request_id, []).append((output.token_id, output.logprob))
        engine.check_integrity()
    return answers


def wait_events(engine: Engine) -> list[HandoffEvent]:
    for turn in itertools.count():
        events = engine.handoff.advance()
        engine.check_integrity()
        if events:
            return events
        engine.handoff._thread.submit(int).result()  # what was submitted before has been done
        assert turn < 100, "nothing happens"
    raise AssertionError


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [2 + (7 * i + 31 * (i // 5) + 13 * seed) % 120 for i in range(length)]


def params_of(seed: int, max_tokens: int = NUM_NEW) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.8 * (seed % 2), seed=seed, ignore_eos=True, logprobs=0)


def answer_alone(engine: Engine, prompt: list[int], params: SamplingParams) -> Answer:
    engine.add_request("alone", prompt, params)
    return run(engine)["alone"]


@pytest.fixture(scope="module", params=[0, 1, 2])
def pair(request, directory) -> Iterator[Pair]:
    """With so many drafts."""
    made = Pair(directory, num_drafts=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_request_goes_on_where_another_engine_stopped(pair, length):
    """Around the ends of windows, entries and pages; prompts take several chunks; nothing is computed twice."""
    prompt, params = prompt_of(length, length), params_of(length)
    computed = pair.second.stats().num_prompt_tokens
    answer, _ = pair.ask("a", prompt, params)
    assert answer == answer_alone(pair.alone, prompt, params)
    assert pair.second.stats().num_prompt_tokens == computed
    for engine in (pair.first, pair.second):
        stats = engine.stats()
        assert not stats.num_held_now and not stats.kv_pages_used_now


def test_many_at_once_go_on_beside_each_other(pair):
    """Handed over while others are computed on both sides."""
    jobs = {str(n): (prompt_of(n, 50 + n), params_of(n, 4 + n % 5)) for n in (126, 128, 250, 255, 257, 383)}
    want = {name: answer_alone(pair.alone, *job) for name, job in jobs.items()}
    got: dict[str, Answer] = {}
    for name, job in jobs.items():
        pair.first.add_request(name, *job, hands_over=True)
    for turn in itertools.count():
        for engine in (pair.first, pair.second):
            for output in engine.step().outputs if engine.has_work else ():
                got.setdefault(output.request_id, []).append((output.token_id, output.logprob))
            for event in engine.handoff.advance():
                assert not event.error
                if event.held is not None:
                    pair.offer(event.request_id, *jobs[event.request_id], got[event.request_id], event.held)
                else:
                    assert pair.first.abort(event.request_id)
                    assert pair.second.handoff.start_request(event.request_id)
            engine.check_integrity()
        if all(len(got.get(name, ())) == len(want[name]) for name in jobs):
            break
        assert turn < 10_000, "they do not end"
    assert got == want


def test_pages_that_are_here_and_the_bookmark_behind_them_stay_where_they_are(directory):
    """The tail always travels; the bookmark once, and then prompts go on from it here as they would there."""
    pair = Pair(directory, num_drafts=1)
    pool, prompt = pair.second.scheduler.pool, prompt_of(600)
    for name, length, num_pages, num_bookmark in (("a", 600, 3, 1), ("b", 600, 1, 0), ("c", 530, 1, 0)):
        answer, event = pair.ask(name, prompt[:length], params_of(3))
        assert event.num_pulled == num_pages + pool.num_tail + num_bookmark * pool.num_bookmark
        assert answer == answer_alone(pair.alone, prompt[:length], params_of(3))
    again = [*prompt[:520], 9, 9, 9]
    assert answer_alone(pair.second, again, params_of(1)) == answer_alone(pair.alone, again, params_of(1))
    assert pair.second.stats().num_cached_tokens == 512, "from the bookmark that came along"
    lost = pool.find_bookmark(pool.match_prefix(np.array(again, np.int32), 522)[1])[:1]
    pool.acquire(lost)
    pool.forget(lost[0])
    pool.release(lost)
    _, event = pair.ask("d", again, params_of(1))
    assert event.num_pulled == 1 + pool.num_tail + pool.num_bookmark, "one that is lost comes again"
    assert pool.num_owned == pair.first.scheduler.pool.num_owned == 0
    pair.close()


def test_an_evicted_bookmark_does_not_travel_and_pages_without_one_are_shared(directory):
    pair = Pair(directory)
    pool, prompt, params = pair.first.scheduler.pool, prompt_of(300), params_of(2)
    first, held = pair.prefill("a", prompt, params)
    assert len(held.bookmark) == pool.num_bookmark
    without = msgspec.structs.replace(held, bookmark=[], checksums=held.checksums[: -pool.num_bookmark])
    assert pair.adopt("a", prompt, params, first, without).num_pulled == 2 + pool.num_tail
    assert [*first, *run(pair.second)["a"]] == answer_alone(pair.alone, prompt, params)
    short, held = pair.prefill("b", prompt[:280], params)
    without = msgspec.structs.replace(held, bookmark=[], checksums=held.checksums[: -pool.num_bookmark])
    assert pair.adopt("b", prompt[:280], params, short, without).num_pulled == 1 + pool.num_tail
    assert [*short, *run(pair.second)["b"]] == answer_alone(pair.alone, prompt[:280], params)
    pair.close()


@pytest.mark.parametrize(
    ("reader", "cache"),
    [
        ("memory", "auto"),
        ("tcp", "auto"),
        ("memory", "fp8"),
        pytest.param("nixl", "auto", marks=pytest.mark.skipif(not HAS_NIXL, reason="the extra nixl is missing")),
    ],
)
def test_readers_bring_every_page_and_damage_is_found(directory, reader, cache):
    """A flipped bit in a page of tokens, of the tail or of the bookmark: nothing of it is used."""
    index_cache = "fp4" if cache == "fp8" else "auto"
    pair = Pair(directory, reader=reader, kv_cache_dtype=cache, index_cache_dtype=index_cache)
    prompt, params = prompt_of(300), params_of(4)
    first, held = pair.prefill("a", prompt, params)
    (bytes_LPB,) = pair.first.handoff.require_cache().bytes_LPB
    pool = pair.second.scheduler.pool
    for i, page in enumerate((held.pages[1], held.tail[0], held.tail[-1], held.bookmark[-1])):
        bytes_LPB[0, page, 40 + i] ^= 4
        pair.offer("a", prompt, params, first, held)
        (event,) = wait_events(pair.second)
        assert "damaged" in event.error
        bytes_LPB[0, page, 40 + i] ^= 4
        assert pool.num_owned == 0 and not pool.match_prefix(np.array(prompt, np.int32), 256)[0]
    assert not pair.adopt("a", prompt, params, first, held).error
    assert [*first, *run(pair.second)["a"]] == answer_alone(pair.alone, prompt, params)
    pair.close()


def test_pages_without_their_state_are_refused(directory):
    """Not gone on from: what the window held would be somebody else's."""
    pair = Pair(directory)
    prompt, params = prompt_of(300), params_of(4)
    first, held = pair.prefill("a", prompt, params)
    num_tail, num_bookmark = len(held.tail), len(held.bookmark)
    for lacks in (
        {"tail": [], "checksums": held.checksums[: len(held.pages)], "bookmark": []},
        {"tail": held.tail[:-1], "checksums": held.checksums[:-1]},
        {"bookmark": held.bookmark * 2, "checksums": held.checksums + [0] * num_bookmark},
    ):
        with pytest.raises(ValueError, match="here: nothing can go on from them") as refused:
            pair.offer("a", prompt, params, first, msgspec.structs.replace(held, **lacks))
        assert f"requests have {num_tail} + {num_bookmark} here" in str(refused.value)
    with pytest.raises(ValueError, match="pages are held"):
        pair.offer("a", prompt, params, first, msgspec.structs.replace(held, checksums=held.checksums[:-1]))
    assert pair.second.handoff.num_arriving == 0
    pair.close()


@pytest.mark.parametrize("phase", ["computed", "held", "offered", "pulling", "arrived", "started", "running"])
def test_nothing_is_left_of_a_request_that_is_dropped(pair, phase):
    prompt, params = prompt_of(290, 7), params_of(1)
    if phase == "computed":
        pair.first.add_request("a", prompt, params, hands_over=True)
        pair.first.step()
        assert pair.first.abort("a")
    else:
        first, held = pair.prefill("a", prompt, params)
        if phase != "held":
            pair.offer("a", prompt, params, first, held)
        if phase == "pulling":
            pair.second.handoff.advance()
        if phase in ("arrived", "started", "running"):
            wait_events(pair.second)
        if phase in ("started", "running"):
            pair.second.handoff.start_request("a")
        if phase == "running":
            pair.second.step()
        assert pair.second.abort("a") == (phase != "held")
        assert pair.first.abort("a")
    pair.second.handoff._thread.submit(int).result()
    assert pair.second.handoff.advance() == []
    for engine in (pair.first, pair.second):
        run(engine)
        engine.check_integrity()
        assert not engine.has_work and not engine.handoff.num_arriving and not engine.stats().kv_pages_used_now


def test_a_full_cache_lets_offers_wait_and_leaves_bookmarks_behind(directory):
    """As many pages as a request needs: no room for what is only good for others."""
    pair = Pair(directory)
    few = pair.second.scheduler.pool.num_needed(310)
    page_bytes = pair.second.handoff.require_cache().bytes_LPB[0].shape[2]
    small = Pair(directory, kv_cache_gb=few * page_bytes / 2**30, max_model_len=310)
    pair.second, small.second = small.second, pair.second
    small.close()
    jobs = {str(i): (prompt_of(300, i), params_of(i)) for i in range(2)}
    firsts = {}
    for name, job in jobs.items():
        firsts[name], held = pair.prefill(name, *job)
        pair.offer(name, *job, firsts[name], held)
    for name, job in jobs.items():
        (event,) = wait_events(pair.second)
        assert (event.request_id, event.error) == (name, "")
        assert event.num_pulled == 2 + pair.second.scheduler.pool.num_tail
        pair.first.abort(name)
        pair.second.handoff.start_request(name)
        assert [*firsts[name], *run(pair.second)[name]] == answer_alone(pair.alone, *job)
    pair.close()
