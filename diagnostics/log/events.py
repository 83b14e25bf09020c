"""The format of the diagnosis log, eprt.diagnose/1: one JSON line per rank and window, in one file per rank.

Knows the format of a line, not its meaning (detect/analysis.py). writer.py writes it; index.py and reader.py read it.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from .standing import LoggedProcess, Standing
from .usage import check_usage

SCHEMA = "eprt.diagnose/1"
# Of a rank's file: its rank, a number where it was rotated away, and whether it was packed since.
FILE_NAME = re.compile(r"diagnose_rank(\d{1,9})\.log(?:\.(\d{1,3}))?(\.gz)?$")
# Fields of a record that have one entry per rank.
PER_RANK = ("dispatch_wait_us", "combine_wait_us", "recv_tokens", "sent_tokens")
_OPTIONAL = ("experts", "blocked_us", "usage", "process", "standing")
# Larger numbers come from no clock and no counter, and their sums would overflow.
MOST, MOST_SECONDS, MOST_EXPERTS, MOST_RANKS = 10**18, 10**11, 10**6, 4096


@dataclass(frozen=True)
class ExpertRows:
    """Load of one rank's expert slots in one window. L layers, E slots of this rank."""

    epoch: int  # of the placement, at the end of the window
    layers: tuple[int, ...]  # [L] model layer numbers
    expert_of_slot: tuple[tuple[int, ...], ...]  # [L][E] logical expert, -1 for an empty slot
    rows: tuple[tuple[int, ...], ...]  # [L][E] tokens routed to the slot

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("expert_of_slot", "rows"):
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))
        shape = [len(row) for row in self.expert_of_slot]
        if len(shape) != len(self.layers) or [len(row) for row in self.rows] != shape:
            raise ValueError(f"experts: {len(self.layers)} layers, but expert_of_slot and rows have other shapes")
        if not all(_are_integers(row, 0, MOST) for row in ((self.epoch, *self.layers), *self.rows)):
            raise ValueError(f"experts: epoch, layers and rows must be integers from 0 to {MOST:.0e}")
        if not all(_are_integers(row, -1, MOST_EXPERTS) for row in self.expert_of_slot):
            raise ValueError(f"experts: expert_of_slot must hold integers from -1 to {MOST_EXPERTS}")


@dataclass(frozen=True)
class WindowRecord:
    """What one rank saw in one window. Tuples have one entry per rank j."""

    window: int  # counts up from 0, equal on all ranks
    t_start: float  # Unix time, seconds
    t_end: float
    rank: int
    num_ranks: int
    node_of_rank: tuple[int, ...]  # node index of rank j
    num_calls: int  # dispatch + combine pairs in the window
    dispatch_wait_us: tuple[float, ...]  # total time this rank waited for rank j's dispatch
    combine_wait_us: tuple[float, ...]  # the same for its combine
    recv_tokens: tuple[int, ...]  # tokens received from rank j
    compute_us: float  # total time in this rank's experts
    sent_tokens: tuple[int, ...]  # tokens sent to rank j
    experts: ExpertRows | None = None  # what each expert slot got, where it is logged
    blocked_us: float | None = None  # total time it waited at all, in each call until the last rank's data were there
    usage: Mapping[str, float] | None = None  # some of usage.USAGE
    process: LoggedProcess | None = None
    standing: Standing | None = None  # only of windows in which some rank kept the others waiting

    def __post_init__(self):
        for name in ("node_of_rank", *PER_RANK):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.usage is not None:
            object.__setattr__(self, "usage", check_usage(self.usage, MOST))
        if problem := self._problem():
            raise ValueError(problem)

    def _problem(self) -> str | None:
        for name in ("window", "rank", "num_ranks", "num_calls"):
            value = getattr(self, name)
            if not _are_integers((value,), 0, MOST):
                return f"{name}={_shown(value)}: must be an integer from 0 to {MOST:.0e}"
        if self.num_ranks > MOST_RANKS:
            return f"num_ranks={_shown(self.num_ranks)}: must be at most {MOST_RANKS}"
        if self.rank >= self.num_ranks:
            return f"rank {self.rank} is not in 0..{self.num_ranks - 1}"
        blocked_us = 0.0 if self.blocked_us is None else self.blocked_us
        for name, value in (("compute_us", self.compute_us), ("blocked_us", blocked_us)):
            if not _is_amount(value):
                return f"{name}={_shown(value)}: must be a finite number from 0 to {MOST:.0e}"
        for name in ("t_start", "t_end"):
            if not _is_amount(getattr(self, name), MOST_SECONDS):
                return f"{name}={_shown(getattr(self, name))}: must be Unix time, from 0 to {MOST_SECONDS:.0e} seconds"
        if self.t_end < self.t_start:
            return f"t_end={self.t_end} is before t_start={self.t_start}"
        for name in ("node_of_rank", *PER_RANK):
            values = getattr(self, name)
            if len(values) != self.num_ranks:
                return f"{name} has {len(values)} entries for {self.num_ranks} ranks"
            for j, value in enumerate(values if not _are_amounts(values) else ()):
                if not _is_amount(value):
                    return f"{name}[{j}]={_shown(value)}: must be a finite number from 0 to {MOST:.0e}"
        return None

    def to_line(self) -> str:
        """One line of the log, newline included."""
        data = {"schema": SCHEMA, **asdict(self)}
        data = {name: value for name, value in data.items() if value is not None}
        return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"

    @staticmethod
    def from_line(line: str) -> "WindowRecord":
        """ValueError saying what is wrong with the line. Fields of later versions are ignored."""
        try:
            data = json.loads(line)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema is {data.get('schema')!r}, not {SCHEMA!r}")
        missing = [name for name in _NAMES if name not in data]
        if missing:
            raise ValueError(f"fields are missing: {', '.join(missing)}")
        for name in ("node_of_rank", *PER_RANK):
            if not isinstance(data[name], list):
                raise ValueError(f"{name} is not a list")
        return WindowRecord(
            **{name: data[name] for name in _NAMES},
            blocked_us=data.get("blocked_us"),
            usage=data.get("usage"),
            **_parts_of(data),
        )

    @staticmethod
    def from_checked(data: dict[str, Any]) -> "WindowRecord":
        """data: all fields, those with numbers checked already (typed_line.py). ValueError for what the others hold."""
        record = object.__new__(WindowRecord)
        usage = data["usage"]
        record.__dict__.update(data, **_parts_of(data), usage=None if usage is None else check_usage(usage, MOST))
        return record

    @cached_property
    def planes_PN(self) -> np.ndarray:
        """float64: the fields of PER_RANK, one below the other."""
        return np.stack([np.fromiter(getattr(self, name), np.float64, self.num_ranks) for name in PER_RANK])


def _parts_of(data: dict[str, Any]) -> dict[str, Any]:
    """The optional fields of a line that are objects of their own, checked."""
    experts, process, standing = (data.get(name) for name in ("experts", "process", "standing"))
    if experts is not None:
        try:
            experts = ExpertRows(**{field.name: experts[field.name] for field in fields(ExpertRows)})
        except (TypeError, KeyError) as error:
            raise ValueError(f"experts is not a table of expert rows: {error}") from None
    return {
        "experts": experts,
        "process": None if process is None else LoggedProcess.from_json(process),
        "standing": None if standing is None else Standing.from_json(standing),
    }


_NAMES = [field.name for field in fields(WindowRecord) if field.name not in _OPTIONAL]


def _is_amount(value: Any, most: int = MOST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _are_amounts(values: Sequence[Any]) -> bool:
    """_is_amount of all values, fast: a log of a gigabyte has a hundred million. Three passes in C; sums reveal NaN."""
    if not set(map(type, values)) <= {int, float} or not min(values, default=0) >= 0:
        return False
    return max(values, default=0) <= MOST and math.isfinite(sum(values))


def _are_integers(values: Sequence[Any], least: int, most: int) -> bool:
    return set(map(type, values)) <= {int} and min(values, default=least) >= least and max(values, default=0) <= most


def _shown(value: Any) -> str:
    is_huge = isinstance(value, int) and abs(value) >= 1e30
    text = f"an integer of {value.bit_length()} bits" if is_huge else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
