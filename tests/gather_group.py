"""GatherGroup: an EPGroup of what GPU backends need, and no more: gathers, no windows and no messages."""

import numpy as np

from eprt.ep.group.group import EPGroup, PendingMessage
from eprt.ep.group.window import SharedWindow


class GatherGroup(EPGroup):
    """allgather(), barrier() and close() are the subclass's."""

    def shared_window(self, num_bytes: int) -> SharedWindow:
        raise NotImplementedError

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        raise NotImplementedError

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        raise NotImplementedError
