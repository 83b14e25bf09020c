"""Masks: which tokens may follow, for the rows of a step whose requests have a grammar.

begin() before the forward pass, finish() when its logits are about to be sampled from. On GPUs, and where masks are
large, a thread finds them while the forward pass runs. On a CPU small masks are found in begin() itself: the threads of
the forward pass, which wait for each other after every operator, would lose more by making room for another thread.

A row's place in its grammar follows from its tokens: what the matcher lacks of them it is given, what it has too many
it gives back. So it makes no difference whether a request was preempted, was taken over from another rank, or loses
tokens of a step that is thrown away. With drafts each drafted position has its own mask: that which holds if the drafts
before it are accepted; behind a draft that the grammar forbids, which will not be, anything may follow.

There is no work per row here but llguidance's, as long as every request goes on by one token: a step of a small model
takes some microseconds per row.
Suffixes: Y rows of logits, G requests with a grammar, B bytes of a mask: bit i % 8 of byte i // 8 is token i.
"""

import contextlib
import logging
from dataclasses import dataclass
from typing import Protocol

import llguidance
import numpy as np
import torch
from torch import Tensor

from eprt.engine.batch_rows import BatchRows
from eprt.engine.grammars import Grammars, MaskRows
from eprt.engine.schedule import SampledTokens, Schedule
from eprt.engine.side_thread import SideThread
from eprt.gpu.readback import HostSnapshot
from eprt.gpu.upload import upload
from eprt.ops import mask_tokens, native

_log = logging.getLogger(__name__)
_ERROR_LENGTH = 200
_LARGE = 1 << 18  # bytes of a step's masks


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of a step."""

    index_Y: np.ndarray  # int64: which rows of the step's logits have one
    bits_YB: np.ndarray  # uint8
    tensors: tuple[Tensor, Tensor]  # of the same memory

    @staticmethod
    def from_arrays(index_Y: np.ndarray, bits_YB: np.ndarray) -> "Masks":
        return Masks(index_Y, bits_YB, (torch.from_numpy(bits_YB), torch.from_numpy(index_Y)))

    def apply(self, logits_XV: Tensor) -> None:
        """Takes the tokens that may not follow from the logits."""
        if logits_XV.is_cuda:
            mask_tokens(logits_XV, *upload([self.bits_YB, self.index_Y], logits_XV.device))
        else:
            # Without what stands before the kernel, which after a forward pass takes longer than to mask some rows.
            native.load().mask_tokens(logits_XV, *self.tensors, torch.get_num_threads())


class PreviousStep(Protocol):
    """The step before, whose tokens the host may not know yet."""

    @property
    def schedule(self) -> Schedule: ...

    def fetch(self) -> SampledTokens:
        """Its tokens: waits for them."""
        ...


class _Requests:
    """The requests of a step that have a grammar. Most steps have those of the step before."""

    def __init__(self, schedule: Schedule, rows: BatchRows, mask_bytes: int):
        self.key = _Requests.key_of(schedule)
        self.at_G = np.flatnonzero(rows.matchers.has_M[schedule.row_S])  # which of the step's requests they are
        self.row_G = schedule.row_S[self.at_G]
        self.num_prompt_G = rows.num_prompt_M[self.row_G]
        self.matchers = rows.matchers.select(self.row_G)
        self.ends_late_G = rows.matchers.ends_late_M[self.row_G]
        self.some_end_late = bool(self.ends_late_G.any())
        self.one_token_each = [1] * len(self.matchers)
        # Of steps without drafts, one after the other.
        self.memory = MaskRows.allocate(len(self.matchers), mask_bytes)
        self.masks = Masks.from_arrays(self.at_G, self.memory.bits_YB)

    @staticmethod
    def key_of(schedule: Schedule) -> bytes:
        """Another one where other requests are in the step, or in its rows."""
        return schedule.row_S.tobytes() + schedule.holder_S.tobytes()


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
        self._masks: Masks | None = None  # of the step that was begun, where they are there already
        self._requests: _Requests | None = None  # of the latest masks

    def begin(self, schedule: Schedule, previous: PreviousStep | None = None) -> None:
        """Starts on the masks of a step. Before its forward pass is launched, which must not change the rows."""
        self._masks = None
        if self._rows.matchers and len(schedule.row_S):
            job = schedule, previous, None if schedule.draft_S is None else HostSnapshot([self._draft_token_MK])
            if self._draft_token_MK.is_cuda or self._are_large(schedule):
                self._thread.start_call(*job)
            else:
                self._masks = self._find_masks(*job)

    def finish(self) -> Masks | None:
        """The masks of the step that was begun; None where it needs none."""
        return self._thread.finish_call() if self._thread.is_busy else self._masks

    def start_again(self) -> None:
        """A step is thrown away: tokens that matchers have seen may come out differently."""
        if self._thread.is_busy:
            with contextlib.suppress(Exception):
                self._thread.finish_call()
        self._rows.matchers.start_again()

    def close(self) -> None:
        self._thread.close()

    def _are_large(self, schedule: Schedule) -> bool:
        return len(schedule.row_X) * self._grammars.mask_bytes >= _LARGE

    def _find_masks(
        self, schedule: Schedule, previous: PreviousStep | None, drafts: HostSnapshot | None
    ) -> Masks | None:
        requests = self._requests
        if requests is None or requests.key != _Requests.key_of(schedule):
            requests = self._requests = _Requests(schedule, self._rows, self._grammars.mask_bytes)
        if not requests.matchers:
            return None
        in_threads = self._are_large(schedule)
        token_ids = self._take_tokens(requests, schedule, previous)
        if drafts is None:
            whose_Y, masks = None, requests.masks
            self._grammars.fill_masks(requests.matchers, token_ids, requests.memory, in_threads)
        else:
            index_Y, whose_Y, jobs = _place_drafts(requests, schedule, drafts)
            memory = MaskRows.allocate(len(whose_Y), self._grammars.mask_bytes)
            self._grammars.fill_draft_masks(jobs, token_ids, memory, in_threads)
            masks = Masks.from_arrays(index_Y, memory.bits_YB)
        if any(map(llguidance.LLMatcher.is_error, requests.matchers)):
            _forbid_all(requests, whose_Y, masks.bits_YB)
        if requests.some_end_late:
            late_Y = requests.ends_late_G if whose_Y is None else requests.ends_late_G[whose_Y]
            _delay_ends(masks.bits_YB, late_Y, self._grammars.eos_B)
        return masks

    def _take_tokens(self, requests: _Requests, schedule: Schedule, previous: PreviousStep | None) -> list[int] | None:
        """The tokens, one per request, that bring the matchers up to the requests' tokens. None: they are up to them
        now, because some lacked more or had too many."""
        num_matched_M = self._rows.matchers.num_matched_M
        length_G = schedule.length_S[requests.at_G]
        token_G = self._latest_tokens(requests.row_G, length_G, previous)
        num_generated_G = length_G - requests.num_prompt_G
        num_new_G = num_generated_G - num_matched_M[requests.row_G]
        token_ids = token_G.tolist()
        # -1: the logits were not numbers, which ends the request.
        if num_new_G.tolist() == requests.one_token_each and min(token_ids) >= 0:
            num_matched_M[requests.row_G] = num_generated_G
            return token_ids
        for g in np.flatnonzero((num_new_G != 0) & (token_G >= 0)).tolist():
            matcher, row, length, num_new = requests.matchers[g], requests.row_G[g], length_G[g], int(num_new_G[g])
            if num_new < 0:
                matcher.rollback(-num_new)
            else:
                known = self._rows.tokens_ML[row, length - num_new : length - 1].tolist()
                matcher.consume_tokens([*known, token_ids[g]])
            num_matched_M[row] = num_generated_G[g]
        return None

    def _latest_tokens(self, row_G: np.ndarray, length_G: np.ndarray, previous: PreviousStep | None) -> np.ndarray:
        """int64: the last token of each, waited for where the step before chooses it."""
        token_G = self._rows.tokens_ML[row_G, length_G - 1]
        if previous is None:
            return token_G
        latest_M = np.empty(len(self._rows.unknown_M), dtype=np.int64)
        latest_M[previous.schedule.row_X] = previous.fetch().token_X
        return np.where(self._rows.unknown_M[row_G], latest_M[row_G], token_G)


def _place_drafts(
    requests: _Requests, schedule: Schedule, drafts: HostSnapshot
) -> tuple[np.ndarray, np.ndarray, list[tuple[llguidance.LLMatcher, int, list[int]]]]:
    """Masks.index_Y; which of the requests each mask is of, int64; and what Grammars.fill_draft_masks() takes."""
    assert schedule.draft_S is not None
    (draft_MK,) = drafts.values()
    num_drafts_G = schedule.draft_S[requests.at_G]
    whose_Y = np.repeat(np.arange(len(num_drafts_G)), num_drafts_G + 1)
    first_mask_G = np.cumsum(num_drafts_G + 1) - num_drafts_G - 1
    offset_Y = np.arange(len(whose_Y)) - first_mask_G[whose_Y]
    places = zip(requests.matchers, requests.row_G.tolist(), first_mask_G.tolist(), num_drafts_G.tolist())
    jobs = [(matcher, first, draft_MK[row, :num].tolist()) for matcher, row, first, num in places]
    return schedule.first_S[requests.at_G][whose_Y] + offset_Y, whose_Y, jobs


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
