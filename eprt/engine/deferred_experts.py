"""DeferredExperts: experts that a rank reads into free weight buffers beside its steps, for slots that are empty.

A thread of its own reads them, layer by layer. Knows nothing of who asks for them, nor of which ranks take part.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eprt.layers.moe import EPMoE
from eprt.models.model import ExpertPlace, Model


class ReadExpert(NamedTuple):
    """One expert, and the slot of this rank that it is for."""

    slot: int
    place: ExpertPlace


class DeferredExperts:
    """Of one rank. begin(), then finish(), any number of times; between them the thread reads.

    wake: called by the thread when there is an end to tell.
    """

    def __init__(self, model: Model, rank: int, num_ranks: int):
        self._model, self._rank, self._num_ranks = model, rank, num_ranks
        self.wake: Callable[[], None] = lambda: None
        self._due: list[ReadExpert] = []
        self._num_read = 0  # of _due, from its beginning
        self._asked, self._ended = threading.Event(), threading.Event()  # to stop; the thread has read what it could
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._told = True  # that the thread has read all

    def begin(self, rows: Sequence[Sequence[int]]) -> None:
        """rows: per MoE layer, the logical expert that each slot of all ranks is to hold. What is here stays where it
        is; the other slots of this rank must be empty."""
        self._due = [
            ReadExpert(slot, ExpertPlace(row, expert, layer.pool.take_buffer()))
            for row, (layer, wanted) in enumerate(zip(self._model.moe_layers(), rows))
            for slot, expert in self._missing(layer, wanted)
        ]
        self._num_read, self._told = 0, False
        self._asked.clear()
        self._ended.clear()
        self._thread = threading.Thread(target=self._read, name="deferred experts", daemon=True)
        self._thread.start()

    def take_end(self) -> bool:
        """Whether all have been read; True once. Raises what reading has raised."""
        if self._told or not self._ended.is_set():
            return False
        self._told = True
        if self._error is not None:
            raise self._error
        return True

    def finish(self) -> list[ReadExpert]:
        """Ends the reading, behind the layer that is being read; what has been read, with its slots. The buffers are
        the caller's."""
        if self._thread is None:
            return []
        self.close()
        if self._error is not None:
            raise self._error
        layers = self._model.moe_layers()
        for _, place in self._due[self._num_read :]:
            layers[place.row].pool.return_buffer(place.buffer)
        read = self._due[: self._num_read]
        self._due, self._thread, self._told = [], None, True
        return read

    def close(self) -> None:
        """Ends the reading; nothing of it counts."""
        self._asked.set()
        if self._thread is not None:
            self._thread.join()

    def _missing(self, layer: EPMoE, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """Slots of this rank and the experts that they are to get."""
        per_rank = len(wanted) // self._num_ranks
        mine = wanted[self._rank * per_rank : (self._rank + 1) * per_rank]
        here = layer.slot_map.experts_of_rank(self._rank, self._num_ranks)
        return [(slot, expert) for slot, expert in enumerate(mine) if expert >= 0 and here[slot] != expert]

    def _read(self) -> None:
        try:
            while self._num_read < len(self._due) and not self._asked.is_set():
                row = self._due[self._num_read].place.row
                places = [place for _, place in self._due[self._num_read :] if place.row == row]
                self._model.load_experts(places)
                self._num_read += len(places)
        except Exception as error:
            self._error = error
        self._ended.set()
        self.wake()
