"""KeptTails: undoes what a prompt's chunk left in its request's rings, where that chunk is computed again.

Where ranks are lost, a step is thrown away, however much of it was computed, and its chunks begin anew. A chunk of more
positions than a ring has room for has then overwritten what its first positions read. So what the rings held before a
chunk is kept until the request goes on: a chunk that begins where the kept one did finds it there again.

Knows nothing of why steps are computed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.hybrid_plan import RequestSpan, read_spans


@dataclass(frozen=True)
class KeptTail:
    start: int  # position of the chunk's first token
    slots: list[Tensor]  # of each ring, a copy


class KeptTails:
    """num_spare: so many rows of a request beyond the first overwrite nothing that they read again, as drafts."""

    def __init__(self, num_spare: int):
        self._num_spare = num_spare
        self._kept: dict[tuple[int, ...], KeptTail] = {}  # by the pages of the tail

    def begin(self, batch: ForwardBatch, layers: Sequence[LayerPages]) -> None:
        """Before the layers compute the batch."""
        assert batch.tail_BF is not None
        if not self._kept and batch.num_tokens <= self._num_rows_of_decodes(batch.tail_BF):
            return
        for span in read_spans(batch):
            kept = self._kept.pop(span.tail, None)
            if not self._may_be_undone(span):
                continue
            if kept is None or kept.start != span.start:
                kept = KeptTail(span.start, [slots.clone() for slots in _slots(layers, span.tail)])
            else:
                for slots, before in zip(_slots(layers, span.tail), kept.slots, strict=True):
                    slots.copy_(before)
            self._kept[span.tail] = kept

    def _num_rows_of_decodes(self, tail_BF: Tensor) -> int:
        """That the batch's requests have at most where all of them decode."""
        num_requests = 1 + int((tail_BF[1:] != tail_BF[:-1]).any(dim=1).sum()) if len(tail_BF) else 0
        return num_requests * (1 + self._num_spare)

    def _may_be_undone(self, span: RequestSpan) -> bool:
        """Whether the rings hold what the span reads and overwrites. One that begins with a bookmark has it there."""
        return span.start > 0 and span.takeover is None and span.end - span.start > 1 + self._num_spare


def _slots(layers: Sequence[LayerPages], pages: Sequence[int]) -> Iterator[Tensor]:
    """Views of the slots of each ring in the tail of these pages."""
    for layer in layers:
        for ring in layer.tail.values():
            yield ring.slots_PSD[pages[ring.page]]
