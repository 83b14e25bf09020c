"""GatherGroup: an EPGroup of what GPU backends need, and no more: gathers, no windows and no messages."""

import numpy as np

from eprt.ep.group.group import EPGroup, Pending, Window


class GatherGroup(EPGroup):
    """allgather(), barrier() and close() are the subclass's."""

    def shared_window(self, num_bytes: int) -> Window:
        raise NotImplementedError

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> Pending:
        raise NotImplementedError

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> Pending:
        raise NotImplementedError
