"""CallOrder: which EP call each handle in flight waits for. All backends share it, all schedules are tested with it."""

CALLS = ("dispatch_send", "dispatch_recv", "combine_send", "combine_recv")
DISPATCH_SEND, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV = range(4)


class CallOrder:
    """The rules, for handles numbered by epoch (the backend's dispatches, counted from 1):

    1. A handle goes through the four calls in order.
    2. A call takes handles in the order in which they were sent: a flag means "up to this epoch".
    3. A receive may be launched ahead of its call (dispatch_start, combine_start). Rule 2 then holds for the launches;
       the call itself, which only hands out the result, still comes in the handle's turn.
    4. At most num_buffers handles are in flight; a handle leaves with its combine_recv.

    All ranks must make the same calls in the same order; no rank can check that alone.

    num_buffers: handles that may be in flight.
    where: "[rank r/n]", for errors.
    """

    def __init__(self, num_buffers: int, where: str):
        self._num_buffers, self._where = num_buffers, where
        self._num_begun = self.num_completed = 0
        self._next_call = [DISPATCH_SEND] * num_buffers  # by epoch % num_buffers: the call that the handle waits for
        self._next_launch = [DISPATCH_SEND] * num_buffers  # the first call whose work has not been launched

    def next_epoch(self) -> int:
        """The epoch a dispatch_send would get now. Raises RuntimeError when all buffers are in use."""
        if self._num_begun - self.num_completed >= self._num_buffers:
            oldest = self.num_completed + 1
            raise RuntimeError(
                f"{self._where} dispatch_send: {self._num_buffers} handles are in flight already; finish that of epoch "
                f"{oldest}, which waits for {self._awaited_call(oldest)}, or raise EPConfig.num_buffers"
            )
        return self._num_begun + 1

    def check(self, call: int, epoch: int) -> None:
        """Raises RuntimeError unless the handle of this epoch waits for this call and every earlier one has made it."""
        self._check(call, epoch, self._next_call)

    def check_launch(self, call: int, epoch: int) -> None:
        """Raises RuntimeError unless this receive may be launched now, ahead of its call."""
        if self.is_launched(call, epoch):
            raise RuntimeError(f"{self._where} {CALLS[call]}: that of epoch {epoch} has been launched already")
        self._check(call, epoch, self._next_launch)

    def _check(self, call: int, epoch: int, progress: list[int]) -> None:
        completed, earlier, sets = self.num_completed, epoch - 1, self._num_buffers
        first = earlier == completed or progress[earlier % sets] > call
        if first and epoch > completed and self._next_call[epoch % sets] == call:  # the usual case
            return
        if epoch <= completed:
            raise RuntimeError(f"{self._where} {CALLS[call]}: the handle of epoch {epoch} is already completed")
        if self._next_call[epoch % sets] != call:
            raise RuntimeError(
                f"{self._where} {CALLS[call]}: the handle of epoch {epoch} waits for {self._awaited_call(epoch)}"
            )
        raise RuntimeError(
            f"{self._where} {CALLS[call]}: the handle of epoch {epoch} is out of order; that of epoch {earlier} "
            f"comes first, and waits for {self._awaited_call(earlier)}"
        )

    def is_oldest(self, epoch: int) -> bool:
        """Whether every earlier handle is completed: then no call of this one can be out of order (rule 2)."""
        return epoch == self.num_completed + 1

    def is_launched(self, call: int, epoch: int) -> bool:
        """Whether the handle of this epoch, which is in flight, has had this call's work launched."""
        return self._next_launch[epoch % self._num_buffers] > call

    def launch(self, call: int, epoch: int) -> None:
        """The work of this receive has been launched; the call itself is still to come."""
        self._next_launch[epoch % self._num_buffers] = call + 1

    def complete(self, call: int, epoch: int) -> None:
        """The call has been made: the handle of this epoch waits for the next one."""
        at = epoch % self._num_buffers
        self._next_call[at] = self._next_launch[at] = call + 1
        if call == DISPATCH_SEND:
            self._num_begun = epoch
        elif call == COMBINE_RECV:
            self.num_completed = epoch

    def restart(self, num_completed: int) -> None:
        """As after so many completed handles. Handles in flight are void."""
        self._num_begun = self.num_completed = num_completed

    @property
    def next_safe_epoch(self) -> int:
        """At which all ranks may restart without asking each other, after a call that has failed on all of them alike.

        A rank that fails in dispatch_recv does not know that the others have read what it sent before; only the set of
        the failed epoch is then free.
        """
        if (
            self._num_begun > self.num_completed
            and self._next_call[self._num_begun % self._num_buffers] == DISPATCH_RECV
        ):
            return self._num_begun + self._num_buffers
        return self._num_begun + 1

    @property
    def num_begun(self) -> int:
        """The epoch of the latest dispatch_send."""
        return self._num_begun

    @property
    def in_flight(self) -> str | None:
        """Which handle is, for an error; None when none is."""
        if self._num_begun == self.num_completed:
            return None
        oldest = self.num_completed + 1
        awaited = self._awaited_call(oldest)
        return f"{self._where} the handle of epoch {oldest} is in flight and waits for {awaited}; complete it first"

    def _awaited_call(self, epoch: int) -> str:
        return CALLS[self._next_call[epoch % self._num_buffers]]
