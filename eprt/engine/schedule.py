"""What one step of one rank computes, and what came of it: made by the scheduler, read by runner and sampler."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eprt.engine.outputs import Logprob
from eprt.engine.request import Request


@dataclass(frozen=True, slots=True)
class Bookmark:
    """What continues the first `end` tokens of a request, in pages that a step writes (kv_cache.py)."""

    end: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..end-1 of one request's prefill."""

    request: Request
    request_row: int  # its row now; the request may have left it when its first token was its last
    start: int
    end: int
    is_last: bool  # its logits choose the next token
    is_first: bool = False  # the request was admitted for it
    decoded: bool = False  # the tokens were generated: they are computed as when they were, each as a decode
    num_registered: int = 0  # the request's before the chunk: pages that the prefix cache knew
    prefix_node: int = 0  # of the last of these
    takeover: tuple[int, ...] = ()  # pages of the bookmark that it goes on from
    bookmarks: tuple[Bookmark, ...] = ()  # that it writes

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Guest:
    """Tokens of another rank's prompt that this rank computes (prompt_team.py)."""

    tokens: np.ndarray  # int64, and the one behind them
    start: int  # position of the first
    pages: np.ndarray  # int32: the request's, from its beginning, by the numbers that batches have

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - 1

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Drafts:
    """Where drafted tokens lie among the X rows that are sampled from."""

    offset_X: np.ndarray  # int64: how many drafts lie between the request's last token and the one to sample
    followed_X: np.ndarray  # bool: a draft follows the row, and the token sampled from it accepts or rejects that draft


@dataclass(frozen=True)
class Schedule:
    """One step of one rank: S requests get a token or more, first the decodes, then the last chunks in order."""

    decodes: list[Request]
    chunks: list[Chunk]
    sampled: list[Request]  # the S requests
    request_ids: list[str]  # theirs
    row_S: np.ndarray  # int64
    length_S: np.ndarray  # int64: how many tokens each request has, which is the position of its next one
    holder_S: np.ndarray  # int64: who holds the row (BatchRows.holder_M)
    num_tokens: int
    draft_S: np.ndarray | None = None  # drafts computed behind each request's last token; None: no request has any
    decode_bookmarks: tuple[tuple[int, Bookmark], ...] = ()  # that decodes write: index among the decodes, bookmark
    guests: tuple[Guest, ...] | None = None  # None: the rank's team splits no prompt in this step

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
    def bookmarks(self) -> list[Bookmark]:
        """All that the step writes."""
        of_chunks = [bookmark for chunk in self.chunks for bookmark in chunk.bookmarks]
        return of_chunks + [bookmark for _, bookmark in self.decode_bookmarks]

    @property
    def num_decode_tokens(self) -> int:
        return len(self.decodes) + (0 if self.draft_S is None else int(self.draft_S.sum()))


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the sampler chose for Schedule.row_X, in its order."""

    token_X: np.ndarray  # int64, -1 where the logits were not numbers
    logprobs: list[Logprob | None] | None = None  # None for tokens whose request wants none, and where no request does

    def select(self, index_Y: np.ndarray) -> "SampledTokens":
        """The tokens at these indices."""
        logprobs = None if self.logprobs is None else [self.logprobs[i] for i in index_Y.tolist()]
        return SampledTokens(self.token_X[index_Y], logprobs)
