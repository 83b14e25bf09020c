"""LossWatch: a thread that notices lost ranks while its process waits, in the driver, for a GPU that waits for them.

Knows nothing of GPUs: whoever can end such waits says how.
"""

import logging
import threading
from collections.abc import Callable

from eprt.ep.errors import EPError, RankLostError
from eprt.ep.group.group import EPGroup

_log = logging.getLogger(__name__)
_LOOK_S = 3e-3


class LossWatch:
    """From construction to close().

    Args:
        group: whose view changes where ranks are lost; until it has, on_loss is called again and again.
        on_loss: called on the thread, with RankLostError and the number of the view that the rank took part in.
    """

    def __init__(self, group: EPGroup, on_loss: Callable[[EPError, int], None]):
        self._group, self._on_loss = group, on_loss
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eprt-losses", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.wait(_LOOK_S):
                self._look()
        except Exception:  # without this thread waits end at their deadline
            _log.exception("[rank %d/%d] lost ranks are no longer watched for", self._group.rank, self._group.size)

    def _look(self) -> None:
        group, view = self._group, self._group.view
        lost = [rank for rank in group.lost_ranks() if view.alive[rank]]
        if lost:
            self._on_loss(RankLostError(group.rank, group.size, lost[0], "a step", lost[1:]), view.number)
