"""From a schedule to logits: packs the step's tokens into a ForwardBatch and calls the model.

The batch's tensors are views of buffers that are filled again in the next step; the model keeps none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.engine.batch_rows import BatchRows
from eprt.engine.graphs import GraphsByContext
from eprt.engine.outputs import PromptLogprob
from eprt.engine.sampler import top_logprobs
from eprt.engine.schedule import Chunk, Drafts, Guest, Schedule
from eprt.gpu.upload import upload
from eprt.layers.batch import FarRequests, ForwardBatch, HostRows, Split, TailMove
from eprt.layers.tail_moves import leave_bookmarks
from eprt.models.model import Model

# Rows of prompt log-probabilities computed at once: bounds the memory beside the logits themselves.
_LOGPROB_ROWS = 64


@dataclass(frozen=True)
class PackedStep:
    """A step's tokens on the device."""

    batch: ForwardBatch
    row_S: Tensor  # int64, the rows of the requests that get a token


class Runner:
    """Runs one rank's steps.

    Args:
        cache_L: of each layer, as its attention keeps it; the last page is for padding.
        keep_tokens: sampled tokens stay on the device, in last_token_M, where the next step takes them from: it can be
            packed before the host knows them. Every row that decodes has its latest token there.
        meet: waits for the ranks that compute one prompt together (ForwardBatch.meet).
    """

    def __init__(
        self,
        model: Model,
        cache_L: Sequence[Any],
        rows: BatchRows,
        chunk_size: int,
        keep_tokens: bool = False,
        meet: Callable[[], None] | None = None,
    ):
        self.model, self.cache_L, self.rows, self._meet = model, cache_L, rows, meet
        self.device = model.device
        self.graphs: GraphsByContext | None = None  # set later, on GPUs
        self.num_tokens = 0  # so far
        self.num_context_tokens = 0  # that attention has to read, added up over the rows of each step
        self.page_size, self.padding_page = cache_L[0].page_size, cache_L[0].padding_page
        num_rows = len(rows.length_M)
        self.last_token_M = torch.zeros(num_rows, dtype=torch.int64, device=self.device) if keep_tokens else None
        self.draft_token_MK = torch.zeros(num_rows, rows.num_drafts, dtype=torch.int64, device=self.device)
        # The buffers of each step's batch; the last two never change.
        self.token_id_T = np.zeros(chunk_size, dtype=np.int64)
        self.position_T = np.zeros(chunk_size, dtype=np.int64)
        self.kv_slot_T = np.zeros(chunk_size, dtype=np.int64)
        self.logits_idx_T = np.arange(chunk_size, dtype=np.int64)
        self.query_start_B1 = np.arange(chunk_size + 1, dtype=np.int32)

    @property
    def decodes_by_rows(self) -> bool:
        """Whether steps of decodes alone are worked out on the device (ForwardBatch.by_rows)."""
        return self.device.type == "cuda" or self.graphs is not None

    def forward(self, batch: ForwardBatch, wants_hidden: bool) -> tuple[Tensor, ...]:
        """logits fp32: first one row per schedule.row_X, then the rows that prompt_logprobs() takes; and, if wanted,
        what drafting goes on from: the final hidden states [T, H]."""
        if self.graphs is not None and self.graphs.fits(batch):
            results = self.graphs.run(batch)
        else:
            results = self.compute(batch) if wants_hidden else (self.model.forward(batch, self.cache_L),)
        if batch.by_rows:
            leave_bookmarks(batch, self.cache_L)
        return results

    def compute(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """One pass of the model, launched anew: logits and hidden states."""
        return self.model.forward_with_hidden(batch, self.cache_L)

    def keep_sampled(self, packed: PackedStep, token_S: Tensor) -> None:
        """Keeps the tokens that the next step goes on from."""
        if self.last_token_M is not None:
            self.last_token_M[packed.row_S] = token_S

    def keep_known(self, row_X: list[int]) -> None:
        """These rows, which begin to decode, go on from the latest token that the host knows."""
        if self.last_token_M is not None and row_X:
            token_X = self.rows.tokens_ML[row_X, self.rows.length_M[row_X] - 1].astype(np.int64)
            rows, tokens = upload([np.array(row_X, dtype=np.int64), token_X], self.device)
            self.last_token_M[rows] = tokens

    def restore_sampled(self) -> None:
        """After steps that were thrown away: every row goes on from the latest token that the host knows."""
        if self.last_token_M is not None:
            rows = self.rows
            last_M = np.maximum(rows.length_M - 1, 0)
            (token_M,) = upload([rows.tokens_ML[np.arange(len(last_M)), last_M].astype(np.int64)], self.device)
            self.last_token_M.copy_(token_M)

    def pack(self, schedule: Schedule, mode: str, overlap: str = "none", overlap_sms: int | None = None) -> PackedStep:
        """The step's tokens as tensors; mode, overlap and overlap_sms as in ForwardBatch."""
        num_tokens = num_decode = schedule.num_decode_tokens  # each a request of its own to the attention
        row_B = schedule.row_X[:num_tokens]
        self._pack_decodes(row_B, schedule.drafts)
        seq_len_B = (self.position_T[:num_tokens] + 1).astype(np.int32)
        query_start_B1 = self.query_start_B1[: num_tokens + 1]
        if schedule.chunks:
            num_tokens, num_decode, chunk_row, *lengths = self._pack_chunks(schedule, num_tokens)
            row_B = np.concatenate((row_B, np.array(chunk_row, dtype=np.int64)))
            seq_len_B, query_start_B1 = map(_append, (seq_len_B, query_start_B1), lengths)
        far = None
        if schedule.guests:
            begin = num_tokens
            num_tokens, *lengths = self._pack_guests(schedule.guests, num_tokens)
            if self.device.type == "cuda":
                far = FarRequests(len(schedule.guests), num_tokens - begin, sum(lengths[0]))
            seq_len_B, query_start_B1 = map(_append, (seq_len_B, query_start_B1), lengths)
        longest = int(seq_len_B.max(initial=0))
        arrays = {
            "token_id_T": self.token_id_T[:num_tokens],
            "position_T": self.position_T[:num_tokens],
            "kv_slot_T": self.kv_slot_T[:num_tokens],
            "page_table_BP": self._page_table(row_B, schedule.guests, -(-longest // self.page_size)),
            "seq_len_B": seq_len_B,
            "query_start_B1": query_start_B1,
            "logits_idx": self._logits_idx(schedule),
        }
        has_tails = self.rows.tail_MF.shape[1] > 0
        by_rows, host = has_tails and self.decodes_by_rows and not schedule.chunks, None
        if has_tails:
            arrays["tail_BF"] = tail_BF = self.rows.tail_MF.take(row_B, axis=0)
            host = None if by_rows else HostRows(query_start_B1.copy(), seq_len_B, tail_BF)
        uploaded = upload([*arrays.values(), schedule.row_S, *self._find_drafts(schedule)], self.device)
        *tensors, row_S, at_D, row_D, k_D = uploaded
        fields: dict[str, Any] = dict(zip(arrays, tensors))
        batch = ForwardBatch(
            **fields,
            num_decode=num_decode,
            mode=mode,
            overlap=overlap,
            overlap_sms=overlap_sms,
            split=Split.in_middle(query_start_B1.tolist()) if overlap == "tbo" else None,
            num_context=int(seq_len_B[num_decode:].sum()),
            longest=longest,
            meet=None if schedule.guests is None else self._meet,
            far=far,
            takeovers=_takeovers(schedule) if has_tails else (),
            bookmarks=_bookmarks(schedule) if has_tails else (),
            host=host,
            by_rows=by_rows,
        )
        if self.last_token_M is not None:
            num = len(schedule.decodes)
            batch.token_id_T[:num] = self.last_token_M[row_S[:num]]
        if len(at_D):
            batch.token_id_T[at_D] = self.draft_token_MK[row_D, k_D]
        self.num_tokens += num_tokens
        self.num_context_tokens += int(self.position_T[:num_tokens].sum()) + num_tokens
        return PackedStep(batch, row_S)

    def prompt_logprobs(self, schedule: Schedule, logits_XV: Tensor) -> list[list[PromptLogprob]]:
        """Per chunk: of the prompt tokens that follow its tokens, for requests that want them."""
        result: list[list[PromptLogprob]] = []
        start = len(schedule.row_X)
        for chunk in schedule.chunks:
            count = _num_prompt_logprobs(chunk)
            result.append(_score_prompt(logits_XV[start : start + count], chunk))
            start += count
        return result

    def _pack_decodes(self, row_B: np.ndarray, drafts: Drafts | None) -> None:
        num = len(row_B)
        last_B = self.rows.length_M[row_B] - 1
        self.position_T[:num] = last_B
        self.token_id_T[:num] = self.rows.tokens_ML[row_B, last_B]
        if drafts is not None:
            self.position_T[:num] += drafts.offset_X[:num]
        self._pack_slots(row_B, 0, num)

    def _find_drafts(self, schedule: Schedule) -> tuple[np.ndarray, ...]:
        """int64: where drafts lie in the batch, in which rows, and which of their drafts they are."""
        if schedule.drafts is None:
            return (np.empty(0, dtype=np.int64),) * 3
        offset_X = schedule.drafts.offset_X
        at_D = np.flatnonzero(offset_X)
        return at_D, schedule.row_X[at_D], offset_X[at_D] - 1

    def _pack_chunk(self, chunk: Chunk, at: int) -> int:
        end = at + chunk.num_tokens
        self.token_id_T[at:end] = self.rows.tokens_ML[chunk.request.row, chunk.start : chunk.end]
        self.position_T[at:end] = np.arange(chunk.start, chunk.end)
        self._pack_slots(chunk.request.row, at, end)
        return end

    def _pack_chunks(self, schedule: Schedule, at: int) -> tuple[int, int, list[int], list[int], list[int]]:
        """Behind the decodes. Returns how many tokens there are by then, how many of them are decodes, and of each
        request, as attention sees it, its row, its length and where its tokens end."""
        num_decode, row_X, length_X, ends = at, list[int](), list[int](), list[int]()
        for chunk in schedule.chunks:
            begin, at = at, self._pack_chunk(chunk, at)
            # Of a decoded chunk every token is a request of its own to the attention.
            last = range(chunk.start if chunk.decoded else chunk.end - 1, chunk.end)
            row_X += [chunk.request.row] * len(last)
            length_X += [position + 1 for position in last]
            ends += range(begin + 1, at + 1) if chunk.decoded else [at]
            num_decode = at if chunk.decoded else num_decode
        return at, num_decode, row_X, length_X, ends

    def _pack_guests(self, guests: Sequence[Guest], at: int) -> tuple[int, list[int], list[int]]:
        """Behind the chunks. Returns how many tokens there are by then, and the guests' lengths and ends."""
        ends = []
        for guest in guests:
            begin, at = at, at + guest.num_tokens
            self.token_id_T[begin:at] = guest.tokens[:-1]
            self.position_T[begin:at] = np.arange(guest.start, guest.end)
            page_T, offset_T = np.divmod(self.position_T[begin:at], self.page_size)
            self.kv_slot_T[begin:at] = guest.pages[page_T] * np.int64(self.page_size) + offset_T
            ends.append(at)
        return at, [guest.end for guest in guests], ends

    def _page_table(self, row_B: np.ndarray, guests: Sequence[Guest] | None, num_pages: int) -> np.ndarray:
        table_BP = self.rows.page_table_MP[:, :num_pages].take(row_B, axis=0)
        if not guests:
            return table_BP
        table_GP = np.zeros((len(guests), num_pages), dtype=np.int32)
        for row, guest in zip(table_GP, guests):
            row[: len(guest.pages)] = guest.pages
        return np.concatenate((table_BP, table_GP))

    def _pack_slots(self, row: np.ndarray | int, at: int, end: int) -> None:
        page_T, offset_T = np.divmod(self.position_T[at:end], self.page_size)
        self.kv_slot_T[at:end] = self.rows.page_table_MP[row, page_T] * np.int64(self.page_size) + offset_T

    def _logits_idx(self, schedule: Schedule) -> np.ndarray:
        start = schedule.num_decode_tokens
        sampled, scored = [self.logits_idx_T[:start]], []
        if not schedule.chunks:
            return sampled[0]
        for chunk in schedule.chunks:
            end = start + chunk.num_tokens
            if chunk.is_last:
                sampled.append(self.logits_idx_T[end - 1 : end])
            scored.append(self.logits_idx_T[start : start + _num_prompt_logprobs(chunk)])
            start = end
        return np.concatenate(sampled + scored)


def _append(values: np.ndarray, more: Sequence[int]) -> np.ndarray:
    return np.append(values, np.array(more, dtype=values.dtype))


def _first_requests(schedule: Schedule) -> list[int]:
    """Of each chunk: the number, in the batch, of its request, or of its first token where each is one."""
    sizes = [schedule.num_decode_tokens, *(chunk.num_tokens if chunk.decoded else 1 for chunk in schedule.chunks)]
    return np.cumsum(sizes).tolist()[:-1]


def _takeovers(schedule: Schedule) -> tuple[TailMove, ...]:
    chunks = zip(_first_requests(schedule), schedule.chunks)
    return tuple(TailMove(first, chunk.start, chunk.takeover) for first, chunk in chunks if chunk.takeover)


def _bookmarks(schedule: Schedule) -> tuple[TailMove, ...]:
    """By the request, in the batch, that has the token before."""
    first_S, moves = schedule.first_S, []
    for i, bookmark in schedule.decode_bookmarks:
        moves.append(TailMove(int(first_S[i] + bookmark.end - schedule.length_S[i]), bookmark.end, bookmark.pages))
    for first, chunk in zip(_first_requests(schedule), schedule.chunks):
        for bookmark in chunk.bookmarks:
            row = bookmark.end - 1 - chunk.start if chunk.decoded else 0
            moves.append(TailMove(first + row, bookmark.end, bookmark.pages))
    return tuple(moves)


def _num_prompt_logprobs(chunk: Chunk) -> int:
    """How many tokens of the chunk, counted from its first, precede a prompt token whose logprob is wanted."""
    request = chunk.request
    if request.prompt_logprobs is None:
        return 0
    return max(0, min(chunk.end, request.num_prompt - 1) - chunk.start)


def _score_prompt(logits_RV: Tensor, chunk: Chunk) -> list[PromptLogprob]:
    request = chunk.request
    scores: list[PromptLogprob] = []
    for at in range(0, logits_RV.shape[0], _LOGPROB_ROWS):
        logprob_RV = logits_RV[at : at + _LOGPROB_ROWS].log_softmax(dim=-1)
        first = chunk.start + at + 1
        target = request.tokens_L[first : first + logprob_RV.shape[0]]
        target_R1 = torch.from_numpy(target).to(logprob_RV.device, torch.int64).unsqueeze(1)
        value_R1 = logprob_RV.gather(1, target_R1)
        rank_R = (logprob_RV > value_R1).sum(dim=1) + 1
        top = top_logprobs(logprob_RV, request.params.num_prompt_logprobs or 0)
        scores += zip(value_R1.squeeze(1).tolist(), top, rank_R.tolist())
    # A request that was preempted computes some positions again.
    return scores[len(request.prompt_logprobs or ()) - chunk.start :]
