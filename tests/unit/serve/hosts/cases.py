"""A host's card as the tests change it."""

import msgspec

from eprt.serve.hosts.messages import HostCard

CARD = HostCard(
    node=0,
    name="a",
    nnodes=3,
    num_ranks=2,
    model="m",
    memory="x",
    flags={"--seed": "0", "--api-key": "d1"},
    secrets=frozenset({"--api-key"}),
)


def card(**changes) -> HostCard:
    """Of host 1, which fits, but for the changes."""
    return msgspec.structs.replace(CARD, **{"node": 1, "name": "b", "memory": "y", **changes})
