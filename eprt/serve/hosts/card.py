"""A host's card: how it is written, and why one does not fit. Knows nothing of how cards travel."""

import hashlib
import hmac
import socket
from collections.abc import Mapping

import eprt
from eprt import env
from eprt.ep.group.liveness import process_domain
from eprt.ep.wire.options import WireOptions
from eprt.serve.fingerprint import fingerprint
from eprt.serve.hosts.messages import HostCard
from eprt.serve.options import SECRET_FLAGS, OptionError, ServeOptions, common_flags

_VARIABLES = ("EPRT_RANKS_PER_NODE",)


def host_card(options: ServeOptions, key: str) -> HostCard:
    """This host's. key: hides secrets that must be equal. OptionError where the checkpoint cannot be read."""
    flags = {name: _shown(value) for name, value in common_flags(options).items()}
    for name in SECRET_FLAGS:
        if flags[name]:
            flags[name] = hmac.new(key.encode(), flags[name].encode(), hashlib.sha256).hexdigest()
    del flags["-n"], flags["--nnodes"]  # fields of their own
    flags |= {name: _shown(env.get(name)) for name in _VARIABLES}
    try:
        model = fingerprint(options.engine.model_dir)
    except OSError as error:
        raise OptionError(f"--model {options.engine.model_dir}: cannot be read: {error.strerror or error}") from None
    return HostCard(
        node=options.node_rank,
        name=socket.gethostname(),
        nnodes=options.nnodes,
        num_ranks=options.num_ranks or 1,
        model=model,
        memory=process_domain(),
        flags=flags,
        secrets=frozenset(SECRET_FLAGS),
    )


def _shown(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def greeting(card: HostCard) -> dict[str, object]:
    """What is said before any message is understood: another version may write other messages."""
    return {"node": card.node, "name": card.name, "version": eprt.__version__}


def other_version(greeted: Mapping[str, object]) -> str | None:
    """Why whoever greets so is refused."""
    theirs = greeted.get("version")
    if theirs == eprt.__version__:
        return None
    who = f"host {greeted.get('node')} ({greeted.get('name')})"
    return f"{who} runs eprt {theirs}, host 0 runs eprt {eprt.__version__}; install the same version on all hosts"


def misfit(first: HostCard, card: HostCard, wire: str | None) -> str | None:
    """Why the card does not fit to that of host 0; None where it does."""
    if card.nnodes != first.nnodes:
        return f"{card} has --nnodes {card.nnodes}, {first} has {first.nnodes}; give all hosts the same"
    if not 0 <= card.node < first.nnodes:
        most = first.nnodes - 1
        return f"--node-rank {card.node} ({card.name}): must be in 0..{most}, as {first} has --nnodes {first.nnodes}"
    if card.node == first.node:
        return f"--node-rank {card.node} ({card.name}) is taken by {first}; give each host a rank of its own"
    if card.num_ranks != first.num_ranks:
        return (
            f"{card} has -n {card.num_ranks}, {first} has -n {first.num_ranks}; start equally many ranks on each host"
        )
    if card.model != first.model:
        return f"{card} has another model than {first}: config.json or the weight files differ; give both the same"
    for name, of_first in first.flags.items():
        theirs = card.flags.get(name, "")
        if theirs != of_first and name in first.secrets:
            return f"{card} has another {name} than {first}; give all hosts the same"
        if theirs != of_first:
            values = f"{card} has {name} {theirs or 'not set'}, {first} has {of_first or 'not set'}"
            return f"{values}; give all hosts the same"
    if WireOptions.from_text(wire or "tcp").kind == "paced" and card.memory != first.memory:
        return f"--wire {wire}: the paced wire is memory of one host, and {card} is not {first}; write tcp"
    return None
