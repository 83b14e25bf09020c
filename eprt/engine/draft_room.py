"""How many drafts of each decode the next step computes: as many as can become tokens and have room in pages. Knows
nothing of what is drafted (drafter.py)."""

from collections.abc import Sequence

import numpy as np

from eprt.engine.batch_rows import BatchRows
from eprt.engine.kv_cache import PagePool
from eprt.engine.request import Request


def choose_drafts(
    decodes: Sequence[Request], row_B: np.ndarray, rows: BatchRows, pool: PagePool, num_running: int
) -> np.ndarray | None:
    """int64 [B]: of each decode; None where no request has any. Adds pages that can be spared.

    row_B: the decodes' rows. num_running: a page stays available for each of so many requests.
    """
    if not rows.num_drafts:
        return None
    length_B = rows.length_M[row_B]
    draft_B = np.minimum(rows.num_draft_M[row_B], rows.max_len_M[row_B] - length_B - 1).clip(min=0)
    for i in np.flatnonzero(length_B + draft_B > rows.num_slots_M[row_B]).tolist():
        if pool.num_available > num_running:
            rows.append_page(decodes[i], pool.allocate())
    draft_B = np.minimum(draft_B, rows.num_slots_M[row_B] - length_B)
    return draft_B if draft_B.any() else None
