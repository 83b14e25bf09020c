"""ForwardBatch: one step's tokens of one rank, as tensors. Built by engine/runner.py, read by the layers."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Where a batch is cut in two; plain integers, so that nothing waits for a GPU."""

    token: int  # first of the second half
    first_end: int  # requests of the first half
    # First request of the second half: first_end - 1 where the cut goes through a request, whose two parts then are
    # requests of their own, sharing pages.
    second_begin: int

    @staticmethod
    def in_middle(query_start_B1: Sequence[int]) -> "Split":
        """In the middle, also of a prompt. query_start_B1: as in ForwardBatch. The first half has the odd token."""
        token = (query_start_B1[-1] + 1) // 2
        first_end = bisect_left(query_start_B1, token)
        return Split(token, first_end, bisect_right(query_start_B1, token) - 1 if token else 0)


@dataclass(frozen=True)
class TailMove:
    """What continues a context from a position on: one request of a step leaves it, or takes over another's
    (hybrid_cache.py)."""

    request: int  # of the batch
    end: int  # that position, a multiple of the page's
    pages: tuple[int, ...]  # the bookmark's


@dataclass(frozen=True)
class FarRequests:
    """The last requests of a batch, where their pages lie in another GPU's memory; plain integers."""

    num_requests: int
    num_tokens: int
    num_context: int  # sum of their seq_len_B


@dataclass(frozen=True)
class Extension:
    """Some requests of a batch behind its decodes, one after another."""

    requests: slice
    rows: slice
    num_context: int | None  # sum of their seq_len_B, or more; None where the host does not know
    is_far: bool  # whether their pages lie in another GPU's memory


@dataclass(frozen=True)
class HostRows:
    """What the host knows of a batch, so that no GPU is asked: the fields of ForwardBatch of these names, as arrays."""

    query_start_B1: np.ndarray
    seq_len_B: np.ndarray
    tail_BF: np.ndarray

    def halves(self, cut: Split) -> tuple["HostRows", "HostRows"]:
        """As ForwardBatch.halves() has them."""
        first, second, start_B1 = slice(cut.first_end), slice(cut.second_begin, None), self.query_start_B1
        behind_B = (start_B1[1 : cut.first_end + 1] - cut.token).clip(min=0)
        first_start_B1 = start_B1[: cut.first_end + 1].clip(max=cut.token)
        second_start_B1 = (start_B1[cut.second_begin :] - cut.token).clip(min=0)
        return (
            HostRows(first_start_B1, self.seq_len_B[first] - behind_B, self.tail_BF[first]),
            HostRows(second_start_B1, self.seq_len_B[second], self.tail_BF[second]),
        )


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of B requests, packed request after request. The first num_decode requests have one token each.

    T = B = 0 is a valid batch: the rank only serves its experts to the others.

    Requests may share pages that an earlier request of the same batch fills: each layer inserts all T entries before it
    attends, of a first half before those of a second.
    """

    token_id_T: Tensor  # int64
    position_T: Tensor  # int64
    kv_slot_T: Tensor  # int64, where each token's cache entry goes
    page_table_BP: Tensor  # int32
    seq_len_B: Tensor  # int32, context length including the new tokens
    query_start_B1: Tensor  # int32 [B + 1], first row of each request; query_start[:num_decode + 1] = 0..num_decode
    num_decode: int
    logits_idx: Tensor  # int64 [X], rows of T whose logits are wanted
    mode: str = "normal"  # of the MoE layers, equal on all ranks: "normal" or "low_latency"
    overlap: str = "none"  # equal on all ranks: "none", "tbo" or "sbo" (schedules.py)
    # SMs that send outputs beside the experts ("sbo") or that the experts leave to the exchange ("tbo"). None: as
    # sm_split.py decides, and none.
    overlap_sms: int | None = None
    split: Split | None = None  # for "tbo"
    first_row: int = 0  # of the step's rows, the first that is here (second halves)
    num_context: int | None = None  # sum of seq_len_B behind the decodes, or more; None where the host does not know
    longest: int | None = None  # the largest of seq_len_B, or more; None where the host does not know
    # Waits, once in each layer, for the ranks that compute this batch's prompts together, when the layer's entries are
    # written and none has been read yet; None: all entries are written here, and by earlier steps.
    meet: Callable[[], None] | None = None
    far: FarRequests | None = None  # None: all pages lie in this rank's memory
    # Of models whose requests have pages beside those of their positions: int32 [B, pages]; None for others.
    tail_BF: Tensor | None = None
    bookmarks: tuple[TailMove, ...] = ()  # that the step writes, by request and position
    takeovers: tuple[TailMove, ...] = ()  # that requests begin with
    host: HostRows | None = None  # None where nothing asks for it, or the tensors are the host's
    # Decodes alone, whose places in a hybrid cache are worked out on the device (decode_plan.py): so they can be
    # recorded, and the host need not know them. Bookmarks are then left behind the pass (tail_moves.py).
    by_rows: bool = False

    @property
    def num_tokens(self) -> int:
        return self.token_id_T.shape[0]

    def extensions(self) -> list[Extension]:
        """The requests behind the decodes: those whose pages are near, then the far ones."""
        d, end, num = self.num_decode, self.num_tokens, self.seq_len_B.shape[0]
        if self.far is None:
            return [Extension(slice(d, num), slice(d, end), self.num_context, False)] if d < num else []
        first, row = num - self.far.num_requests, end - self.far.num_tokens
        near = None if self.num_context is None else self.num_context - self.far.num_context
        both = [
            Extension(slice(d, first), slice(d, row), near, False),
            Extension(slice(first, num), slice(row, end), self.far.num_context, True),
        ]
        return [each for each in both if each.requests.start < each.requests.stop]

    def on_host(self) -> HostRows:
        """Of models whose requests have tails."""
        if self.host is not None:
            return self.host
        assert self.tail_BF is not None and not self.tail_BF.is_cuda, "whoever makes the batch gives its host rows"
        return HostRows(self.query_start_B1.numpy(), self.seq_len_B.numpy(), self.tail_BF.numpy())

    def halves(self) -> tuple["ForwardBatch", "ForwardBatch"]:
        """Two batches, to be computed in this order; either may be empty. Their logits_idx is that of the whole."""
        if self.split is None and self.num_decode < self.num_tokens:
            raise ValueError(f"a batch of {self.num_tokens} tokens, {self.num_decode} of them decodes, lacks its split")
        middle = (self.num_tokens + 1) // 2
        cut = self.split or Split(middle, middle, middle)
        requests = slice(cut.first_end)
        behind_B = (self.query_start_B1[1 : cut.first_end + 1] - cut.token).clamp(min=0)
        first = replace(
            self._rows(slice(cut.token)),
            page_table_BP=self.page_table_BP[requests],
            seq_len_B=self.seq_len_B[requests] - behind_B,
            query_start_B1=self.query_start_B1[: cut.first_end + 1].clamp(max=cut.token),
            num_decode=min(self.num_decode, cut.token),
            split=None,
            **self._first_moves(cut, requests),
        )
        requests = slice(cut.second_begin, None)
        second = replace(
            self._rows(slice(cut.token, None)),
            page_table_BP=self.page_table_BP[requests],
            seq_len_B=self.seq_len_B[requests],
            query_start_B1=(self.query_start_B1[cut.second_begin :] - cut.token).clamp(min=0),
            num_decode=self.num_decode - first.num_decode,
            split=None,
            first_row=self.first_row + cut.token,
            **self._second_moves(cut, first, requests),
        )
        return first, second

    def _first_moves(self, cut: Split, requests: slice) -> dict[str, Any]:
        if self.tail_BF is None:
            return {}
        if self.by_rows:
            return {"tail_BF": self.tail_BF[requests], "bookmarks": ()}
        host, bookmarks = self.on_host().halves(cut)[0], (m for m in self.bookmarks if m.request < cut.first_end)
        return {
            "tail_BF": self.tail_BF[requests],
            "bookmarks": tuple(move for move in bookmarks if move.end <= host.seq_len_B[move.request]),
            "takeovers": tuple(move for move in self.takeovers if move.request < cut.first_end),
            "host": host,
        }

    def _second_moves(self, cut: Split, first: "ForwardBatch", requests: slice) -> dict[str, Any]:
        if self.tail_BF is None:
            return {}
        if self.by_rows:
            return {"tail_BF": self.tail_BF[requests], "bookmarks": ()}
        moves = {
            name: tuple(replace(move, request=move.request - cut.second_begin) for move in whole if move not in done)
            for name, whole, done in (
                ("bookmarks", self.bookmarks, first.bookmarks),
                ("takeovers", self.takeovers, first.takeovers),
            )
        }
        return {"tail_BF": self.tail_BF[requests], "host": self.on_host().halves(cut)[1], **moves}

    def _rows(self, rows: slice) -> "ForwardBatch":
        return replace(
            self, token_id_T=self.token_id_T[rows], position_T=self.position_T[rows], kv_slot_T=self.kv_slot_T[rows]
        )
