"""Drafter: drafts the next tokens of running requests with the checkpoint's MTP layer, after each forward pass.

From the hidden state at a position and the token that followed it, the layer predicts the token after that one
(DeepSeek-V3, arXiv:2412.19437, section 2.2). It has a KV cache of its own, in the same pages, so it sees every token
that the model sees: prompts chunk by chunk, and each decoded token. The next step computes the drafts behind the last
token, and accepts those that equal what is sampled there. For several drafts the layer goes on from its own output.

All of it is launched with the step, before the host knows any of the step's tokens: the device counts which of the last
drafts are accepted, and the new drafts follow from there and stay there, where the next step takes them from. The host
learns how many were accepted, and prepares the next step while the new ones are computed. Passes over decodes alone are
recorded like the model's (graphs.py).

Collective: it runs equally often on all ranks, with no rows where there is nothing to draft.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.graphs import GraphsByContext
from eprt.engine.runner import PackedStep
from eprt.engine.schedule import Schedule
from eprt.ep.placement.load import LoadRecorder
from eprt.gpu.readback import HostSnapshot
from eprt.gpu.upload import upload
from eprt.layers.batch import ForwardBatch
from eprt.layers.tail_moves import leave_bookmarks
from eprt.models.model import Model

# A draft is read two positions before its own, and a row's last token is never drafted: the model may not know its
# position.
_BEFORE_THE_END = 3


class Drafter:
    """One rank's MTP layer at work.

    Args:
        cache: of the MTP layer, as its attention keeps it; the last page is for padding.
        token_MK: int64, on the device, where the drafts are left (runner.py).
        recorder: counts the load of the MTP layer's experts too.
        acceptance: draws the drafts; None: drafts are the likeliest tokens.
    """

    def __init__(
        self,
        model: Model,
        cache: Any,
        rows: BatchRows,
        token_MK: Tensor,
        recorder: LoadRecorder,
        acceptance: Acceptance | None = None,
    ):
        self.model, self.cache, self.rows, self._recorder = model, cache, rows, recorder
        self.token_MK, self._acceptance = token_MK, acceptance
        self.num_drafts = rows.num_drafts
        self.graphs: GraphsByContext | None = None  # set later, on GPUs
        self._nth_K = torch.arange(self.num_drafts, device=token_MK.device)

    def compute(self, batch: ForwardBatch, hidden_TH: Tensor) -> tuple[Tensor, ...]:
        """One pass of the layer. Of rows batch.logits_idx: the likeliest token behind batch.token_id_T, int64 [X], the
        hidden states that it was read from, [X, H], and, where drafts are drawn, its logits [X, V]. Collective.

        hidden_TH: at the batch's positions, of the tokens before.
        """
        hidden_XH = self.model.draft(hidden_TH, batch, self.cache)[batch.logits_idx]
        logits_XV = self.model.draft_logits(hidden_XH)
        token_X = logits_XV.argmax(dim=-1)
        return (token_X, hidden_XH) if self._acceptance is None else (token_X, hidden_XH, logits_XV)

    def launch(
        self, schedule: Schedule, packed: PackedStep, hidden_TH: Tensor, token_X: Tensor | None
    ) -> HostSnapshot | None:
        """New drafts for the step's requests; does not wait. How many of the last ones are accepted, int64 [S] on its
        way to the host; None where there were none.

        hidden_TH: of the step's forward pass. token_X: what was sampled, on the device; None where nothing was.
        """
        draft_S, last_S, length_S, room_S, next_T, table_SP, *tail_SF = self._upload(schedule, hidden_TH.device)
        accepted_S, snapshot = draft_S, None
        if schedule.draft_S is not None and token_X is not None:
            accepted_S = self._count_accepted(last_S, draft_S, packed.row_S, token_X)
            snapshot = HostSnapshot([accepted_S])
        if token_X is not None:
            # Behind a rejected draft it is wrong, and does no harm: the next step writes those cache entries again.
            # -1, where logits were not numbers, ends its request.
            next_T[packed.batch.logits_idx[: len(token_X)]] = token_X.clamp(min=0)
        batch = replace(packed.batch, token_id_T=next_T, logits_idx=last_S + accepted_S)
        chain = _Chain(packed.batch, length_S - 1 + accepted_S, room_S, table_SP, self.cache, *tail_SF)
        for k in range(self.num_drafts):
            if k:
                self._recorder.begin_drafts(len(schedule.row_S))
                batch = chain.make_batch(k, self.token_MK[packed.row_S, k - 1])
            token_S, hidden_TH, *logits = self._replay_or_compute(batch, hidden_TH)
            if k == 0 and batch.by_rows:
                leave_bookmarks(batch, [self.cache])
            if self._acceptance is not None:
                token_S = self._acceptance.draw_drafts(logits[0], token_S, schedule.row_S, k, 1 + accepted_S)
            self.token_MK[packed.row_S, k] = token_S
        return snapshot

    def count_drafts(self, schedule: Schedule, accepted_S: np.ndarray | None) -> None:
        """The host's part, after the commit: how many drafts each of the step's requests has."""
        rows, row_S = self.rows, schedule.row_S
        latest_S = schedule.length_S - 1 if accepted_S is None else schedule.length_S - 1 + accepted_S
        more_S = (self._first_without_room(row_S) - 1 - latest_S).clip(0, self.num_drafts - 1)
        rows.num_draft_M[row_S] = np.where(rows.can_draft_M[row_S], 1 + more_S, 0)

    def _upload(self, schedule: Schedule, device: torch.device) -> list[Tensor]:
        """On the device, of each request: how many of its last drafts the step computes; where in the batch its last
        token is; how many tokens it has; the first position without room; then the tokens that follow the batch's, as
        far as they are known; each request's pages; and its tail's, where the model has such."""
        row_S, page_size = schedule.row_S, self.rows.page_size
        draft_S = np.zeros_like(row_S) if schedule.draft_S is None else schedule.draft_S
        most = int(schedule.length_S.max(initial=0)) + 2 * self.num_drafts
        table_SP = self.rows.page_table_MP[:, : -(-most // page_size)].take(row_S, axis=0)
        where = [schedule.length_S, self._first_without_room(row_S), self._known_next_tokens(schedule), table_SP]
        if self.rows.tail_MF.shape[1]:
            where.append(self.rows.tail_MF.take(row_S, axis=0))
        return upload([draft_S, self._last_rows(schedule), *where], device)

    def _first_without_room(self, row_S: np.ndarray) -> np.ndarray:
        """int64 [S]: the first position that no draft may be put at."""
        return np.minimum(self.rows.num_slots_M[row_S], self.rows.max_len_M[row_S] - _BEFORE_THE_END)

    def _count_accepted(self, first_S: Tensor, draft_S: Tensor, row_S: Tensor, token_X: Tensor) -> Tensor:
        """int64 [S]: how many drafts are the tokens that were sampled in their places. Each token is sampled with its
        position's own random number, so tokens are those of decoding one by one."""
        at_SK = (first_S.unsqueeze(1) + self._nth_K).clamp(max=len(token_X) - 1)
        equal_SK = (token_X[at_SK] == self.token_MK[row_S]) & (self._nth_K < draft_S.unsqueeze(1))
        return equal_SK.cumprod(dim=1).sum(dim=1)

    def _replay_or_compute(self, batch: ForwardBatch, hidden_TH: Tensor) -> tuple[Tensor, ...]:
        if self.graphs is not None and self.graphs.fits(batch):
            result = self.graphs.run(batch, hidden_TH)
        else:
            result = self.compute(batch, hidden_TH)
        self._recorder.count_drafts(batch.num_tokens)
        return result

    def _known_next_tokens(self, schedule: Schedule) -> np.ndarray:
        """int64 [T]: the token that follows each of the batch's, where the host knows it; else anything."""
        tokens_ML = self.rows.tokens_ML
        parts = [tokens_ML[chunk.request_row, chunk.start + 1 : chunk.end + 1] for chunk in schedule.chunks]
        parts += [guest.tokens[1:] for guest in schedule.guests or ()]
        return np.concatenate((np.zeros(schedule.num_decode_tokens), *parts)).astype(np.int64)

    def _last_rows(self, schedule: Schedule) -> np.ndarray:
        """int64 [S]: where in the batch each request's last token is; its drafts follow."""
        last_S = schedule.first_S.copy()
        ends = np.cumsum([schedule.num_decode_tokens, *(chunk.num_tokens for chunk in schedule.chunks)])
        last_S[len(schedule.decodes) :] = [end - 1 for end, chunk in zip(ends[1:], schedule.chunks) if chunk.is_last]
        return last_S


@dataclass(frozen=True)
class _Chain:
    """What batches of drafted tokens are made of, all on the device."""

    step: ForwardBatch  # the batch of the step: its mode and overlap hold for the drafts too
    latest_S: Tensor  # int64: the last position of each request whose token and next token are known
    room_S: Tensor  # int64: the first position without room
    table_SP: Tensor  # int32: pages
    cache: Any
    tail_SF: Tensor | None = None  # int32: pages besides these

    def make_batch(self, k: int, token_S: Tensor) -> ForwardBatch:
        """The k-th tokens behind the latest ones; padding where there is no room."""
        position_S, num = self.latest_S + k, len(token_S)
        has_room_S, padding_page = position_S < self.room_S, self.cache.padding_page
        position_S = torch.where(has_room_S, position_S, 0)
        table_SP = torch.where(has_room_S.unsqueeze(1), self.table_SP, padding_page)
        page_size = self.cache.page_size
        page_S = table_SP.gather(1, (position_S // page_size).unsqueeze(1)).squeeze(1).long()
        return ForwardBatch(
            token_id_T=torch.where(has_room_S, token_S, -1),
            position_T=position_S,
            kv_slot_T=page_S * page_size + position_S % page_size,
            page_table_BP=table_SP,
            seq_len_B=(position_S + 1).int(),
            query_start_B1=torch.arange(num + 1, dtype=torch.int32, device=token_S.device),
            num_decode=num,
            logits_idx=torch.arange(num, device=token_S.device),
            mode=self.step.mode,
            overlap=self.step.overlap,
            by_rows=self.tail_SF is not None and (self.step.by_rows or token_S.is_cuda),
            tail_BF=None if self.tail_SF is None else torch.where(has_room_S.unsqueeze(1), self.tail_SF, padding_page),
        )
