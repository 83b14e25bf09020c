"""RowMatchers: how far the tokens of the rows that have a grammar have come in it. Knows nothing of steps or masks
(masks.py).

Suffixes: as in batch_rows.py; Y some rows with a grammar.
"""

import llguidance
import numpy as np


class RowMatchers:
    """The matchers of running requests, one per row."""

    def __init__(self, num_rows: int):
        self.has_M = np.zeros(num_rows, dtype=np.bool_)
        self.num_matched_M = np.zeros(num_rows, dtype=np.int64)  # generated tokens that the row's matcher was given
        # ignore_eos: the completion ends only where nothing else may follow.
        self.ends_late_M = np.zeros(num_rows, dtype=np.bool_)
        self._by_row: dict[int, llguidance.LLMatcher] = {}

    def __bool__(self) -> bool:
        return bool(self._by_row)

    def assign_row(self, row: int, matcher: llguidance.LLMatcher, ends_late: bool) -> None:
        """matcher: at the beginning of the completion."""
        self._by_row[row] = matcher
        self.has_M[row], self.num_matched_M[row], self.ends_late_M[row] = True, 0, ends_late

    def release_row(self, row: int) -> None:
        if self._by_row.pop(row, None) is not None:
            self.has_M[row] = False

    def select(self, row_Y: np.ndarray) -> list[llguidance.LLMatcher]:
        return [self._by_row[row] for row in row_Y.tolist()]

    def start_again(self) -> None:
        """All go back to the beginnings of their completions."""
        for matcher in self._by_row.values():
            matcher.reset()
        self.num_matched_M[:] = 0
