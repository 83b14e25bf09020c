"""BatchRows: what each step's vectorised code needs of every running request, one row each, kept up to date in place.

A request holds a row from admission until it finishes or is preempted. Steps gather rows instead of walking requests:
after a forward pass nothing is left in the CPU's caches, and walking 128 Python objects costs more than all the rest.
Suffixes: M rows (most requests that can run), L tokens and P pages of the longest request, S stop tokens, V vocabulary,
X some rows.
"""

from dataclasses import dataclass

import numpy as np

from eprt.engine.bad_words import BadWords
from eprt.engine.request import Request
from eprt.engine.row_matchers import RowMatchers

SAMPLING_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        ("sample_idx", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("num_logprobs", np.int64),  # -1: none wanted
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("has_penalty", np.bool_),
        ("has_bias", np.bool_),
        ("min_tokens", np.int64),
        ("has_bans", np.bool_),  # any of the following two, or min_tokens
        ("has_allowed", np.bool_),
        ("has_bad_words", np.bool_),
    ],
    align=True,
)

_NO_TOKEN = -2  # equals neither a token id nor the sampler's -1


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the penalties of one request depend on."""

    generated_V: np.ndarray  # int32: how often each token was generated
    in_prompt_V: np.ndarray  # bool


class BatchRows:
    """The arrays over all rows."""

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        page_size: int,
        vocab_size: int,
        num_drafts: int = 0,
        num_tail: int = 0,
        first_page: int = 0,
    ):
        self.page_size, self.vocab_size, self.first_page = page_size, vocab_size, first_page
        self.num_drafts = num_drafts  # most drafts of a row (drafter.py)
        self.tokens_ML = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)  # prompt and generated
        self.length_M = np.zeros(num_rows, dtype=np.int64)  # how many these are
        self.num_prompt_M = np.zeros(num_rows, dtype=np.int64)
        self.max_len_M = np.zeros(num_rows, dtype=np.int64)  # the length at which the request ends
        self.num_slots_M = np.zeros(num_rows, dtype=np.int64)  # tokens for which the request's pages have room
        # The numbers that batches have for pages: from first_page on.
        self.page_table_MP = np.zeros((num_rows, -(-max_model_len // page_size)), dtype=np.int32)  # in order
        self.tail_MF = np.zeros((num_rows, num_tail), dtype=np.int32)  # pages besides these
        self.stop_MS = np.full((num_rows, 4), _NO_TOKEN, dtype=np.int64)  # token ids that end the request, padded
        self.sampling_M = np.zeros(num_rows, dtype=SAMPLING_DTYPE)
        self.holder_M = np.zeros(num_rows, dtype=np.int64)  # grows when a request leaves the row: tells holders apart
        self.unknown_M = np.zeros(num_rows, dtype=np.bool_)  # the latest token is being computed: tokens_ML lacks it
        self.num_draft_M = np.zeros(num_rows, dtype=np.int64)  # drafts that the next step may compute
        self.can_draft_M = np.zeros(num_rows, dtype=np.bool_)  # whether the request can use drafts
        self.counts: dict[int, TokenCounts] = {}  # of the rows with penalties
        # Of the rows with a logit bias: token ids (int64) and what is added (fp32).
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.allowed: dict[int, np.ndarray] = {}  # of the rows with allowed_token_ids: these, int64
        self.bad_words: dict[int, BadWords] = {}  # of the rows with bad words
        self.matchers = RowMatchers(num_rows)  # of the rows with a grammar
        self._unused = list(range(num_rows - 1, -1, -1))

    def assign_row(self, request: Request) -> None:
        """Gives the request a row, filled from its pages, tokens and params."""
        row = request.row = self._unused.pop()
        num_tokens = len(request.tokens_L)
        self.tokens_ML[row, :num_tokens] = request.tokens_L
        self.length_M[row] = num_tokens
        self.num_prompt_M[row] = request.num_prompt
        self.max_len_M[row] = request.max_len
        self.num_slots_M[row] = len(request.pages) * self.page_size
        self.page_table_MP[row, : len(request.pages)] = np.array(request.pages, dtype=np.int32) + self.first_page
        self.tail_MF[row] = request.tail
        self.num_draft_M[row] = 0
        self.unknown_M[row] = False
        self._fill_stops(row, request)
        self._fill_sampling(row, request)
        if request.grammar is not None:
            self.matchers.assign_row(row, request.grammar.deep_copy(), request.params.ignore_eos)

    def append_page(self, request: Request, page: int) -> None:
        self.page_table_MP[request.row, len(request.pages)] = page + self.first_page
        request.pages.append(page)
        self.num_slots_M[request.row] += self.page_size

    def count_token(self, row_X: np.ndarray) -> np.ndarray:
        """Makes each of these rows one token longer, which is not known yet. Returns which rows are full now (bool)."""
        self.length_M[row_X] += 1
        self.unknown_M[row_X] = True
        return self.length_M[row_X] >= self.max_len_M[row_X]

    def store_tokens(
        self, row_X: np.ndarray, position_X: np.ndarray, token_X: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fills in tokens that are known now. Returns which are stop tokens, and which fill their row (bool)."""
        self.tokens_ML[row_X, position_X] = token_X
        length_X = position_X + 1
        self.unknown_M[row_X] = self.length_M[row_X] > length_X
        if self.counts:
            for row, token_id in zip(row_X.tolist(), token_X.tolist()):
                if row in self.counts and token_id >= 0:
                    self.counts[row].generated_V[token_id] += 1
        stopped_X = (self.stop_MS[row_X] == token_X[:, None]).any(axis=1)
        return stopped_X, length_X >= self.max_len_M[row_X]

    def release_row(self, request: Request) -> None:
        """Takes the row back; the request gets its tokens."""
        row = request.row
        self.holder_M[row] += 1
        request.tokens_L = self.tokens_ML[row, : self.length_M[row]].copy()
        for of_row in (self.counts, self.bias, self.allowed, self.bad_words):
            of_row.pop(row, None)
        self.matchers.release_row(row)
        self._unused.append(row)
        request.row = -1

    def _fill_stops(self, row: int, request: Request) -> None:
        num_more = len(request.stop_ids) - self.stop_MS.shape[1]
        if num_more > 0:
            self.stop_MS = np.pad(self.stop_MS, ((0, 0), (0, num_more)), constant_values=_NO_TOKEN)
        self.stop_MS[row] = _NO_TOKEN
        self.stop_MS[row, : len(request.stop_ids)] = list(request.stop_ids)

    def _fill_sampling(self, row: int, request: Request) -> None:
        params = request.params
        penalised = bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)
        self.sampling_M[row] = (
            request.seed,
            request.sample_idx,
            params.temperature,
            params.top_p,
            params.min_p,
            min(params.top_k, self.vocab_size),
            -1 if params.logprobs is None else params.logprobs,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            penalised,
            bool(params.logit_bias),
            params.min_tokens,
            bool(params.min_tokens or params.allowed_token_ids or params.bad_word_ids),
            bool(params.allowed_token_ids),
            bool(params.bad_word_ids),
        )
        if params.allowed_token_ids:
            self.allowed[row] = np.array(params.allowed_token_ids, dtype=np.int64)
        if params.bad_word_ids:
            self.bad_words[row] = BadWords.from_params(params)
        # With penalties, and with bad words of several tokens, a drafted position depends on the drafts before it.
        self.can_draft_M[row] = not penalised and not (params.bad_word_ids and self.bad_words[row].look_back)
        if penalised:
            self.counts[row] = self._count_tokens(request)
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias.items())
            self.bias[row] = np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)

    def _count_tokens(self, request: Request) -> TokenCounts:
        prompt, generated = np.split(request.tokens_L, [request.num_prompt])
        in_prompt_V = np.zeros(self.vocab_size, dtype=np.bool_)
        in_prompt_V[prompt] = True
        generated_V = np.bincount(generated, minlength=self.vocab_size).astype(np.int32)
        return TokenCounts(generated_V, in_prompt_V)

    def check_integrity(self, request: Request) -> None:
        """Raises RuntimeError naming the request if its row contradicts it."""
        row, num_pages = request.row, len(request.pages)
        pages = (self.page_table_MP[row, :num_pages] - self.first_page).tolist()
        num_slots, length = int(self.num_slots_M[row]), int(self.length_M[row])
        who = f"request {request.request_id!r}"
        if pages != request.pages or num_slots != num_pages * self.page_size:
            raise RuntimeError(f"{who} owns pages {request.pages}, but its row has {pages}, {num_slots} slots")
        longest = max(request.max_len, request.num_prompt + 1)  # where no token is wanted, one is sampled all the same
        if not request.num_prompt <= length <= longest:
            raise RuntimeError(f"{who} has {length} tokens, outside {request.num_prompt}..{longest}")
