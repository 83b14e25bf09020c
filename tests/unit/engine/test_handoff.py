"""Requests that go on in another engine: tokens, pages in every state, and pages that cannot be used."""

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from eprt.engine.engine import Engine
from eprt.engine.outputs import HandoffEvent
from eprt.engine.sampling_params import SamplingParams
from eprt.kv.reader import HeldPages
from tests.unit.engine.cases import expected, make_engine

PAGE = 4


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    """Two instances of one rank each."""
    both = make_engine(64, hands_over=True), make_engine(64, hands_over=True)
    yield both
    for engine in both:
        engine.check_integrity()
        engine.close()


def wait_events(engine: Engine, num: int = 1) -> list[HandoffEvent]:
    """The next events of an engine that takes no step meanwhile."""
    events: list[HandoffEvent] = []
    for future in itertools.count():
        events += engine.handoff.advance()
        engine.check_integrity()
        if len(events) >= num:
            return events
        engine.handoff._thread.submit(int).result()  # what was submitted before has been done
        assert future < 100, "nothing happens"
    raise AssertionError


def step_all(engine: Engine) -> dict[str, list[int]]:
    """Tokens by request, until nothing runs."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).append(output.token_id)
        engine.check_integrity()
    return tokens


def prefill(engine: Engine, request_id: str, prompt: list[int], params: SamplingParams) -> tuple[int, HeldPages]:
    """The first token, and the pages that are held."""
    engine.add_request(request_id, prompt, params, hands_over=True)
    (token_id,) = step_all(engine)[request_id]
    (event,) = wait_events(engine)
    assert event.request_id == request_id and event.held is not None
    return token_id, event.held


def go_on(
    engine: Engine, request_id: str, prompt: list[int], params: SamplingParams, token_id: int, held: HeldPages
) -> int:
    """Offers, waits for the pages and starts; returns how many pages were pulled."""
    engine.intake.offer_request(request_id, prompt, params, 0, [token_id], held)
    (arrived,) = wait_events(engine)
    assert (arrived.request_id, arrived.held, arrived.error) == (request_id, None, "")
    assert not engine.has_work, "arriving is no work: the ranks may sleep"
    assert engine.handoff.start_request(request_id)
    assert engine.has_work
    return arrived.num_pulled


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_goes_on_with_the_same_tokens_and_computes_no_prompt(engines, num_prompt, temperature):
    first, second = engines
    prompt = list(np.random.default_rng(num_prompt).integers(6, 20, num_prompt).tolist())
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    token_id, held = prefill(first, "a", prompt, params)
    assert first.stats().num_held_now == 1 and first.stats().kv_pages_used_now == -(-num_prompt // PAGE)
    assert go_on(second, "a", prompt, params, token_id, held) == -(-num_prompt // PAGE)
    assert first.abort("a") and not first.abort("a")
    assert first.stats().kv_pages_used_now == 0
    assert [token_id, *step_all(second)["a"]] == expected(prompt, params)[0]
    assert second.stats().num_prompt_tokens == 0 and second.stats().kv_pages_used_now == 0


def test_only_pages_that_the_prefix_cache_lacks_are_pulled(engines):
    first, second = engines
    params = SamplingParams(max_tokens=4, temperature=0, seed=1, ignore_eos=True)
    prompt = list(range(6, 6 + 3 * PAGE + 1))
    for request_id, tail, num_pulled in (("a", [], 4), ("b", [], 1), ("c", [7] * PAGE, 2)):
        token_id, held = prefill(first, request_id, prompt + tail, params)
        assert go_on(second, request_id, prompt + tail, params, token_id, held) == num_pulled
        first.abort(request_id)
        assert [token_id, *step_all(second)[request_id]] == expected(prompt + tail, params)[0]


def test_a_request_that_its_first_token_ends_is_not_held(engines):
    first, _ = engines
    prompt = [6, 7, 8]
    params = SamplingParams(max_tokens=1, temperature=0, seed=1)
    first.add_request("one", prompt, params, hands_over=True)
    params = SamplingParams(max_tokens=9, temperature=0, seed=1)
    stop = expected(prompt, params)[0][0]
    params = SamplingParams(max_tokens=9, temperature=0, seed=1, stop_token_ids=(stop,))
    first.add_request("stop", prompt, params, hands_over=True)
    first.add_request("none", prompt, SamplingParams(max_tokens=0, temperature=0, seed=1), hands_over=True)
    reasons = {}
    while first.has_work:
        reasons |= {output.request_id: output.finish_reason for output in first.step().outputs}
    assert reasons == {"one": "length", "stop": "stop", "none": "length"}
    assert first.handoff.num_held == 0 and first.stats().kv_pages_used_now == 0


def test_generated_tokens_are_computed_again_before_a_request_goes_on(engines):
    """A request whose instance was lost: prompt and generated tokens go to the first one again."""
    first, second = engines
    prompt, params = [6, 9, 8, 7, 11], SamplingParams(max_tokens=12, temperature=1, seed=5, ignore_eos=True)
    tokens = expected(prompt, params)[0]
    first.add_request("a", prompt, params, generated=tokens[:5], hands_over=True)
    assert step_all(first)["a"] == [tokens[5]]
    (event,) = wait_events(first)
    assert event.held is not None
    second.intake.offer_request("a", prompt, params, 0, tokens[:6], event.held)
    wait_events(second)
    second.handoff.start_request("a")
    assert step_all(second)["a"] == tokens[6:]


@pytest.mark.parametrize("page", range(3))
def test_a_flipped_byte_is_found_and_nothing_of_it_is_known(engines, page):
    first, second = engines
    prompt, params = list(range(6, 6 + 2 * PAGE + 1)), SamplingParams(max_tokens=6, temperature=0, seed=1)
    token_id, held = prefill(first, "a", prompt, params)
    (bytes_LPB,) = first.handoff.require_cache().bytes_LPB
    bytes_LPB[-1, held.pages[page], 3] ^= 1
    second.intake.offer_request("a", prompt, params, 0, [token_id], held)
    (arrived,) = wait_events(second)
    assert "damaged" in arrived.error
    assert not second.handoff.start_request("a") and second.handoff.num_arriving == 0
    second.add_request("a", prompt, params, generated=[token_id])  # as the router does: it is computed here
    assert [token_id, *step_all(second)["a"]] == expected(prompt, params)[0]
    assert second.stats().num_cached_tokens == 0


def test_pages_of_a_process_that_is_gone_are_an_error(engines):
    first, second = engines
    prompt, params = [6, 7, 8], SamplingParams(max_tokens=6, temperature=0, seed=1)
    token_id, held = prefill(first, "a", prompt, params)
    gone = msgspec.structs.replace(held.source, pid=2**22 - 1, owner="gone")
    elsewhere = msgspec.structs.replace(held, source=gone)
    second.intake.offer_request("a", prompt, params, 0, [token_id], elsewhere)
    (arrived,) = wait_events(second)
    assert "No such file" in arrived.error
    wrong = msgspec.structs.replace(held.source, parts=())
    with pytest.raises(ValueError, match="do not fit"):
        second.intake.offer_request("a", prompt, params, 0, [token_id], msgspec.structs.replace(held, source=wrong))


def test_a_full_cache_lets_offers_wait(engines):
    """The pages stay on the other side until there is room here."""
    first, _ = engines
    small = make_engine(6, hands_over=True)
    params = SamplingParams(max_tokens=4, temperature=0, seed=1, ignore_eos=True)
    prompts = [[6 + i] * (4 * PAGE) for i in range(2)]
    tokens = {}
    for i, prompt in enumerate(prompts):
        tokens[i], held = prefill(first, str(i), prompt, params)
        small.intake.offer_request(str(i), prompt, params, 0, [tokens[i]], held)
    (arrived,) = wait_events(small)
    assert arrived.request_id == "0" and small.handoff.num_arriving == 2
    small.handoff.start_request("0")
    assert [tokens[0], *step_all(small)["0"]] == expected(prompts[0], params)[0]
    (arrived,) = wait_events(small)
    assert arrived.request_id == "1"
    small.handoff.start_request("1")
    assert [tokens[1], *step_all(small)["1"]] == expected(prompts[1], params)[0]
    small.close()


@pytest.mark.parametrize("phase", ["computed", "held", "offered", "pulling", "arrived", "started", "running"])
def test_nothing_is_left_of_a_request_that_is_dropped(engines, phase):
    first, second = engines
    prompt, params = list(range(6, 20)), SamplingParams(max_tokens=6, temperature=0, seed=1, ignore_eos=True)
    if phase == "computed":
        first.add_request("a", prompt, params, hands_over=True)
        assert first.abort("a")
        return
    token_id, held = prefill(first, "a", prompt, params)
    if phase != "held":
        second.intake.offer_request("a", prompt, params, 0, [token_id], held)
    if phase == "pulling":
        second.handoff.advance()
    if phase in ("arrived", "started", "running"):
        wait_events(second)
    if phase in ("started", "running"):
        second.handoff.start_request("a")
    if phase == "running":
        second.step()
    assert second.abort("a") == (phase != "held")
    assert first.abort("a")
    for _ in range(100):
        assert second.handoff.advance() == []
        second.check_integrity()
        if not second.stats().kv_pages_used_now:
            break
        second.handoff._thread.submit(int).result()
    assert not second.has_work and second.handoff.num_arriving == 0
    assert first.stats().kv_pages_used_now == second.stats().kv_pages_used_now == 0


def test_sums_wait_for_the_step_that_filled_the_pages_and_pulls_for_all_that_are_launched(engines, monkeypatch):
    """On a GPU the thread's stream does: each mark stands behind what was launched before it."""
    first, second = engines
    prompt, params = list(range(6, 6 + 2 * PAGE)), SamplingParams(max_tokens=6, temperature=0, seed=1)
    num_marks, seen = dict.fromkeys(engines, 0), {engine: [] for engine in engines}

    def mark(engine: Engine):
        num_marks[engine] += 1
        number = num_marks[engine]
        return lambda: seen[engine].append(number)

    for engine in engines:
        cache = engine.handoff.require_cache()
        monkeypatch.setattr(cache, "after_steps", lambda engine=engine: mark(engine))
        sums = cache.checksums
        monkeypatch.setattr(
            cache, "checksums", lambda pages, engine=engine, sums=sums: seen[engine].append("sum") or sums(pages)
        )
    first.add_request("a", prompt, params, hands_over=True)
    first.step()
    assert num_marks[first] == 1 and not seen[first]
    for request_id in ("b", "c"):
        first.add_request(request_id, [*prompt, 7], params, hands_over=True)
        first.step()
    assert num_marks[first] == 3
    held = {event.request_id: event.held for event in wait_events(first, 3)}
    assert seen[first] == [1, "sum", 2, "sum", 3, "sum"], "each waits for its own step, not for later ones"
    second.intake.offer_request("a", prompt, params, 0, [7], held["a"])
    wait_events(second)
    assert seen[second] == [1, "sum"]
    second.abort("a")
    for request_id in held:
        first.abort(request_id)


def test_engines_without_readable_pages_say_so():
    engine = make_engine(8)
    with pytest.raises(ValueError, match="hands_over is not set"):
        engine.add_request("a", [6, 7], SamplingParams(max_tokens=4), hands_over=True)
    assert engine.handoff.source is None
    engine.close()
