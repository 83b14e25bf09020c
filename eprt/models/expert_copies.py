"""ExpertCopies: one copy of every expert per host, in memory that its ranks share and that outlives each of them.

A rank that is to hold an expert whose ranks are gone takes it from here, faster than from a checkpoint. Each rank
writes the experts that it is the first to hold, in the format of the weight buffers. Knows nothing of why experts are
wanted.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eprt.ep.group.group import EPGroup
from eprt.layers.moe import EPMoE
from eprt.models.model import ExpertPlace

_log = logging.getLogger(__name__)
_HEADER_BYTES = 4096  # its first word: 1 once all copies of the segment are there


class ExpertCopies:
    """Construction is collective, once the layers have their experts.

    Args:
        group: on one node.
        layers: the model's MoE layers, as they were loaded.
    """

    def __init__(self, group: EPGroup, layers: Sequence[EPMoE]):
        if group.num_nodes > 1:
            raise ValueError(
                f"[rank {group.rank}/{group.size}] --expert-host-copies node: the ranks are on {group.num_nodes} "
                "nodes, and a node has no copy of the experts of another; leave it out"
            )
        # Per layer, where the copy of each expert begins: rank, and offset in its segment.
        self._place_of: list[dict[int, tuple[int, int]]] = []
        end_of = [_HEADER_BYTES] * group.size
        for layer in layers:
            place_of: dict[int, tuple[int, int]] = {}
            num_slots = len(layer.expert_of_slot)
            for slot, expert in enumerate(layer.slot_map.expert_of_slot_S.tolist()):
                if expert >= 0 and expert not in place_of:
                    place_of[expert] = slot // num_slots, end_of[slot // num_slots]
                    end_of[slot // num_slots] += layer.pool.expert_bytes
            self._place_of.append(place_of)
        self._window = group.lasting_window(end_of[group.rank])
        self._segments = [torch.from_numpy(segment) for segment in self._window.segments]
        self._complete = [segment[:8].view(np.int64) for segment in self._window.segments]
        if not self._complete[group.rank][0]:  # a process in a lost rank's place finds the copies of its predecessor
            self._write(group.rank, layers)
        level = logging.INFO if group.rank == 0 else logging.DEBUG
        _log.log(level, "copies of all experts: %.2f GB of host memory", sum(end_of) / 1e9)

    def _write(self, rank: int, layers: Sequence[EPMoE]) -> None:
        for layer, place_of in zip(layers, self._place_of):
            for expert, buffer in zip(layer.expert_of_slot, layer.weight_buffers()):
                if expert >= 0 and place_of[expert][0] == rank:
                    for part, copy in self._parts(layer, buffer, place_of[expert]):
                        copy.copy_(part)
        self._complete[rank][0] = 1

    def _parts(self, layer: EPMoE, buffer: int, place: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
        """Each part of the buffer's expert, with its place in the copy."""
        rank, at = place
        pairs = []
        for part in layer.pool.parts:
            pairs.append((part[buffer], self._segments[rank][at : at + part.shape[1]]))
            at += part.shape[1]
        return pairs

    def load(self, places: Sequence[ExpertPlace], layers: Sequence[EPMoE]) -> list[ExpertPlace]:
        """Copies the experts into their buffers; returns the places of those of which there is no copy."""
        lacking = []
        for place in places:
            source = self._place_of[place.row].get(place.expert)
            if source is None or not self._complete[source[0]][0]:
                lacking.append(place)
                continue
            for part, copy in self._parts(layers[place.row], place.buffer, source):
                part.copy_(copy)
        return lacking

    def close(self) -> None:
        self._segments, self._complete = [], []
        self._window.close()
