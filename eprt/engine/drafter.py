"""Drafter: guesses the next tokens of running requests with the checkpoint's MTP layer, after each forward pass.

Its first pass needs no more than the device knows, and is launched with the step; which of its rows count is known when
the host has seen how many drafts held. The guesses stay on the device, where the next step takes them from: the host
prepares it while they are computed.

From the hidden state at a position and the token that followed it, the layer predicts the token after that one
(DeepSeek-V3, arXiv:2412.19437, section 2.2). It has a KV cache of its own, in the same pages, so it sees every token
that the model sees: prompts chunk by chunk, and each decoded token. The next step computes the guesses behind the last
token, and the scheduler keeps those that hold. A chain of several guesses feeds the layer its own output.

Collective: it runs equally often on all ranks, with no rows where there is nothing to guess.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.runner import Packed
from eprt.engine.schedule import Schedule
from eprt.ep.load import LoadRecorder
from eprt.gpu.readback import Snapshot
from eprt.gpu.upload import upload
from eprt.layers.batch import ForwardBatch


class Drafter:
    """model: has draft() and logits() (models/deepseek.py). kv_pages: [pages, page_size, kv_dim] of the MTP layer.
    token_MK: int64, on the device, where the guesses are left (runner.py). recorder: of the load of its experts too,
    None without. acceptance: draws the guesses, which are else the likeliest.
    """

    def __init__(
        self,
        model,
        kv_pages: Tensor,
        rows: BatchRows,
        token_MK: Tensor,
        recorder: LoadRecorder | None,
        acceptance: Acceptance | None = None,
    ):
        self.model, self.kv_pages, self.rows, self._recorder = model, kv_pages, rows, recorder
        self.token_MK = token_MK
        self._coming: tuple[np.ndarray, Snapshot] | None = None
        self._propose = None if acceptance is None else acceptance.propose
        self.num_drafts = rows.draft_MK.shape[1]

    def launch(self, schedule: Schedule, packed: Packed, hidden_TH: Tensor, token_X: Tensor | None) -> Tensor:
        """The layer over the step's tokens, each with the token that follows it; waits for nothing. [T, H].

        hidden_TH: of the step's forward pass. token_X: what was sampled, on the device; None where nothing was.
        """
        batch = packed.batch
        (next_T,) = upload([self._known_next_tokens(schedule)], hidden_TH.device)
        if token_X is not None:
            # Behind a draft that does not hold it is wrong, and does no harm: the next step writes those cache entries
            # again. -1, where logits were no numbers, ends its request.
            next_T[batch.logits_idx[: len(token_X)]] = token_X.clamp(min=0)
        return self._draft(hidden_TH, replace(batch, token_id_T=next_T))

    def finish(
        self, schedule: Schedule, batch: ForwardBatch, drafted_TH: Tensor, accepted_S: np.ndarray | None
    ) -> None:
        """New drafts for the step's requests: on the device at once, on the host after take_in(). Waits for nothing. To
        be called after the commit.

        batch: the step's. drafted_TH: what launch() gave. accepted_S: how many drafts held.
        """
        row_S = schedule.row_S
        idx_S, at_S = upload([self._last_true_rows(schedule, accepted_S), row_S], drafted_TH.device)
        position_S = schedule.at_S - 1 if accepted_S is None else schedule.at_S - 1 + accepted_S
        self.rows.num_draft_M[row_S] = 0
        self._chain(row_S, at_S, position_S, drafted_TH[idx_S], batch)
        if len(row_S):
            self._coming = (row_S, Snapshot([self.token_MK[at_S]]))

    def take_in(self) -> None:
        """The latest drafts, where they can be compared with what is sampled. They have come long since."""
        if self._coming is not None:
            row_S, snapshot = self._coming
            self.rows.draft_MK[row_S] = snapshot.values()[0]
            self._coming = None

    def _draft(self, hidden_TH: Tensor, batch: ForwardBatch) -> Tensor:
        hidden_TH = self.model.draft(hidden_TH, batch, self.kv_pages)
        if self._recorder is not None:
            self._recorder.count_drafts(hidden_TH.shape[0])
        return hidden_TH

    def _known_next_tokens(self, schedule: Schedule) -> np.ndarray:
        """int64 [T]: the token that follows each of the batch's, where the host knows it; else anything."""
        tokens_ML = self.rows.tokens_ML
        parts = [tokens_ML[chunk.request_row, chunk.start + 1 : chunk.end + 1] for chunk in schedule.chunks]
        return np.concatenate((np.zeros(schedule.num_decode_tokens), *parts)).astype(np.int64)

    def _last_true_rows(self, schedule: Schedule, accepted_S: np.ndarray | None) -> np.ndarray:
        """int64 [S]: where in the batch the latest position lies whose own and next token are right."""
        num_decodes = len(schedule.decodes)
        from_S = schedule.first_S.copy()
        if accepted_S is not None:
            from_S += accepted_S
        ends = np.cumsum([schedule.num_decode_tokens, *(chunk.end - chunk.start for chunk in schedule.chunks)])
        from_S[num_decodes:] = [end - 1 for end, chunk in zip(ends[1:], schedule.chunks) if chunk.is_last]
        return from_S

    def _chain(
        self, row_S: np.ndarray, at_S: Tensor, position_S: np.ndarray, hidden_SH: Tensor, step: ForwardBatch
    ) -> None:
        """at_S: the rows, on the device. step: the batch of the step, whose mode and overlap hold here too."""
        rows = self.rows
        for k in range(self.num_drafts):
            if k:
                # The guess before this one goes where its cache entry would, if there is room for it already; this one
                # would be token position + 2. A row's last token is never drafted: there may be no position for it.
                position_S = position_S + 1
                room = np.flatnonzero(position_S < np.minimum(rows.num_slots_M[row_S], rows.max_len_M[row_S] - 3))
                row_S, position_S = row_S[room], position_S[room]
                (room_S,) = upload([room], hidden_SH.device)
                at_S, hidden_SH = at_S[room_S], hidden_SH[room_S]
                if self._recorder is not None:
                    self._recorder.begin_drafts(len(row_S))
                batch = _decode_batch(rows, row_S, position_S, self.token_MK[at_S, k - 1], step)
                hidden_SH = self._draft(hidden_SH, batch)
            if len(row_S):
                logits_SV = self.model.logits(hidden_SH)
                token_S = self._propose(logits_SV, row_S, k) if self._propose else logits_SV.argmax(dim=-1)
                self.token_MK[at_S, k] = token_S
                rows.num_draft_M[row_S] = np.where(rows.can_draft_M[row_S], k + 1, 0)


def _decode_batch(
    rows: BatchRows, row_S: np.ndarray, position_S: np.ndarray, token_S: Tensor, step: ForwardBatch
) -> ForwardBatch:
    """One token per request, at these positions."""
    num, page_size = len(row_S), rows.page_size
    num_pages = -(-int(position_S.max(initial=-1) + 1) // page_size)
    arrays = {
        "position_T": position_S,
        "kv_slot_T": rows.page_table_MP[row_S, position_S // page_size] * np.int64(page_size) + position_S % page_size,
        "page_table_BP": rows.page_table_MP[:, :num_pages].take(row_S, axis=0),
        "seq_len_B": (position_S + 1).astype(np.int32),
        "query_start_B1": np.arange(num + 1, dtype=np.int32),
        "logits_idx": np.arange(num),
    }
    tensors: dict[str, Any] = dict(zip(arrays, upload(list(arrays.values()), token_S.device)))
    return ForwardBatch(token_id_T=token_S, **tensors, num_decode=num, mode=step.mode, overlap=step.overlap)
