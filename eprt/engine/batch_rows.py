"""BatchRows: what each step's vectorised code needs of every running request, one row each, kept up to date in place.

A request holds a row from admission until it finishes or is preempted. Steps gather rows instead of walking requests.
Suffixes: M rows (most requests that can run), P pages of the longest request, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np

from eprt.engine.request import Request

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
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the penalties look at. generated_V: int32, how often each token was generated. in_prompt_V: bool."""

    generated_V: np.ndarray
    in_prompt_V: np.ndarray


class BatchRows:
    """page_table_MP: int32, pages of each row's request in order. sampling_M: SAMPLING_DTYPE.

    counts, bias: only for the rows that have penalties or a logit bias (token ids int64, bias fp32).
    """

    def __init__(self, num_rows: int, num_pages_per_request: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.page_table_MP = np.zeros((num_rows, num_pages_per_request), dtype=np.int32)
        self.sampling_M = np.zeros(num_rows, dtype=SAMPLING_DTYPE)
        self.counts: dict[int, TokenCounts] = {}
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._unused = list(range(num_rows - 1, -1, -1))

    def enter(self, request: Request) -> None:
        """Gives the request a row, filled from its pages, tokens and params."""
        row = request.row = self._unused.pop()
        params = request.params
        self.page_table_MP[row, : len(request.pages)] = request.pages
        penalised = bool(params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1)
        self.sampling_M[row] = (
            request.seed,
            request.sample_idx,
            params.temperature,
            params.top_p,
            params.min_p,
            params.top_k,
            -1 if params.logprobs is None else params.logprobs,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            penalised,
            bool(params.logit_bias),
        )
        if penalised:
            self.counts[row] = self._count(request)
        if params.logit_bias:
            self.bias[row] = (
                np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias)),
                np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)),
            )

    def grow(self, request: Request, page: int) -> None:
        """Appends a page to the request."""
        self.page_table_MP[request.row, len(request.pages)] = page
        request.pages.append(page)

    def leave(self, request: Request) -> None:
        """Takes the row back."""
        self.counts.pop(request.row, None)
        self.bias.pop(request.row, None)
        self._unused.append(request.row)
        request.row = -1

    def _count(self, request: Request) -> TokenCounts:
        prompt, generated = request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
        in_prompt_V = np.zeros(self.vocab_size, dtype=np.bool_)
        in_prompt_V[prompt] = True
        generated_V = np.bincount(np.asarray(generated, np.int64), minlength=self.vocab_size).astype(np.int32)
        return TokenCounts(generated_V, in_prompt_V)
