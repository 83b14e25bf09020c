"""NvlinkOptions: what only the nvlink backends can be told."""

from dataclasses import dataclass

COPIES = ("auto", "rank", "node")


@dataclass(frozen=True)
class NvlinkOptions:
    """Equal on all ranks."""

    # Thread blocks of a call. Default: the backend's choice; in normal mode at most 24 for a single call, and 128 for
    # dispatch() and combine(), beside which nothing is computed.
    num_sms: int | None = None
    expert_alignment: int = 1  # normal mode: each slot's first row is a multiple of it; rows between are undefined
    # Normal mode: static bound of the rows that one dispatch brings a rank. The host then never waits, x_RH has so many
    # rows, and more are an error. Default: room for the worst case, and x_RH has the rows that came.
    max_recv_rows: int | None = None
    # Between nodes: a copy of a token for each rank that it goes to, or one for each node, which a rank there hands on.
    # auto: as the group's wire says, else what is predicted to be faster (node_copies.py).
    copies: str = "auto"

    def __post_init__(self):
        for name in ("num_sms", "expert_alignment", "max_recv_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"NvlinkOptions.{name}={value}: must be at least 1")
        if self.copies not in COPIES:
            raise ValueError(f"NvlinkOptions.copies={self.copies!r}: must be one of {', '.join(COPIES)}")
