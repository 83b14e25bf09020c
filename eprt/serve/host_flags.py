"""Flags of a server whose ranks span hosts without MPI. Knows nothing of how hosts meet (hosts/)."""

import argparse

from eprt import env
from eprt.ep.wire.meeting import is_loopback, parse_address
from eprt.ep.wire.options import WireOptions
from eprt.serve.options import OptionError, ServeOptions

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def add_host_flags(group: argparse._ArgumentGroup) -> None:
    """Where they are not given, nnodes and node_rank are None."""
    add = group.add_argument
    text = "number of hosts; run this command on each of them, with its own --node-rank; -n is the ranks of each host"
    add("--nnodes", type=int, metavar="N", help=text)
    add("--node-rank", type=int, metavar="R", help="number of this host, from 0; host 0 has the HTTP port")
    text = "address of host 0 that all hosts reach, with a free port; unless it is loopback, EPRT_GROUP_KEY must be set"
    add("--dist-init-addr", metavar="HOST:PORT", help=text)
    default = ServeOptions.dist_timeout_s
    text = f"seconds within which all hosts must connect, default {default:g}"
    add("--dist-timeout", dest="dist_timeout_s", type=float, default=default, metavar="S", help=text)
    text = (
        "transport between nodes, such as tcp:threads=2, paced:gbps=25 or, for GPUs, nvshmem (docs/wire.md), default "
    )
    text += "tcp; on one host with EPRT_RANKS_PER_NODE, ranks use it as if they spanned hosts"
    add("--wire", metavar="WIRE", help=text)


def check_hosts(args: argparse.Namespace) -> None:
    """OptionError with one line that names flag, value and remedy. Fills in what was not given."""
    given = args.nnodes is not None
    for flag, value in (("--node-rank", args.node_rank), ("--dist-init-addr", args.dist_init_addr)):
        if value is not None and not given:
            raise OptionError(f"{flag} {value}: is of several hosts; give --nnodes too, or leave it out")
    args.nnodes, args.node_rank = 1 if args.nnodes is None else args.nnodes, args.node_rank or 0
    if args.nnodes < 1:
        raise OptionError(f"--nnodes {args.nnodes}: must be at least 1")
    if not 0 <= args.node_rank < args.nnodes:
        raise OptionError(f"--node-rank {args.node_rank}: must be in 0..{args.nnodes - 1} with --nnodes {args.nnodes}")
    if not 0 < args.dist_timeout_s <= 86400:
        raise OptionError(f"--dist-timeout {args.dist_timeout_s:g}: must be above 0 and at most 86400")
    if args.wire is not None:
        try:
            wire = WireOptions.from_text(args.wire)
        except ValueError as error:
            raise OptionError(f"--wire: {error}") from None
        if wire.gpu and args.device != "cuda":
            raise OptionError(f"--wire {args.wire}: is of GPUs; give --device cuda too, or --wire tcp")
    if args.nnodes > 1:
        _check_address(args)
    if args.nnodes > 1 or args.wire is not None:
        _check_others(args)


def _check_address(args: argparse.Namespace) -> None:
    address = args.dist_init_addr
    want = "HOST:PORT, an address of host 0 that all hosts reach, the same on all of them"
    if address is None:
        raise OptionError(f"--nnodes {args.nnodes}: the hosts must meet; give --dist-init-addr {want}")
    try:
        host, _ = parse_address(address)
    except ValueError:
        raise OptionError(f"--dist-init-addr {address}: write {want}") from None
    if host in _ANY_ADDRESS:
        raise OptionError(f"--dist-init-addr {address}: is no address that others reach; write {want}")
    if not is_loopback(host) and not env.get("EPRT_GROUP_KEY"):
        raise OptionError(
            f"--dist-init-addr {address}: whoever reaches it could join; set EPRT_GROUP_KEY to the same secret on all "
            "hosts"
        )


def _check_others(args: argparse.Namespace) -> None:
    """Flags that mean shared memory, or GPUs."""
    why = f"--nnodes {args.nnodes}" if args.nnodes > 1 else "--wire"
    has_gpu_wire = args.wire is not None and bool(WireOptions.from_text(args.wire).gpu)
    if args.device != "cpu" and not has_gpu_wire:
        raise OptionError(
            f"--device {args.device}: with {why} ranks compute on CPUs; leave it out, or give --device cuda with "
            "--wire nvshmem"
        )
    if args.max_lost_ranks:
        raise OptionError(
            f"--max-lost-ranks {args.max_lost_ranks}: needs ranks that share the memory of one host; leave out {why}"
        )
    if args.num_decode:
        raise OptionError(f"--decode {args.num_decode}: instances are of one host; leave out {why}")
