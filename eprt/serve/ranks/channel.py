"""Sockets: the HTTP port, and the connection between a rank and the frontend (unix inside a host, TCP between hosts).

A stream socket rather than a message queue library: its end of file tells each side at once, on any host, that the
other process is gone; it needs no thread of its own; and abstract unix names leave nothing on disk.
Knows nothing of what the messages mean.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from eprt import env
from eprt.dead_host import notice_dead_host
from eprt.serve.options import OptionError
from eprt.serve.ranks.messages import Hello, ToFrontend, ToRank, Unpacker, pack


class FrontendLostError(ConnectionError):
    """The frontend closed its end, or died."""


def bind_http(host: str, port: int) -> socket.socket:
    """The listening HTTP socket; OptionError when the address cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise OptionError(f"cannot listen on {host}:{port}: {_why(error)}") from None
    sock.setblocking(False)
    return sock


def _why(error: OSError) -> str:
    """The system's words without the address, which the message has already. Errors of host names are not errno's."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    remedy = "; --port takes another, 0 any free one" if error.errno == errno.EADDRINUSE else ""
    return os.strerror(error.errno) + remedy


def listen(hosts: set[str]) -> tuple[socket.socket, str]:
    """A listening socket that ranks on `hosts` can reach, and its endpoint for `connect`."""
    if len(hosts) == 1:  # an abstract name leaves nothing to clean up
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"eprt-{os.getpid()}-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        endpoint = f"unix:{name}"
    else:
        listener = socket.create_server(("", 0), family=socket.AF_INET)  # on every interface
        endpoint = f"tcp:{socket.gethostname()}:{listener.getsockname()[1]}"
    listener.listen(1024)
    return listener, endpoint


def listen_at(host: str) -> tuple[socket.socket, int]:
    """A listening socket at this address of this host, for ranks of any host, and its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    _notice_lost_host(listener)  # what it accepts inherits this
    return listener, listener.getsockname()[1]


def _notice_lost_host(sock: socket.socket) -> None:
    notice_dead_host(sock)
    # With data under way the kernel does not probe: this ends the wait for its acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)


def connect(endpoint: str, timeout_s: float) -> socket.socket:
    """The stream socket to `endpoint`; raises ConnectionError naming it after timeout_s."""
    kind, _, address = endpoint.partition(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if kind == "unix":
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(f"\0{address}")
                return sock
            host, _, port = address.rpartition(":")
            sock = socket.create_connection((host, int(port)), timeout=max(0.1, deadline - time.monotonic()))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_lost_host(sock)
            return sock
        except OSError as error:
            if time.monotonic() > deadline:
                look = "" if kind == "unix" else "; do routes and firewalls let this host through to that port?"
                raise ConnectionError(
                    f"cannot reach the frontend at {endpoint} within {timeout_s:g} s: {error}{look}"
                ) from None
            time.sleep(0.1)


class Channel:
    """A rank's end of its connection. Sending never blocks the engine: what the socket does not take waits here.

    Any thread may send; everything else is for the main thread.
    """

    def __init__(self, sock: socket.socket, hello: Hello):
        self._sending = threading.RLock()  # a signal's handler sends, too
        self._sock, self._unpacker, self._unsent = sock, Unpacker(ToRank), bytearray()
        self._watched: dict[int, str] = {}  # descriptor of a process -> the reason to stop when it ends
        self._wakers: set[int] = set()  # descriptors
        self.was_woken = False  # a waker ended the latest `receive`
        self._signal_pipe = (-1, -1)
        sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self.stop_reasons: list[str] = []  # signals that came and starters that ended, for the caller to remove
        self.send(hello)

    @property
    def own_host(self) -> str:
        """The address of this host by which it has found the frontend; "" where that is on this host."""
        return self._sock.getsockname()[0] if self._sock.family != socket.AF_UNIX else ""

    def catch_signals(self, signals: tuple[signal.Signals, ...]) -> None:
        """From now on these wake `receive` and are appended to `stop_reasons`, instead of what they did before."""
        # Python restarts an interrupted poll; the wake-up descriptor makes it return.
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signal_pipe = (reader, writer)
        self._poll.register(reader, select.POLLIN)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, lambda taken, frame: self.stop_reasons.append(signal.Signals(taken).name))

    def add_waker(self) -> Callable[[], None]:
        """What it returns wakes `receive`, from any thread."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakers.add(fd)
        self._poll.register(fd, select.POLLIN)

        def wake() -> None:
            with contextlib.suppress(BlockingIOError):  # it is awake
                os.eventfd_write(fd, 1)

        return wake

    def watch_starters(self, mpirun: int) -> None:
        """From now on the end of mpirun, or of the launcher that started it, wakes `receive` and is appended to
        `stop_reasons`. A rank would otherwise serve on, and nobody could stop it.
        mpirun: the process that was this one's parent when it began; it may be gone already.
        """
        if os.getppid() != mpirun:
            self.stop_reasons.append(_gone("mpirun", mpirun))
            return
        launcher = env.get("EPRT_LAUNCHER_PID")
        self.watch_process("mpirun", mpirun)
        # On other hosts than the launcher's its pid is that of no process, or of another one.
        if launcher is not None and parent_of(mpirun) == launcher:
            self.watch_process("the launcher", launcher)

    def watch_process(self, who: str, pid: int) -> None:
        """From now on the end of this process is appended to `stop_reasons`."""
        # Kernels before 5.3 have no pidfd, and a parent outside this PID namespace has no pid here.
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(pid)
            self._watched[fd] = _gone(who, pid)
            self._poll.register(fd, select.POLLIN)

    def _unwatch(self) -> None:
        for fd in self._watched:
            self._poll.unregister(fd)
            os.close(fd)
        self._watched.clear()

    def send(self, message: ToFrontend) -> None:
        with self._sending:
            self._unsent += pack(message)
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            try:
                num_sent = self._sock.send(self._unsent)
            except BlockingIOError:
                break
            except OSError as error:
                raise FrontendLostError(str(error)) from None
            del self._unsent[:num_sent]
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def receive(self, timeout_s: float | None) -> list[ToRank]:
        """Messages that have arrived. 0: do not wait. None: sleep until something (a signal too) arrives."""
        events = self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        messages: list[ToRank] = []
        self.was_woken = False
        for fd, event in events:
            if fd in self._watched:
                self.stop_reasons.append(self._watched[fd])
                self._unwatch()  # the other one ends next, which must not count as a second signal
                continue
            if fd in self._wakers:
                os.eventfd_read(fd)
                self.was_woken = True
                continue
            if fd != self._sock.fileno():
                if fd == self._signal_pipe[0]:
                    os.read(fd, 4096)
                continue
            if event & select.POLLOUT:
                with self._sending:
                    self._flush()
            if event & ~select.POLLOUT:
                messages += self._read()
        return messages

    def _read(self) -> list[ToRank]:
        messages: list[ToRank] = []
        while True:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                return messages
            except OSError as error:
                if messages:
                    return messages
                raise FrontendLostError(str(error)) from None
            if not data and messages:  # its last words come first; the next call finds the end again
                return messages
            if not data:
                raise FrontendLostError("the frontend closed the connection")
            messages += self._unpacker.add_bytes(data)

    def send_rest(self, timeout_s: float) -> bool:
        """Sends what still waits; False where the frontend did not take it in time or is gone."""
        return not self._is_lost_while(lambda: bool(self._unsent), timeout_s) and not self._unsent

    def wait_closed(self, timeout_s: float) -> bool:
        """Sends what still waits, then drops what arrives until the frontend closes its end; False after timeout_s."""
        return self._is_lost_while(lambda: True, timeout_s)

    def _is_lost_while(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Sends and drops what arrives; whether the frontend was lost by the time that the condition or time ended."""
        deadline = time.monotonic() + timeout_s
        try:
            while condition() and time.monotonic() < deadline:
                self.receive(0.05)
        except FrontendLostError:
            return True
        return False


def _gone(who: str, pid: int) -> str:
    return f"{who} (pid {pid}) is gone"


def parent_of(pid: int) -> int | None:
    """None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
