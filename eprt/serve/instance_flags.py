"""Flags of a server of several instances: prefill and decode apart. Knows nothing of what instances do."""

import argparse

from eprt.kv.reader import FAR_READERS
from eprt.serve.options import MOST_RANKS, OptionError, ServeOptions
from eprt.serve.start_command import check_command

BALANCES = ("step", "kv", "batch")
# field -> flag, of those that say nothing without instances
_DETAILS = {
    "prefill_ranks": "--prefill-ranks",
    "decode_ranks": "--decode-ranks",
    "local_prefill_tokens": "--local-prefill-tokens",
    "handoff_timeout_s": "--handoff-timeout",
    "decode_balance": "--decode-balance",
    "start_instance_command": "--start-instance-command",
    "join_address": "--join-address",
    "page_reader": "--page-reader",
}


def add_instance_flags(group: argparse._ArgumentGroup) -> None:
    """Each detail is None where it is not given."""
    add = group.add_argument
    text = "instances that compute prompts, beside --decode; default: one group of ranks does all"
    add("--prefill", dest="num_prefill", type=int, metavar="P", help=text)
    text = "instances that generate all tokens after the first; with --prefill 0 each also computes its own prompts"
    add("--decode", dest="num_decode", type=int, metavar="D", help=text)
    for role in ("prefill", "decode"):
        text = f"ranks of each {role} instance, default {getattr(ServeOptions, f'{role}_ranks')}"
        add(f"--{role}-ranks", type=int, metavar="N", help=text)
    default = ServeOptions.local_prefill_tokens
    text = (
        "a decode instance computes a prompt itself if at most N of its tokens are not in its prefix cache, default "
        f"{default}"
    )
    add("--local-prefill-tokens", type=int, metavar="N", help=text)
    default = ServeOptions.handoff_timeout_s
    text = (
        "seconds that a computed prompt waits for a decode instance, which after that computes it again; default "
        f"{default:g}"
    )
    add("--handoff-timeout", dest="handoff_timeout_s", type=float, metavar="S", help=text)
    text = (
        "which decode instance takes a request: the one whose next step is predicted to be fastest (step, default), or "
    )
    text += "whose fullest rank has the fewest cached tokens (kv) or requests (batch)"
    add("--decode-balance", metavar="HOW", help=text)
    text = "command that starts one more instance, such as 'systemctl start eprt@{role}'; its words may have {role}, "
    text += "{ranks} and {url}; default: this server's launcher starts it"
    add("--start-instance-command", metavar="COMMAND", help=text)
    text = "an address of this host, and a port (0: any), at which ranks of instances of other hosts connect (0.0.0.0 "
    text += "for all addresses); default: only instances of this host can join"
    add("--join-address", metavar="HOST:PORT", help=text)
    text = "how hosts read each other's KV pages: tcp (default) or nixl, which needs the extra nixl on all hosts"
    add("--page-reader", metavar="NAME", help=text)


def check_instances(args: argparse.Namespace) -> None:
    """OptionError with one line that names flag, value and remedy. Fills in what was not given."""
    num_prefill, num_decode = args.num_prefill, args.num_decode
    given = num_prefill is not None or num_decode is not None
    if not given:
        for name, flag in _DETAILS.items():
            if getattr(args, name) is not None:
                raise OptionError(f"{flag} {getattr(args, name)}: is of instances; give --prefill and --decode too")
    if given and args.device == "cuda":
        for name in ("join_address", "page_reader"):
            if getattr(args, name) is not None:
                raise OptionError(
                    f"{_DETAILS[name]} {getattr(args, name)}: is for instances of other hosts, which cannot read KV "
                    "pages of GPUs so far; leave it out, or use --device cpu"
                )
    for name in _DETAILS:
        if getattr(args, name) is None:
            setattr(args, name, getattr(ServeOptions, name))
    args.num_prefill, args.num_decode = num_prefill or 0, num_decode or 0
    if not given:
        return
    _check_numbers(args)
    _check_others(args)
    args.num_ranks = args.num_prefill * args.prefill_ranks + args.num_decode * args.decode_ranks


def _check_numbers(args: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--prefill", args.num_prefill, 0),
        ("--decode", args.num_decode, 1),
        ("--prefill-ranks", args.prefill_ranks, 1),
        ("--decode-ranks", args.decode_ranks, 1),
        ("--local-prefill-tokens", args.local_prefill_tokens, 0),
    ):
        if value < least:
            raise OptionError(f"{flag} {value}: must be at least {least}")
        if flag != "--local-prefill-tokens" and value > MOST_RANKS:
            raise OptionError(f"{flag} {value}: must be at most {MOST_RANKS}")
    if not 0 < args.handoff_timeout_s <= 86400:
        raise OptionError(f"--handoff-timeout {args.handoff_timeout_s:g}: must be above 0 and at most 86400")
    if args.start_instance_command is not None:
        try:
            check_command(args.start_instance_command)
        except ValueError as error:
            raise OptionError(f"--start-instance-command {error}") from None
    if args.page_reader not in FAR_READERS:
        raise OptionError(f"--page-reader {args.page_reader}: must be {' or '.join(FAR_READERS)}")
    if args.join_address is not None:
        args.join_address = _parse_address(args.join_address)
    if args.decode_balance not in BALANCES:
        raise OptionError(
            f"--decode-balance {args.decode_balance}: must be {', '.join(BALANCES[:-1])} or {BALANCES[-1]}"
        )


def _parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise OptionError(f"--join-address {text}: write HOST:PORT, an address of this host and a port; 0: any port")
    return host, int(port)


def _check_others(args: argparse.Namespace) -> None:
    """Flags that mean one group of ranks."""
    if args.num_ranks is not None:
        raise OptionError(f"-n {args.num_ranks}: instances have ranks of their own: --prefill-ranks, --decode-ranks")
    if args.device == "auto":
        raise OptionError("--device auto: all instances need the same: give --device cpu or --device cuda")
    if args.max_lost_ranks:
        raise OptionError(
            f"--max-lost-ranks {args.max_lost_ranks}: an instance is lost as a whole, and others go on with its "
            "requests; leave it out"
        )
    if args.inject:
        raise OptionError(f"--inject {args.inject[0]}: names a rank of one group; leave out --prefill and --decode")
