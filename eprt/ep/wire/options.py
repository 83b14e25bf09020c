"""WireOptions: which transport carries puts and posts between nodes, and its settings, as text and as fields.

Plain data: opens nothing.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from eprt.ep.wire.library import CPace

KINDS = ("tcp", "paced")


@dataclass(frozen=True)
class WireOptions:
    """Written as KIND or KIND:name=value,name=value; "nvshmem" is tcp with a wire of the GPUs' own beside it. Equal on
    all ranks."""

    kind: str = "tcp"  # "tcp", or "paced": memory of one host at the pace of a network card that is not there
    threads: int = 1  # proxy threads of a rank
    ring: int = 64  # descriptors of a channel, a power of 2
    arena_kib: int = 4096  # that a rank may send ahead to each peer
    silence_s: float = 0.0  # after which a peer that shows no sign of life counts as lost; 0: the deadline of waits
    gpu: str = ""  # what carries decoding steps' tokens between GPUs: "nvshmem", or nothing of their own
    copies: str = "auto"  # of nvshmem alone, as NvlinkOptions.copies: "rank", "node", or what is predicted to be faster
    # The rest is of paced alone.
    gbps: float = 0.0  # GB/s that a rank sends; 0: unlimited
    latency_us: float = 0.0  # from the last byte sent until it is visible
    request_us: float = 0.0  # that the card is busy with each request
    # What a network may do with requests, to show that nothing relies on more than the wire's contract.
    reorder_us: float = 0.0  # each put is late by up to so much
    delay_words: float = 0.0  # share of the posts that are late by word_delay_us
    repeat_words: float = 0.0  # share of the posts that come once more
    word_delay_us: float = 100.0
    seed: int = 0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"wire {self.kind!r}: must be one of {', '.join(KINDS)}, nvshmem; verbs and EFA are not built yet"
            )
        if self.copies not in ("auto", "rank", "node"):
            raise ValueError(f"wire nvshmem: copies={self.copies!r}: must be one of auto, rank, node")
        if self.copies != "auto" and not self.gpu:
            raise ValueError(f"wire {self.kind}: copies is of the nvshmem wire alone; leave it out")
        for name, least in (("threads", 1), ("ring", 1), ("arena_kib", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"wire {self.kind}: {name}={getattr(self, name)}: must be at least {least}")
        if self.ring & (self.ring - 1):
            raise ValueError(f"wire {self.kind}: ring={self.ring}: must be a power of 2")
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type is float and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"wire {self.kind}: {each.name}={value:g}: must be a number of at least 0")
        if self.kind != "paced" and (wrong := self._changed_of_paced()):
            raise ValueError(f"wire {self.kind}: {wrong} is of the paced wire alone; leave it out, or write paced:...")

    def _changed_of_paced(self) -> str | None:
        names = [each.name for each in fields(self)]
        paced = names[names.index("gbps") :]
        return next(
            (each.name for each in fields(self) if each.name in paced and getattr(self, each.name) != each.default),
            None,
        )

    @classmethod
    def from_text(cls, text: str) -> "WireOptions":
        """ "paced:gbps=25,latency_us=3"; ValueError names what is wrong and what there is."""
        kind, _, settings = text.partition(":")
        types: dict[str, Any] = {each.name: each.type for each in fields(cls) if each.name not in ("kind", "gpu")}
        values: dict[str, Any] = {}
        if kind == "nvshmem":
            kind, values["gpu"] = "tcp", kind
        for setting in filter(None, settings.split(",")):
            name, _, value = setting.partition("=")
            if name not in types:
                raise ValueError(f"wire {text!r}: no setting {name!r}; there are {', '.join(types)}")
            try:
                values[name] = types[name](value)
            except ValueError:
                raise ValueError(f"wire {text!r}: {name}={value!r} is not a number") from None
        return cls(kind, **values)

    def pace(self) -> CPace:
        return CPace(
            bytes_per_ns=self.gbps,
            latency_ns=round(self.latency_us * 1e3),
            per_request_ns=round(self.request_us * 1e3),
            seed=self.seed,
            reorder_ns=round(self.reorder_us * 1e3),
            delay_words=self.delay_words,
            repeat_words=self.repeat_words,
            word_delay_ns=round(self.word_delay_us * 1e3),
        )
