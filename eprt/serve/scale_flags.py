"""Flags of the planner, which starts and retires instances. Knows nothing of its rule."""

import argparse

from eprt.serve.options import OptionError, ServeOptions

MODES = ("off", "advise", "auto")
_DETAILS = {
    "scale_prefill": "--scale-prefill",
    "scale_decode": "--scale-decode",
    "scale_target": "--scale-target",
}


def add_scale_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "auto: start and retire instances by predicted times; advise: only say so; off (default)"
    add("--scale", default=ServeOptions.scale, metavar="MODE", help=text)
    text = "fewest and most prefill instances, such as 1:4; default: from 1 to twice --prefill"
    add("--scale-prefill", metavar="MIN:MAX", help=text)
    text = "fewest and most decode instances, such as 1:4; default: from 1 to twice --decode"
    add("--scale-decode", metavar="MIN:MAX", help=text)
    text = "targets: seconds to the first token, seconds per token; default: those of the first --tier, else 1.5,0.05"
    add("--scale-target", metavar="S,S", help=text)
    text = "seconds between two decisions, default %(default)g"
    add(
        "--scale-window", dest="scale_window_s", type=float, default=ServeOptions.scale_window_s, metavar="S", help=text
    )
    text = "seconds after a change until the next one, default %(default)g"
    default = ServeOptions.scale_cooldown_s
    add("--scale-cooldown", dest="scale_cooldown_s", type=float, default=default, metavar="S", help=text)


def check_scale(args: argparse.Namespace) -> None:
    """OptionError with one line that names flag, value and remedy. Parses what was given."""
    if args.scale not in MODES:
        raise OptionError(f"--scale {args.scale}: must be {', '.join(MODES[:-1])} or {MODES[-1]}")
    if args.scale != "off" and not args.num_decode:
        raise OptionError(f"--scale {args.scale}: is of instances; give --prefill and --decode too")
    for name, flag in _DETAILS.items():
        if getattr(args, name) is not None and args.scale == "off":
            raise OptionError(f"{flag} {getattr(args, name)}: says nothing without --scale auto or --scale advise")
    for flag, value in (("--scale-window", args.scale_window_s), ("--scale-cooldown", args.scale_cooldown_s)):
        if not 0.1 <= value <= 86400:
            raise OptionError(f"{flag} {value:g}: must be in 0.1..86400")
    for role, least, num in (("prefill", 0, args.num_prefill), ("decode", 1, args.num_decode)):
        name = f"scale_{role}"
        if (given := getattr(args, name)) is not None:
            setattr(args, name, _range(f"--scale-{role} {given}", given, least, num))
    if args.scale_target is not None:
        args.scale_target = _seconds(f"--scale-target {args.scale_target}", args.scale_target)


def _range(flag: str, given: str, least: int, num_start: int) -> tuple[int, int]:
    low, _, high = given.partition(":")
    if not (low.isascii() and low.isdecimal() and high.isascii() and high.isdecimal() and len(given) < 12):
        raise OptionError(f"{flag}: must be MIN:MAX, as 1:4")
    if not least <= int(low) <= num_start <= int(high):
        raise OptionError(f"{flag}: must have {least} <= MIN <= {num_start} <= MAX, as {num_start} are started")
    return int(low), int(high)


def _seconds(flag: str, given: str) -> tuple[float, float]:
    try:
        first, token = map(float, given.split(","))
    except ValueError:
        raise OptionError(f"{flag}: must be seconds to the first token and per token, as 1.5,0.05") from None
    if not (0 < first <= 3600 and 0 < token <= 3600):
        raise OptionError(f"{flag}: both must be above 0 and at most 3600 seconds")
    return first, token
