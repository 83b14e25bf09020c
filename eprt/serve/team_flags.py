"""Whether teams of ranks that share prompts (--prompt-ranks) or attention (--attention-tp) fit the ranks that there
are. Knows only flags."""

import argparse

from eprt.serve.options import OptionError


def check_teams(args: argparse.Namespace) -> None:
    """OptionError with one line that names flag, value and remedy."""
    _check_prompt_ranks(args)
    if args.attention_tp > 1:
        _check_attention_tp(args)


def _check_prompt_ranks(args: argparse.Namespace) -> None:
    size, largest = args.prompt_ranks, args.num_ranks
    if size == 1:
        return
    if args.nnodes > 1:
        raise OptionError(
            f"--prompt-ranks {size}: ranks that compute one prompt share memory, and these are of {args.nnodes} hosts; "
            "leave it out"
        )
    if args.num_decode:
        largest = max(args.prefill_ranks if args.num_prefill else 1, args.decode_ranks)
    if largest is not None and size > largest:
        what = "the largest instance has" if args.num_decode else "there are"
        raise OptionError(f"--prompt-ranks {size}: {what} {largest} ranks; must be in 1..{largest}")


def _check_attention_tp(args: argparse.Namespace) -> None:
    size = args.attention_tp
    if args.nnodes > 1:
        raise OptionError(
            f"--attention-tp {size}: ranks that share attention share memory, and these are of {args.nnodes} hosts; "
            "leave it out"
        )
    if args.max_lost_ranks:
        raise OptionError(
            f"--attention-tp {size} with --max-lost-ranks {args.max_lost_ranks}: nobody has the heads of a rank that "
            "is lost; leave one of them out, or serve from instances (--decode), which go on without one of them"
        )
    of_each = [("--ranks", args.num_ranks)]
    if args.num_decode:
        of_each = [("--prefill-ranks", args.prefill_ranks)] * bool(args.num_prefill)
        of_each.append(("--decode-ranks", args.decode_ranks))
    for flag, num_ranks in of_each:
        if num_ranks is not None and num_ranks % size:
            raise OptionError(
                f"--attention-tp {size}: {flag} {num_ranks} makes no teams of {size}; must be a multiple of it"
            )
