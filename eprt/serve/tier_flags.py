"""Flags of tiers of service. Knows nothing of what a tier does."""

import argparse

from eprt.serve.options import OptionError
from eprt.serve.tiers.tier import parse_tiers


def add_tier_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = (
        "a tier of service, such as max=1.0,0.030: seconds to the first token, and mean seconds between tokens; may be "
        "repeated; default: no tiers"
    )
    add("--tier", dest="tiers", action="append", default=[], metavar="NAME=S,S", help=text)
    text = "tier of requests that name none and whose key has none; default: the one with the longest times"
    add("--default-tier", default="", metavar="NAME", help=text)


def check_tiers(args: argparse.Namespace) -> None:
    """OptionError with one line that names flag, value and remedy. Parses what was given."""
    try:
        args.tiers = parse_tiers(args.tiers)
    except ValueError as error:
        raise OptionError(f"--tier {error}") from None
    names = [tier.name for tier in args.tiers]
    if args.default_tier and args.default_tier not in names:
        want = f"must be one of {', '.join(names)}" if names else "there are no tiers; give --tier too"
        raise OptionError(f"--default-tier {args.default_tier}: {want}")
