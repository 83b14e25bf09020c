"""The queue's order, and whom its head displaces."""

from types import SimpleNamespace

import pytest

from eprt.engine.kv_cache import PagePool
from eprt.engine.request_queue import RequestQueue
from eprt.engine.sampling_params import SamplingParams
from tests.unit.engine.cases import expected, make_engine, tokens_of


def make_request(name: str, priority: int = 0, num_pages: int = 0, num_tokens: int = 1):
    return SimpleNamespace(name=name, priority=priority, pages=[0] * num_pages, tail=[], tokens_L=[0] * num_tokens)


def names(queue: RequestQueue) -> str:
    found = ""
    while queue:
        found += queue.head.name
        queue.remove(queue.head)
    return found


def test_smaller_priorities_first_and_then_the_order_of_arrival():
    queue = RequestQueue()
    for name, priority in (("c", 0), ("e", 5), ("a", -1), ("d", 0), ("f", 5), ("b", -1)):
        queue.add_request(make_request(name, priority))  # type: ignore[arg-type]
    queue.add_request(make_request("x", 0), is_first=True)  # type: ignore[arg-type]
    assert len(queue) == 7 and names(queue) == "abxcdef"


@pytest.mark.parametrize(
    "priority, num_tokens, num_free, max_running, wanted",
    [
        (1, 8, 0, 8, ""),  # nobody's is larger
        (0, 8, 0, 8, "dc"),  # two pages, and one for each that runs: d gives way to it with three, and needs none
        (0, 8, 2, 8, "d"),
        (0, 8, 6, 8, ""),  # room enough
        (0, 8, 6, 4, "d"),  # but no row
        (0, 24, 0, 8, ""),  # b would have to go, too
        (-1, 24, 0, 8, "dcb"),
        (-1, 100, 0, 8, ""),  # not even all would be enough
    ],
)
def test_the_head_displaces_as_few_as_make_room(priority, num_tokens, num_free, max_running, wanted):
    pool = PagePool(12 + num_free, 4)
    for _ in range(12):
        pool.allocate()
    running = [make_request(name, 0 if name < "c" else 1, 3) for name in "abcd"]
    queue = RequestQueue()
    queue.add_request(make_request("head", priority, num_tokens=num_tokens))  # type: ignore[arg-type]
    displaced = queue.find_displaced(running, pool, max_running)  # type: ignore[arg-type]
    assert "".join(request.name for request in displaced) == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize("overlap_schedule", [False, True])
@pytest.mark.parametrize("options", [{"max_num_seqs": 2}, {"num_pages": 10}], ids=["rows", "pages"])
def test_an_urgent_request_runs_at_once_and_the_others_give_their_tokens_all_the_same(options, overlap_schedule):
    engine = make_engine(**options, overlap_schedule=overlap_schedule)
    params = SamplingParams(max_tokens=12, temperature=1, seed=3, ignore_eos=True)
    urgent = SamplingParams(max_tokens=3, temperature=1, seed=4, ignore_eos=True, priority=-7)
    finished, tokens = [], {}

    def step() -> None:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).append(output)
            finished.extend([output.request_id] * (output.finish_reason is not None))
        engine.check_integrity()

    for i in range(3):
        engine.add_request(str(i), [10 + i] * 6, params)
    for _ in range(4):
        step()
    engine.add_request("urgent", [9] * 16, urgent)
    while engine.has_work:
        step()
    assert finished == ["urgent", "0", "1", "2"] and engine.stats().num_preemptions > 0
    assert tokens_of(tokens["urgent"]) == expected([9] * 16, urgent)[0]
    for i in range(3):
        assert tokens_of(tokens[str(i)]) == expected([10 + i] * 6, params)[0]
