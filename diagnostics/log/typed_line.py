"""decode_line: a line of the log decoded straight into the types of its fields, by msgspec. Knows no file.

Most of a log is numbers: a gigabyte holds a hundred million. msgspec reads and checks them in one pass, where json and
the checks of WindowRecord take several. What it refuses, or may understand otherwise, is left to the long way.
"""

from functools import lru_cache
from typing import Annotated, Any

import msgspec

from .events import MOST, MOST_RANKS, MOST_SECONDS, PER_RANK, SCHEMA, WindowRecord

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
_Amount = _Count | Annotated[float, msgspec.Meta(ge=0, le=MOST)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]
_Amounts = tuple[_Amount, ...]


class _Line(msgspec.Struct):
    """The fields of a line. Those that few lines have are checked where WindowRecord.from_line checks them."""

    schema: str
    window: _Count
    t_start: _Seconds
    t_end: _Seconds
    rank: _Count
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    node_of_rank: msgspec.Raw
    num_calls: _Count
    dispatch_wait_us: _Amounts
    combine_wait_us: _Amounts
    recv_tokens: _Amounts
    compute_us: _Amount
    sent_tokens: _Amounts
    blocked_us: _Amount | None = None
    usage: Any = None
    experts: Any = None
    process: Any = None
    standing: Any = None

    def is_possible(self) -> bool:
        lengths = {len(getattr(self, name)) for name in PER_RANK}
        return self.schema == SCHEMA and self.rank < self.num_ranks and lengths == {self.num_ranks}


_LINES, _NODES = msgspec.json.Decoder(_Line), msgspec.json.Decoder(_Amounts)


@lru_cache(maxsize=64)  # equal in all lines of a run
def _nodes(text: bytes) -> tuple[int | float, ...]:
    return _NODES.decode(text)


def decode_line(line: bytes) -> WindowRecord | None:
    """None for a line that goes the long way."""
    if not line.isascii():  # msgspec passes over fields that it does not know, whatever their bytes are
        return None
    try:
        found = _LINES.decode(line)
        nodes = _nodes(bytes(found.node_of_rank))
    except (msgspec.MsgspecError, RecursionError):
        return None
    if not found.is_possible() or len(nodes) != found.num_ranks or found.t_end < found.t_start:
        return None
    fields = {name: getattr(found, name) for name in found.__struct_fields__ if name != "schema"}
    return WindowRecord.from_checked({**fields, "node_of_rank": nodes})
