"""Masks of a step against a slow oracle: a matcher that is made anew and given all tokens, for each row and draft."""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eprt.engine import masks as masks_module
from eprt.engine.batch_rows import BatchRows
from eprt.engine.grammars import Grammars
from eprt.engine.masks import MaskMaker, Masks
from eprt.engine.request import Request
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.schedule import SampledTokens, Schedule
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.engine.tokenizer import Tokenizer
from tests.paths import DEMO

VOCAB, EOS, NUM_ROWS = 640, 1, 6
FORMS = [
    StructuredOutputs(json={"type": "array", "items": {"type": "integer"}}),
    None,
    StructuredOutputs(regex="[a-c]*"),
    StructuredOutputs(choice=("one", "two two")),
]
PROMPT = [5, 6]


class Batch:
    """Rows with requests, and the maker of their masks. Tokens are drawn among those that may follow."""

    def __init__(self, grammars: Grammars, num_drafts: int = 0):
        self.grammars, self.rng = grammars, np.random.default_rng(0)
        self.rows = BatchRows(NUM_ROWS, 64, 16, VOCAB, num_drafts)
        self.draft_MK = torch.zeros(NUM_ROWS, num_drafts, dtype=torch.int64)
        self.maker = MaskMaker(self.rows, self.draft_MK, grammars)
        self.requests: list[Request] = []

    def add_request(self, form: StructuredOutputs | None, generated: tuple[int, ...] = (), ignore_eos: bool = False):
        params = SamplingParams(max_tokens=60, structured_outputs=form, ignore_eos=ignore_eos)
        request = Request.new(
            str(len(self.requests)),
            PROMPT,
            params,
            sample_idx=0,
            seed=0,
            max_model_len=64,
            eos_token_ids=(EOS,),
            generated=generated,
        )
        request.grammar = None if form is None else self.grammars.compile(form)
        self.rows.assign_row(request)
        self.requests.append(request)
        return request

    def schedule(self, requests: list[Request] | None = None, drafts: list[int] | None = None) -> Schedule:
        requests = self.requests if requests is None else requests
        row_S = np.array([request.row for request in requests], dtype=np.int64)
        draft_S = None if drafts is None else np.array(drafts)
        lengths, holders = self.rows.length_M[row_S].copy(), self.rows.holder_M[row_S].copy()
        ids = [request.request_id for request in requests]
        return Schedule(requests, [], requests, ids, row_S, lengths, holders, len(row_S), draft_S)

    def masks(self, schedule: Schedule, previous=None) -> Masks | None:
        self.maker.begin(schedule, previous)
        return self.maker.finish()

    def generated(self, request: Request) -> list[int]:
        return self.rows.tokens_ML[request.row, len(PROMPT) : self.rows.length_M[request.row]].tolist()

    def append_token(self, request: Request, token_id: int) -> None:
        row_X = np.array([request.row])
        self.rows.count_token(row_X)
        self.rows.store_tokens(row_X, self.rows.length_M[row_X] - 1, np.array([token_id]))

    def may_follow(self, request: Request, tokens: list[int]) -> np.ndarray | None:
        """bool [V], the oracle; None: the tokens do not fit, or go on behind the end."""
        matcher = request.grammar.deep_copy()
        for token_id in tokens:
            if matcher.is_stopped() or not matcher.consume_token(token_id):
                return None
        allowed_V = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB] == 1
        if request.params.ignore_eos and allowed_V.sum() > allowed_V[EOS]:
            allowed_V[EOS] = False
        return allowed_V

    def check(self, masks: Masks | None, schedule: Schedule) -> None:
        want: dict[int, np.ndarray] = {}
        for i, request in enumerate(schedule.sampled):
            if request.grammar is None:
                continue
            num = 0 if schedule.draft_S is None else int(schedule.draft_S[i])
            for k in range(num + 1):
                allowed_V = self.may_follow(request, self.generated(request) + self.draft_MK[request.row, :k].tolist())
                if allowed_V is None:
                    allowed_V = ~(np.arange(VOCAB) == EOS) | (not request.params.ignore_eos)
                want[int(schedule.first_S[i]) + k] = allowed_V
        assert masks is not None and masks.index_Y.tolist() == list(want)
        got_YV = np.unpackbits(masks.bits_YB, axis=1, count=VOCAB, bitorder="little") == 1
        assert (got_YV == np.array(list(want.values()))).all()
        logits_XV = torch.zeros(len(schedule.row_X), VOCAB)
        masks.apply(logits_XV)
        for at, allowed_V in want.items():
            assert (logits_XV[at].numpy() == np.where(allowed_V, 0, -np.inf)).all()

    def draw_tokens(self, requests: list[Request] | None = None) -> None:
        for request in self.requests if requests is None else requests:
            if request.grammar is None:
                self.append_token(request, 7)
                continue
            allowed = self.may_follow(request, self.generated(request))
            assert allowed is not None
            self.append_token(request, int(self.rng.choice(np.flatnonzero(allowed))))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer(DEMO)
    return Grammars(lambda: tokenizer, VOCAB, [EOS])


@pytest.fixture(params=["in the step", "beside it"])
def batch(grammars, request, monkeypatch) -> Iterator[Batch]:
    if request.param == "beside it":
        monkeypatch.setattr(masks_module, "_LARGE", 0)
    batch = Batch(grammars)
    yield batch
    batch.maker.close()


def test_requests_that_go_on_come_and_leave(batch):
    for i in range(4):
        batch.add_request(FORMS[i], ignore_eos=i % 2 == 0)
    for step in range(8):
        if step == 3:
            batch.rows.release_row(batch.requests.pop(2))
        if step == 5:
            batch.add_request(FORMS[0])
        running = [request for request in batch.requests if EOS not in batch.generated(request)]
        schedule = batch.schedule(running)
        batch.check(batch.masks(schedule), schedule)
        batch.draw_tokens(running)


def test_a_row_that_another_request_gets_has_another_place(batch):
    batch.add_request(FORMS[0])
    schedule = batch.schedule()
    batch.check(batch.masks(schedule), schedule)
    batch.draw_tokens()
    row = batch.requests[0].row
    batch.rows.release_row(batch.requests.pop())
    assert batch.add_request(FORMS[2], generated=(40,)).row == row
    schedule = batch.schedule()
    masks = batch.masks(schedule)
    assert masks is not None
    tokens = batch.requests[0].tokens_L[len(PROMPT) :].tolist()
    assert tokens == [40]


def test_requests_continue_behind_what_they_have_and_go_back(batch, grammars):
    tokens = Tokenizer(DEMO).encode("abcab")[1:]
    request = batch.add_request(FORMS[2], generated=tuple(tokens))
    schedule = batch.schedule()
    batch.check(batch.masks(schedule), schedule)
    batch.rows.length_M[request.row] -= 1  # of a step that was thrown away
    schedule = batch.schedule()
    batch.check(batch.masks(schedule), schedule)
    batch.maker.begin(schedule)
    batch.maker.start_again()
    batch.rows.length_M[request.row] += 1
    schedule = batch.schedule()
    batch.check(batch.masks(schedule), schedule)


def test_steps_without_a_form_have_no_masks(batch):
    assert batch.masks(batch.schedule([])) is None
    free, held = batch.add_request(None), batch.add_request(FORMS[0])
    assert batch.masks(batch.schedule([free])) is None
    schedule = batch.schedule([free, held])
    batch.check(batch.masks(schedule), schedule)
    assert batch.masks(batch.schedule([free])) is None


def test_tokens_that_only_the_device_knows_are_waited_for(batch):
    first, second = batch.add_request(FORMS[0]), batch.add_request(FORMS[2])
    before = batch.schedule()
    batch.check(batch.masks(before), before)
    allowed = [batch.may_follow(request, []) for request in (first, second)]
    chosen = [int(np.flatnonzero(allowed_V)[-1]) for allowed_V in allowed if allowed_V is not None]
    row_X = before.row_X
    batch.rows.count_token(row_X)
    previous = SimpleNamespace(schedule=before, fetch=lambda: SampledTokens(np.array(chosen)))
    masks = batch.masks(schedule := batch.schedule(), previous)
    batch.rows.store_tokens(row_X, batch.rows.length_M[row_X] - 1, np.array(chosen))
    batch.check(masks, schedule)


def test_logits_that_are_no_numbers_leave_a_matcher_where_it_is(batch):
    bad, good = batch.add_request(FORMS[0]), batch.add_request(FORMS[2])
    schedule = batch.schedule()
    batch.check(batch.masks(schedule), schedule)
    batch.append_token(bad, -1)
    batch.draw_tokens([good])
    masks = batch.masks(batch.schedule())
    assert masks is not None
    schedule = batch.schedule([good])
    batch.check(batch.masks(schedule), schedule)


def test_a_token_that_does_not_fit_leaves_nothing(batch, caplog):
    wrong, right = batch.add_request(FORMS[3]), batch.add_request(FORMS[2])
    schedule = batch.schedule()
    batch.check(batch.masks(schedule), schedule)
    batch.append_token(wrong, Tokenizer(DEMO).encode("x")[1])
    batch.draw_tokens([right])
    masks = batch.masks(batch.schedule())
    assert masks is not None and not masks.bits_YB[0].any() and masks.bits_YB[1].any()
    assert "a grammar cannot be followed any further" in caplog.text


def test_each_draft_has_a_mask(grammars, monkeypatch):
    for large in (1 << 18, 0):
        monkeypatch.setattr(masks_module, "_LARGE", large)
        batch = Batch(grammars, num_drafts=3)
        for form in FORMS:
            batch.add_request(form, ignore_eos=True)
        for drafts in ([3, 2, 1, 0], [0, 1, 3, 2], [1, 3, 0, 0]):
            for request in batch.requests:
                tokens = batch.generated(request)
                for k in range(3):  # the last drafts of some fit, of others not
                    allowed_V = None if request.grammar is None else batch.may_follow(request, tokens)
                    fits = not (k == 2 and request.row == 2)
                    tokens = [*tokens, 630 if allowed_V is None or not fits else int(np.flatnonzero(allowed_V)[-1])]
                batch.draft_MK[request.row] = torch.tensor(tokens[-3:])
            schedule = batch.schedule(drafts=drafts)
            batch.check(batch.masks(schedule), schedule)
            batch.draw_tokens([request for request in batch.requests if EOS not in batch.generated(request)])
        batch.maker.close()
