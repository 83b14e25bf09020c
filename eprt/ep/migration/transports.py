"""Which transport a group gets: shared memory on CPUs, copy engines or host memory on GPUs."""

import logging
from collections.abc import Sequence

from eprt.ep.group.group import EPGroup
from eprt.ep.migration.chunk import WeightPool
from eprt.ep.migration.shared_memory import SharedMemoryTransport
from eprt.ep.migration.transport import Transport

_log = logging.getLogger(__name__)

# An expert of DeepSeek-V3 in bfloat16 has 88 MB; no buffer is as large, chunks go straight to their place.
PEER_CHUNK_BYTES = 64 << 20


def make_transport(group: EPGroup, pools: Sequence[WeightPool]) -> Transport:
    """For experts in these pools, the same on all ranks. Collective."""
    if not pools[0].parts[0].is_cuda:
        return SharedMemoryTransport(group)
    # On first use, so that a machine without GPUs never imports GPU code.
    from eprt.ep.migration.peer import PeerTransport
    from eprt.ep.migration.peer_copies import PeerCopies
    from eprt.ep.migration.staged import StagedTransport
    from eprt.gpu.peers import PeerAccessError, PeerTensors

    parts = [part for pool in pools for part in pool.parts]
    try:
        copies = PeerCopies(PeerTensors(group, parts))
    except PeerAccessError as error:
        _log.log(logging.WARNING if group.rank == 0 else logging.DEBUG, "experts move through host memory: %s", error)
        return StagedTransport(group)
    return PeerTransport(group, pools, copies, PEER_CHUNK_BYTES)
