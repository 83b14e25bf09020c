"""`eprt balance` and `python -m eprt.balancer`: chooses the subcommand. Each one is a file in commands/."""

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import compare, options, plan, record, replay, show


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eprt balance", description="Plans expert placements from measured load.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (plan, replay, compare, show, record):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 if the input cannot be used."""
    arguments = build_parser().parse_args(argv)
    try:
        options.check_numbers(arguments)
        status = arguments.run(arguments)
        print(end="", flush=True)  # here, where a reader that has gone is no error yet
        return status
    except BrokenPipeError:  # a reader that has seen enough, as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, MemoryError, RecursionError) as error:
        print(f"eprt balance: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
