"""What one step of one rank computes, and what came of it: made by the scheduler, read by runner and sampler."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eprt.engine.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..end-1 of one request's prefill. is_last: its logits choose the next token. request_row: its row
    now; the request may have left it when its first token was its last."""

    request: Request
    request_row: int
    start: int
    end: int
    is_last: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Drafts:
    """Where drafted tokens lie among the X rows that are sampled from.

    offset_X: int64, how many lie between the request's last token and the one to sample. followed_X: bool, whether one
    lies behind: the token to sample tells whether it holds.
    """

    offset_X: np.ndarray
    followed_X: np.ndarray


@dataclass(frozen=True)
class Schedule:
    """One step of one rank: S requests get a token or more, first the decodes, then the last chunks in order.

    sampled: those requests; request_ids, row_S: their ids and rows (int64). at_S: int64, how many tokens each has: the
    place of its next one. holder_S: int64, who holds the row (BatchRows.holder_M). draft_S: drafted tokens of each that
    are computed behind its last one, for as many more tokens if they hold; None when there are none at all.
    """

    decodes: list[Request]
    chunks: list[Chunk]
    sampled: list[Request]
    request_ids: list[str]
    row_S: np.ndarray
    at_S: np.ndarray
    holder_S: np.ndarray
    num_tokens: int
    draft_S: np.ndarray | None = None

    @cached_property
    def first_S(self) -> np.ndarray:
        """Of the X = S + sum(draft_S) rows that are sampled from, the first of each request."""
        if self.draft_S is None:
            return np.arange(len(self.row_S))
        return np.cumsum(self.draft_S) - self.draft_S + np.arange(len(self.row_S))

    @cached_property
    def row_X(self) -> np.ndarray:
        """Row of the request that each logits row belongs to."""
        return self.row_S if self.draft_S is None else np.repeat(self.row_S, self.draft_S + 1)

    @cached_property
    def drafts(self) -> Drafts | None:
        """None: no draft is computed."""
        if self.draft_S is None:
            return None
        num_rows_S = self.draft_S + 1
        offset_X = np.arange(len(self.row_X)) - np.repeat(self.first_S, num_rows_S)
        return Drafts(offset_X, offset_X < np.repeat(self.draft_S, num_rows_S))

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes) + (0 if self.draft_S is None else int(self.draft_S.sum()))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the sampler chose for Schedule.row_X, in its order.

    token_X: int64, -1 where the logits were not numbers. logprobs, top_logprobs: None where no request wants any, else
    one entry per request, None and () for those that want none.
    """

    token_X: np.ndarray
    logprobs: list[float | None] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None

    @classmethod
    def none(cls) -> "SampledTokens":
        return cls(np.zeros(0, dtype=np.int64))

    def take(self, index: np.ndarray) -> "SampledTokens":
        """Those at some places."""
        at = index.tolist()
        if self.logprobs is None or self.top_logprobs is None:
            return SampledTokens(self.token_X[at])
        return SampledTokens(self.token_X[index], [self.logprobs[i] for i in at], [self.top_logprobs[i] for i in at])
