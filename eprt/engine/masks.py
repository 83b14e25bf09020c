"""Masks: which tokens may follow, for the rows of a step whose requests have a grammar, found beside the step.

A thread finds them while the forward pass runs: begin() before it, finish() when its logits are about to be sampled
from. A row's place in its grammar follows from its tokens: what the matcher lacks of them it is given, what it has too
many it gives back. So it makes no difference whether a request was preempted, was taken over from another rank, or
loses tokens of a step that is thrown away. With drafts each drafted position has its own mask: that which holds if the
drafts before it are accepted; behind a draft that the grammar forbids, which will not be, anything may follow.

The thread takes the interpreter from the step for every line of Python that it runs, and in the step's place it finds
the CPU's caches empty. So there is no work per row here but llguidance's, which needs no interpreter, as long as each
request goes on by one token.
Suffixes: Y rows of logits, G requests with a grammar, B bytes of a mask: bit i % 8 of byte i // 8 is token i.
"""

import contextlib
import logging
from dataclasses import dataclass
from typing import Protocol

import llguidance
import numpy as np
from torch import Tensor

from eprt.engine.batch_rows import BatchRows
from eprt.engine.grammars import Grammars
from eprt.engine.schedule import SampledTokens, Schedule
from eprt.engine.side_thread import SideThread
from eprt.gpu.readback import HostSnapshot

_log = logging.getLogger(__name__)
_ERROR_LENGTH = 200
_LARGE = 1 << 18  # bytes of a step's masks


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step."""

    index_Y: np.ndarray  # int64: which rows of the step's logits have one
    bits_YB: np.ndarray  # uint8


class PreviousStep(Protocol):
    """The step before, whose tokens the host may not know yet."""

    @property
    def schedule(self) -> Schedule: ...

    def fetch(self) -> SampledTokens:
        """Its tokens: waits for them."""
        ...


class _Requests:
    """The requests of a step that have a grammar. Most steps have those of the step before."""

    def __init__(self, schedule: Schedule, rows: BatchRows):
        self._row_S, self._holder_S = schedule.row_S, schedule.holder_S
        self.at_G = np.flatnonzero(rows.matchers.has_M[schedule.row_S])  # which of the step's requests they are
        self.row_G = schedule.row_S[self.at_G]
        self.num_prompt_G = rows.num_prompt_M[self.row_G]
        self.matchers = rows.matchers.select(self.row_G)
        self.mask_jobs = list(zip(self.matchers, range(len(self.matchers))))  # without drafts
        self.ends_late_G = rows.matchers.ends_late_M[self.row_G]
        self.some_end_late = bool(self.ends_late_G.any())

    def are_those_of(self, schedule: Schedule) -> bool:
        """holder_S tells whether another request has got the row."""
        return np.array_equal(schedule.row_S, self._row_S) and np.array_equal(schedule.holder_S, self._holder_S)


class MaskMaker:
    """Makes one rank's masks.

    Args:
        rows: of whom, with which tokens.
        draft_token_MK: int64, on the device, the latest drafts of each row.
        grammars: of the rows' matchers.
    """

    def __init__(self, rows: BatchRows, draft_token_MK: Tensor, grammars: Grammars):
        self._rows, self._draft_token_MK, self._grammars = rows, draft_token_MK, grammars
        self._thread = SideThread("masks", self._find_masks)
        self._job: tuple[Schedule, PreviousStep | None, HostSnapshot | None] | None = None
        self._requests: _Requests | None = None  # of the latest masks

    def begin(self, schedule: Schedule, previous: PreviousStep | None = None) -> None:
        """Starts on the masks of a step. Before its forward pass is launched, which must not change the rows."""
        assert self._job is None
        if self._rows.matchers and len(schedule.row_S):
            drafts = None if schedule.draft_S is None else HostSnapshot([self._draft_token_MK])
            self._job = schedule, previous, drafts
            if self._are_made_beside(len(schedule.row_X)):
                self._thread.start_call(*self._job)

    def finish(self) -> Masks | None:
        """The masks of the step that was begun; None where it needs none."""
        job, self._job = self._job, None
        if job is None:
            return None
        return self._thread.finish_call() if self._thread.is_busy else self._find_masks(*job)

    def start_again(self) -> None:
        """A step is thrown away: tokens that matchers have seen may come out differently."""
        self._job = None
        if self._thread.is_busy:
            with contextlib.suppress(Exception):
                self._thread.finish_call()
        self._rows.matchers.start_again()

    def close(self) -> None:
        self._thread.close()

    def _are_made_beside(self, num_masks: int) -> bool:
        """On a CPU small masks cost less than it costs the threads of the forward pass to make room."""
        return self._draft_token_MK.is_cuda or num_masks * self._grammars.mask_bytes >= _LARGE

    def _find_masks(
        self, schedule: Schedule, previous: PreviousStep | None, drafts: HostSnapshot | None
    ) -> Masks | None:
        requests = self._requests
        if requests is None or not requests.are_those_of(schedule):
            requests = self._requests = _Requests(schedule, self._rows)
        if not requests.matchers:
            return None
        self._match_tokens(requests, schedule, previous)
        if drafts is None:
            index_Y, whose_Y = requests.at_G, None
            bits_YB = np.empty((len(index_Y), self._grammars.mask_bytes), dtype=np.uint8)
            self._grammars.fill_masks(requests.mask_jobs, bits_YB, self._are_made_beside(len(bits_YB)))
        else:
            index_Y, whose_Y, bits_YB = self._fill_draft_masks(requests, schedule, drafts)
        if any(map(llguidance.LLMatcher.is_error, requests.matchers)):
            _forbid_all(requests, whose_Y, bits_YB)
        if requests.some_end_late:
            late_Y = requests.ends_late_G if whose_Y is None else requests.ends_late_G[whose_Y]
            _delay_ends(bits_YB, late_Y, self._grammars.eos_B)
        return Masks(index_Y, bits_YB)

    def _fill_draft_masks(
        self, requests: _Requests, schedule: Schedule, drafts: HostSnapshot
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Masks.index_Y, which of the requests each mask is of (int64), and Masks.bits_YB."""
        assert schedule.draft_S is not None
        (draft_MK,) = drafts.values()
        num_drafts_G = schedule.draft_S[requests.at_G]
        whose_Y = np.repeat(np.arange(len(num_drafts_G)), num_drafts_G + 1)
        first_mask_G = np.cumsum(num_drafts_G + 1) - num_drafts_G - 1
        offset_Y = np.arange(len(whose_Y)) - first_mask_G[whose_Y]
        bits_YB = np.full((len(whose_Y), self._grammars.mask_bytes), 0xFF, dtype=np.uint8)
        places = zip(requests.matchers, requests.row_G.tolist(), first_mask_G.tolist(), num_drafts_G.tolist())
        jobs = [(matcher, first, draft_MK[row, :num].tolist()) for matcher, row, first, num in places]
        self._grammars.fill_draft_masks(jobs, bits_YB, self._are_made_beside(len(bits_YB)))
        return schedule.first_S[requests.at_G][whose_Y] + offset_Y, whose_Y, bits_YB

    def _match_tokens(self, requests: _Requests, schedule: Schedule, previous: PreviousStep | None) -> None:
        """Brings the matchers up to the requests' tokens."""
        num_matched_M = self._rows.matchers.num_matched_M
        length_G = schedule.length_S[requests.at_G]
        token_G = self._latest_tokens(requests.row_G, length_G, previous)
        num_generated_G = length_G - requests.num_prompt_G
        num_new_G = num_generated_G - num_matched_M[requests.row_G]
        # -1: the logits were not numbers, which ends the request.
        if (num_new_G == 1).all() and (token_G >= 0).all():
            beside = self._are_made_beside(len(schedule.row_X))
            self._grammars.match_tokens(list(zip(requests.matchers, token_G.tolist())), beside)
            num_matched_M[requests.row_G] = num_generated_G
            return
        for g in np.flatnonzero((num_new_G != 0) & (token_G >= 0)).tolist():
            matcher, row, length, num_new = requests.matchers[g], requests.row_G[g], length_G[g], int(num_new_G[g])
            if num_new < 0:
                matcher.rollback(-num_new)
            else:
                known = self._rows.tokens_ML[row, length - num_new : length - 1].tolist()
                matcher.consume_tokens([*known, int(token_G[g])])
            num_matched_M[row] = num_generated_G[g]

    def _latest_tokens(self, row_G: np.ndarray, length_G: np.ndarray, previous: PreviousStep | None) -> np.ndarray:
        """int64: the last token of each, waited for where the step before chooses it."""
        token_G = self._rows.tokens_ML[row_G, length_G - 1]
        if previous is None:
            return token_G
        latest_M = np.empty(len(self._rows.unknown_M), dtype=np.int64)
        latest_M[previous.schedule.row_X] = previous.fetch().token_X
        return np.where(self._rows.unknown_M[row_G], latest_M[row_G], token_G)


def _forbid_all(requests: _Requests, whose_Y: np.ndarray | None, bits_YB: np.ndarray) -> None:
    """Nothing may follow where a grammar has failed: the sampler finds no token, which ends the request."""
    for g, matcher in enumerate(requests.matchers):
        if matcher.is_error():
            _log.warning("a grammar cannot be followed any further: %s", matcher.get_error()[:_ERROR_LENGTH])
            bits_YB[g if whose_Y is None else whose_Y == g] = 0


def _delay_ends(bits_YB: np.ndarray, late_Y: np.ndarray, eos_B: np.ndarray) -> None:
    """Takes what ends a completion from the masks of late_Y where something else may follow."""
    at_C = np.flatnonzero(eos_B)
    may_end_Z = np.flatnonzero((bits_YB[:, at_C] & eos_B[at_C]).any(axis=1) & late_Y)
    if len(may_end_Z):
        others_ZB = bits_YB[may_end_Z] & ~eos_B
        bits_YB[may_end_Z] = np.where(others_ZB.any(axis=1, keepdims=True), others_ZB, bits_YB[may_end_Z])
