"""TorchGroup: an EPGroup over a torch.distributed process group, without MPI.

Windows are memfds. Messages between nodes go through a gloo group made here, whatever backend the caller's group has.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eprt import env
from eprt.ep.group.group import MAX_CLOSE_S, EPGroup, PendingMessage
from eprt.ep.group.memfd import memfd_window
from eprt.ep.group.window import SharedWindow

# A reader waits as long as an idle engine sleeps; the waits on top of it have the deadlines.
_FOR_EVER = timedelta(days=365)
_GOODBYE = -1  # in place of a tag


class TorchMessage:
    """A PendingMessage that the threads of a _Link complete."""

    def __init__(self, buffer: np.ndarray, tag: int):
        self.buffer, self.tag = buffer, tag
        self.done = threading.Event()
        self.error: Exception | None = None
        self.received: np.ndarray | None = None  # copied to buffer by test(), so that a cancelled receive never writes

    def complete(self, received: np.ndarray | None = None, error: Exception | None = None) -> None:
        self.received, self.error = received, error
        self.done.set()

    def test(self) -> bool:
        if not self.done.is_set():
            return False
        if self.error is not None:
            raise ConnectionError(str(self.error)) from self.error
        if self.received is not None:
            if self.received.size > self.buffer.size:
                raise ConnectionError(f"{self.received.size} bytes came for a buffer of {self.buffer.size}")
            self.buffer[: self.received.size] = self.received
            self.received = None
        return True

    def cancel(self) -> None:
        self.received = None


class _Link:
    """All messages to and from one rank of another node: a thread that writes and one that reads.

    gloo's own requests can only be waited for, and a wait that ends early breaks its connections; hence the threads.
    A frame of (tag, length) goes ahead of each message. A goodbye ends the other side's reader.
    """

    def __init__(self, process_group: Any, peer: int):
        self._group, self._peer = process_group, peer
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[TorchMessage] = queue.SimpleQueue()
        self._arrived: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)  # by tag, not asked for yet
        self._awaited: defaultdict[int, deque[TorchMessage]] = defaultdict(deque)  # by tag, not come yet
        self._error: Exception | None = None
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self._write, self._read)]
        for thread in self.threads:
            thread.start()

    def send(self, buffer: np.ndarray, tag: int) -> TorchMessage:
        message = TorchMessage(buffer, tag)
        self._outbox.put(message)
        return message

    def receive(self, buffer: np.ndarray, tag: int) -> TorchMessage:
        message = TorchMessage(buffer, tag)
        with self._lock:
            if self._arrived[tag]:
                message.complete(self._arrived[tag].popleft())
            elif self._error is not None:
                message.complete(error=self._error)
            else:
                self._awaited[tag].append(message)
        return message

    def close(self) -> None:
        self.send(np.empty(0, dtype=np.uint8), _GOODBYE)

    def _write(self) -> None:
        tag = 0
        while tag != _GOODBYE:
            message = self._outbox.get()
            tag = message.tag
            try:
                self._put(torch.tensor([tag, message.buffer.size]))
                self._put(torch.from_numpy(message.buffer))
                message.complete()
            except Exception as error:  # its waiter raises it
                message.complete(error=error)

    def _read(self) -> None:
        try:
            while True:
                frame = torch.zeros(2, dtype=torch.int64)
                self._get(frame)
                tag, length = frame.tolist()
                if tag == _GOODBYE:
                    raise ConnectionError("it has left the group")
                payload = torch.empty(length, dtype=torch.uint8)
                self._get(payload)
                with self._lock:
                    if self._awaited[tag]:
                        self._awaited[tag].popleft().complete(payload.numpy())
                    else:
                        self._arrived[tag].append(payload.numpy())
        except Exception as error:  # all who wait for this rank raise it
            with self._lock:
                self._error = error
                for messages in self._awaited.values():
                    for message in messages:
                        message.complete(error=error)

    def _put(self, data: torch.Tensor) -> None:
        if data.numel():
            dist.send(data, group=self._group, group_dst=self._peer)

    def _get(self, data: torch.Tensor) -> None:
        if data.numel():
            dist.recv(data, group=self._group, group_src=self._peer)


class TorchGroup(EPGroup):
    """Ranks of a process group. Ranks that see each other's processes share memory, the others exchange messages."""

    def __init__(self, process_group: Any = None):
        if not dist.is_initialized():
            raise RuntimeError(
                "EPGroup.from_torch: torch.distributed is not initialised; call init_process_group first"
            )
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._where = f"[rank {dist.get_rank(process_group)}/{len(ranks)}]"
        self._set_up_s = env.get("EPRT_TIMEOUT_S")
        self._collectives, self._messages = self._new_groups(ranks)
        self._closed = False
        self._join(dist.get_rank(self._collectives), len(ranks))
        elsewhere = [rank for rank in range(self.size) if self.node_of_rank[rank] != self.node]
        self._links = {rank: _Link(self._messages, rank) for rank in elsewhere}

    def _new_groups(self, ranks: list[int]) -> tuple[Any, Any]:
        with self._meeting():
            collectives, messages = (
                dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
                for timeout in (timedelta(seconds=self._set_up_s), _FOR_EVER)
            )
        return collectives, messages

    def allgather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._collectives)
        with self._meeting():
            dist.all_gather_object(values, value, group=self._collectives)
        return values

    def barrier(self) -> None:
        with self._meeting():
            dist.barrier(group=self._collectives)

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """All ranks are to come to a collective call. gloo says only which operation failed."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._where} the ranks did not all come to set up or close the exchange within EPRT_TIMEOUT_S="
                f"{self._set_up_s:g} s, or one has ended. What is each of them doing? Where some must be late (they "
                f"load or compile), raise EPRT_TIMEOUT_S. gloo: {str(error).splitlines()[0]}"
            ) from error

    def shared_window(self, num_bytes: int) -> SharedWindow:
        # All ranks of the group take part in the allgather, each with the memory of its own node.
        def of_this_node(value: Any) -> list[Any]:
            values = self.allgather(value)
            return [values[rank] for rank in self.local_ranks]

        return memfd_window(num_bytes, of_this_node)

    def isend(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        return self._links[peer].send(buffer, tag)

    def irecv(self, buffer: np.ndarray, peer: int, tag: int) -> PendingMessage:
        return self._links[peer].receive(buffer, tag)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.close()
        # A reader that is still inside gloo when the interpreter ends could bring the process down; each ends with its
        # peer's goodbye or death.
        deadline = time.monotonic() + min(env.get("EPRT_TIMEOUT_S"), MAX_CLOSE_S)
        for thread in [thread for link in self._links.values() for thread in link.threads]:
            thread.join(max(0.0, deadline - time.monotonic()))
        for group in (self._collectives, self._messages):
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._watch.close()
