"""Requests that wait for their grammars: in which order they become known, and whose ids they hold meanwhile."""

import threading
from concurrent.futures import Future

import pytest

from eprt.engine.grammars import GrammarError
from eprt.engine.outputs import TokenOutput
from eprt.engine.preparation import Preparation
from eprt.engine.request import Request
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.structured_outputs import StructuredOutputs

FORM, WRONG = StructuredOutputs(regex="[a-z]+"), StructuredOutputs(regex="wrong")


class SlowGrammars:
    """Compiles when it may. Its grammars are texts."""

    def __init__(self):
        self.may_compile = threading.Event()

    def compile(self, outputs: StructuredOutputs) -> str:
        assert self.may_compile.wait(10)
        if outputs is WRONG:
            raise GrammarError("no such thing")
        return outputs.text


class FakeScheduler:
    """Keeps what it is given."""

    def __init__(self):
        self.requests: dict[str, Request] = {}

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request


@pytest.fixture
def parts():
    grammars, scheduler = SlowGrammars(), FakeScheduler()
    preparation = Preparation(grammars, scheduler)  # type: ignore[arg-type]
    yield grammars, scheduler, preparation
    grammars.may_compile.set()
    preparation.close()


def make_request(request_id: str, form: StructuredOutputs | None = None) -> Request:
    params = SamplingParams(max_tokens=4, structured_outputs=form)
    return Request.new(request_id, [1, 2], params, sample_idx=0, seed=0, max_model_len=64, eos_token_ids=(1,))


def settle(preparation: Preparation) -> list[TokenOutput]:
    """Waits until nothing is compiled any more."""
    futures: list[Future] = [future for _, future in preparation._waiting.values()]
    for future in futures:
        future.exception(10)
    return preparation.move_ready()


def test_requests_without_a_form_do_not_wait(parts):
    _, scheduler, preparation = parts
    preparation.add_request(make_request("a", FORM))
    preparation.add_request(make_request("b"))
    assert list(scheduler.requests) == ["b"] and len(preparation) == 1
    assert preparation.move_ready() == [] and list(scheduler.requests) == ["b"]


def test_a_compiled_grammar_comes_along(parts):
    grammars, scheduler, preparation = parts
    preparation.add_request(make_request("a", FORM))
    grammars.may_compile.set()
    assert settle(preparation) == [] and len(preparation) == 0
    assert scheduler.requests["a"].grammar == FORM.text


def test_what_cannot_be_compiled_ends_its_request_alone(parts):
    grammars, scheduler, preparation = parts
    preparation.add_request(make_request("a", WRONG))
    preparation.add_request(make_request("b", FORM))
    grammars.may_compile.set()
    (end,) = settle(preparation)
    assert (end.request_id, end.finish_reason, end.error) == ("a", "abort", "no such thing")
    assert list(scheduler.requests) == ["b"]


@pytest.mark.parametrize("forms", [(FORM, FORM), (FORM, None), (None, FORM)], ids=["both", "the first", "the second"])
def test_an_id_is_in_use_from_the_first_request_on(parts, forms):
    grammars, scheduler, preparation = parts
    first, second = (make_request("a", form) for form in forms)
    preparation.add_request(first)
    with pytest.raises(ValueError, match="request id 'a' is already in use on this rank"):
        preparation.add_request(second)
    grammars.may_compile.set()
    assert settle(preparation) == [] and scheduler.requests == {"a": first}
    with pytest.raises(ValueError, match="request id 'a' is already in use on this rank"):
        preparation.add_request(second)


def test_a_dropped_request_never_runs(parts):
    grammars, scheduler, preparation = parts
    preparation.add_request(make_request("a", FORM))
    assert preparation.drop_request("a") and not preparation.drop_request("a")
    grammars.may_compile.set()
    assert settle(preparation) == [] and not scheduler.requests
    preparation.add_request(make_request("a", FORM))
    assert settle(preparation) == [] and list(scheduler.requests) == ["a"]
