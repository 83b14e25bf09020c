"""VerbOrder: which verb each handle in flight waits for. Shared by all backends."""

VERBS = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
DISPATCH_SEND, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV = range(4)


class VerbOrder:
    """Epochs count dispatches from 1. num_buffers: handles that may be in flight. where: "[rank r/n]", for errors.

    Handles may overlap as long as each goes through its verbs in order, and each verb takes handles in the order in
    which they were sent: a flag says "up to this epoch". All ranks must make the same calls in the same order; that no
    rank can check alone.
    """

    def __init__(self, num_buffers: int, where: str):
        self._num_buffers, self._where = num_buffers, where
        self._num_begun = self._num_completed = 0
        self._next_verb = [DISPATCH_SEND] * num_buffers

    def next_epoch(self) -> int:
        """The epoch a dispatch_send would get now. Raises RuntimeError when all buffers are in use."""
        if self._num_begun - self._num_completed >= self._num_buffers:
            oldest = self._num_completed + 1
            raise RuntimeError(
                f"{self._where} dispatch_send: {self._num_buffers} handles are in flight already; finish that of epoch "
                f"{oldest}, which waits for {self._waiting_for(oldest)}, or raise EPConfig.num_buffers"
            )
        return self._num_begun + 1

    def check(self, verb: int, epoch: int) -> None:
        """Raises RuntimeError unless it is the turn of this verb for the handle of this epoch."""
        if epoch <= self._num_completed:
            raise RuntimeError(f"{self._where} {VERBS[verb]}: the handle of epoch {epoch} is already completed")
        if self._next_verb[epoch % self._num_buffers] != verb:
            raise RuntimeError(
                f"{self._where} {VERBS[verb]}: the handle of epoch {epoch} waits for {self._waiting_for(epoch)}"
            )
        earlier = epoch - 1
        if earlier > self._num_completed and self._next_verb[earlier % self._num_buffers] <= verb:
            raise RuntimeError(
                f"{self._where} {VERBS[verb]}: the handle of epoch {epoch} is out of order; that of epoch {earlier} "
                f"comes first, and waits for {self._waiting_for(earlier)}"
            )

    def done(self, verb: int, epoch: int) -> None:
        """Moves the handle of this epoch on to its next verb."""
        self._next_verb[epoch % self._num_buffers] = (verb + 1) % len(VERBS)
        if verb == DISPATCH_SEND:
            self._num_begun = epoch
        elif verb == COMBINE_RECV:
            self._num_completed = epoch

    def restart(self, num_completed: int) -> None:
        """As after so many completed handles, while none is in flight."""
        self._num_begun = self._num_completed = num_completed

    @property
    def in_flight(self) -> str | None:
        """Which handle is, for an error; None when none is."""
        if self._num_begun == self._num_completed:
            return None
        oldest = self._num_completed + 1
        waits_for = self._waiting_for(oldest)
        return f"{self._where} the handle of epoch {oldest} is in flight and waits for {waits_for}; complete it first"

    @property
    def num_completed(self) -> int:
        return self._num_completed

    def _waiting_for(self, epoch: int) -> str:
        return VERBS[self._next_verb[epoch % self._num_buffers]]
