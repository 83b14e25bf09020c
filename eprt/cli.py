"""The `eprt` command: one word chooses a program, the rest are the program's own arguments.

A program is imported when it is chosen, so that `eprt env` runs where torch or MPI is missing. Knows nothing of flags.
"""

import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

# word: (module with main(argv) -> exit status, summary for the usage)
COMMANDS = {
    "serve": ("eprt.serve.__main__", "start an OpenAI-compatible server of a DeepSeek-style MoE model"),
    "join": ("eprt.serve.join", "replace a lost rank of a running server, or add an instance"),
    "chat": ("eprt.chat", "chat with a running server, in the terminal"),
    "generate": ("eprt.generate", "complete prompts, without a server"),
    "convert": ("eprt.models.convert", "rewrite a checkpoint so that each rank reads few files"),
    "hash-load": ("eprt.hash_load", "tell the expert load of layers that are routed by token id, from text"),
    "balance": ("eprt.balancer.__main__", "plan, compare and replay expert placements, from recorded load"),
    "balancer": ("eprt.balancer.daemon_main", "rebalance the experts of a running server, from outside"),
    "plan-cluster": ("eprt.cluster.__main__", "predict speed, memory and cost of a model on a cluster"),
    "diagnose": ("eprt.diagnostics.__main__", "find slow ranks and links, of a running server or in its log"),
    "bench": ("benchmarks.__main__", "run benchmarks, from a source checkout"),
    "env": ("eprt.doctor", "show what this machine has and lacks, and how to mend it"),
}


def usage() -> str:
    lines = [f"  {word:12} {summary}" for word, (_, summary) in COMMANDS.items()]
    return "usage: eprt COMMAND [arguments]\n\n" + "\n".join(lines) + "\n\n`eprt COMMAND --help` explains each."


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the chosen program; 2 where the word names none."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    word, rest = (arguments or [""])[0], arguments[1:]
    if word in ("", "-h", "--help", "help"):
        print(usage())
        return 0 if word else 2
    if word in ("-V", "--version"):
        print(import_module("eprt").__version__)
        return 0
    if word not in COMMANDS:
        print(f"eprt: no command {word!r}\n\n{usage()}", file=sys.stderr)
        return 2
    for argument in rest:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse of Python 3.11 takes it for an empty list
            print(f"eprt {word}: {argument}: -- is not a value", file=sys.stderr)
            return 2
    try:
        return _flushed(_load(word), rest)
    except KeyboardInterrupt:  # of a program that has no other use for it
        print(f"eprt {word}: interrupted", file=sys.stderr)
        return 130  # as shells say it of SIGINT
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _flushed(program: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Writes out what is printed here, where a reader that has gone can still be told from an error."""
    try:
        status = program(arguments) or 0
    except SystemExit:  # of --help
        print(end="", flush=True)
        raise
    print(end="", flush=True)
    return status


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _load(word: str) -> Callable[[Sequence[str]], int | None]:
    try:
        return import_module(COMMANDS[word][0]).main
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "eprt":
            raise
        if missing == "benchmarks":
            remedy = "the benchmarks come with the sources; run `make bench` in a checkout"
        else:
            how = "`eprt env` says how to get it" if missing in ("torch", "mpi4py") else f"`pip install {missing}`"
            remedy = f"{missing} is not installed; {how}"
        raise SystemExit(f"eprt {word}: {remedy}") from None


if __name__ == "__main__":
    sys.exit(main())
