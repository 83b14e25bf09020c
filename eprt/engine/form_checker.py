"""FormChecker: whether answers can be held to a form, found out in a process of its own, with bounds on its work.

The library that compiles forms bounds its work on most of them, not on all: a schema of one line can keep it busy for
minutes and take gigabytes, and a thread cannot be stopped. The process can: the kernel ends it where a form takes too
much processor time, which does not depend on what else the machine does. Ranks compile only what has passed here.
Knows nothing of requests.
"""

import contextlib
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections import OrderedDict
from queue import Empty, LifoQueue
from typing import IO, Any, cast

import llguidance
import msgspec
import numpy as np

from eprt.engine.grammars import GrammarError, Grammars
from eprt.engine.structured_outputs import StructuredOutputs
from eprt.engine.tokenizer import Tokenizer

_MOST_CPU_S = 3.0
_MOST_BYTES = 2 << 30
_NUM_PROCESSES = 2  # at most; one form that takes long does not hold up all others
_NUM_KEPT = 256
# How far an answer is followed, to meet bounds that a form exceeds behind its first token only.
_NUM_TOKENS = 8
# The compiler's own that explain nothing.
_WORDS = {"NoExtensionBias": "no text fits it: it refers to itself without end, or allows nothing"}
_LENGTH = struct.Struct("<I")
_TOO_MUCH = (
    f"it takes more than {_MOST_CPU_S:g} s of processor time, or {_MOST_BYTES >> 30} GiB, to compile; simplify it"
)


class _Vocabulary(msgspec.Struct, frozen=True):
    """What Grammars needs of a tokenizer."""

    json: str
    num_tokens: int
    added_tokens: dict[str, int]

    def to_json(self) -> str:
        return self.json


class FormChecker:
    """For one model. Its methods may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._kept: OrderedDict[StructuredOutputs, str] = OrderedDict()  # form -> why it is refused, "" if it is not
        self._lock = threading.Lock()
        self._processes: LifoQueue[_Process | None] = LifoQueue()  # idle ones; None: one that is not started
        for _ in range(_NUM_PROCESSES):
            self._processes.put(None)

    def find(self, outputs: StructuredOutputs) -> str | None:
        """What why_refused() returns; None: the form was not checked lately."""
        with self._lock:
            if outputs in self._kept:
                self._kept.move_to_end(outputs)
            return self._kept.get(outputs)

    def why_refused(self, outputs: StructuredOutputs) -> str:
        """ "": it is not. OSError where no process can be started."""
        refusal = self.find(outputs)
        if refusal is None:
            refusal = self._ask(outputs)
            with self._lock:
                self._kept[outputs] = refusal
                if len(self._kept) > _NUM_KEPT:
                    self._kept.popitem(last=False)
        return refusal

    def close(self) -> None:
        """Ends the idle processes; those at work end with this one."""
        with contextlib.suppress(Empty):
            while True:
                process = self._processes.get_nowait()
                if process is not None:
                    process.close()

    def _ask(self, outputs: StructuredOutputs) -> str:
        process = self._processes.get()
        try:
            process = process or _Process(self._tokenizer)
            return process.ask(outputs)
        except EOFError:
            process = None
            return _TOO_MUCH
        except BaseException:
            process = None
            raise
        finally:
            self._processes.put(process)


class _Process:
    """The parent's side of one process. It ends when the parent does."""

    def __init__(self, tokenizer: Tokenizer):
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(_MOST_CPU_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        vocabulary = _Vocabulary(tokenizer.to_json(), tokenizer.num_tokens, tokenizer.added_tokens)
        with contextlib.suppress(BrokenPipeError):
            self._send(vocabulary)
        if self._receive() is None:
            raise OSError("the process that checks forms ended before it began")

    def ask(self, outputs: StructuredOutputs) -> str:
        """EOFError where the form ended the process."""
        with contextlib.suppress(BrokenPipeError):
            self._send(outputs)
        refusal = self._receive()
        if refusal is None:
            raise EOFError
        return refusal

    def close(self) -> None:
        """Its input ends, and so does it."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        _write(self._process.stdin, message)

    def _receive(self) -> str | None:
        assert self._process.stdout is not None
        data = _read(self._process.stdout)
        if data is None:
            self._process.communicate()  # closes the pipes, and waits
            return None
        return msgspec.msgpack.decode(data, type=str)


def _write(stream: IO[bytes], message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def check(grammars: Grammars, outputs: StructuredOutputs) -> str:
    """Why no answer can be held to the form; "": one can, as far as it is followed."""
    try:
        matcher = grammars.compile(outputs)
    except GrammarError as error:
        return _WORDS.get(str(error), str(error))
    for which in (0, -1):
        if error := _follow(matcher.deep_copy(), which):
            return f"it exceeds the bounds of its compiler: {error}"
    return ""


def _follow(matcher: llguidance.LLMatcher, which: int) -> str:
    """The error in an answer of which each token is the first, or the last, of those that may come; "": none."""
    for _ in range(_NUM_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.get_error() or matcher.is_stopped():
            break
        (token_ids,) = np.unpackbits(mask, bitorder="little").nonzero()
        if not len(token_ids) or not matcher.consume_token(int(token_ids[which])):
            break
    return matcher.get_error().partition("\n")[0].strip()[:200]


def main() -> int:
    """The process: answers each form, until its input ends."""
    source, target, most_cpu_s = sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever code it runs
    first = _read(source)
    if first is None:
        return 0
    vocabulary = msgspec.msgpack.decode(first, type=_Vocabulary)
    grammars = Grammars(lambda: cast(Any, vocabulary))
    grammars.compile(StructuredOutputs(json_object=True))  # prepares the vocabulary, which takes longer than most forms
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    _write(target, "")
    while (data := _read(source)) is not None:
        outputs = msgspec.msgpack.decode(data, type=StructuredOutputs)
        signal.setitimer(signal.ITIMER_PROF, most_cpu_s)
        refusal = check(grammars, outputs)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(target, refusal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
