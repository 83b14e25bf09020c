"""Bookmarks of decodes that were computed by rows: left behind the pass, from what it wrote into the tails.

A recorded pass cannot leave them: which requests do changes from step to step. Rings still hold what a bookmark needs
then (hybrid_cache.py), and the next step comes behind in the order of the stream. Knows nothing of recordings.
"""

from collections.abc import Sequence

import numpy as np

from eprt.gpu.upload import upload
from eprt.layers.batch import ForwardBatch
from eprt.layers.hybrid_cache import LayerPages, MovePlaces


def leave_bookmarks(batch: ForwardBatch, layers: Sequence[LayerPages]) -> None:
    """batch: computed by rows."""
    if not batch.bookmarks:
        return
    assert batch.tail_BF is not None
    moves = batch.bookmarks
    columns = [move.request for move in moves], [move.pages for move in moves], [move.end for move in moves]
    request_N, bookmark_NG, end_N = upload([np.array(column, np.int64) for column in columns], batch.tail_BF.device)
    places = MovePlaces(batch.tail_BF[request_N].long(), bookmark_NG, end_N)
    for layer in layers:
        layer.leave_bookmarks(places)
