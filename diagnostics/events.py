"""The diagnosis log: one JSON line per rank and window, in one file per rank. Format and reader of eprt.diagnose/1.

Knows the format, not its meaning (analysis.py). writer.py writes it.
"""

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA = "eprt.diagnose/1"
_PER_RANK = ("dispatch_wait_us", "combine_wait_us", "recv_tokens", "sent_tokens")
_FILE_NAME = re.compile(r"diagnose_rank(\d+)\.log(\.1)?$")


@dataclass(frozen=True)
class ExpertRows:
    """Load of one rank's expert slots in one window. L layers, E slots of this rank.

    epoch: of the placement, at the end of the window. layers: [L] model layer numbers. expert_of_slot: [L][E] logical
    expert, -1 for an empty slot. rows: [L][E] tokens routed to the slot.
    """

    epoch: int
    layers: tuple[int, ...]
    expert_of_slot: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("expert_of_slot", "rows"):
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))
        shape = [len(row) for row in self.expert_of_slot]
        if len(shape) != len(self.layers) or [len(row) for row in self.rows] != shape:
            raise ValueError(f"experts: {len(self.layers)} layers, but expert_of_slot and rows have other shapes")
        values = [self.epoch, *self.layers, *(v for rows in self.rows for v in rows)]
        if not all(isinstance(v, int) and v >= 0 for v in values):
            raise ValueError("experts: epoch, layers and rows must be integers of at least 0")
        if not all(isinstance(v, int) and v >= -1 for row in self.expert_of_slot for v in row):
            raise ValueError("experts: expert_of_slot must hold integers of at least -1")


@dataclass(frozen=True)
class WindowRecord:
    """What one rank saw in one window. Lists have one entry per rank.

    window: counts up from 0, equal on all ranks. t_start, t_end: Unix time, seconds. num_calls: dispatch + combine
    pairs in the window. node_of_rank: node index of each rank.
    dispatch_wait_us, combine_wait_us: total time this rank waited for rank j. compute_us: total time in its experts.
    recv_tokens, sent_tokens: tokens received from, sent to rank j. experts: optional, what each expert slot got.
    """

    window: int
    t_start: float
    t_end: float
    rank: int
    num_ranks: int
    node_of_rank: tuple[int, ...]
    num_calls: int
    dispatch_wait_us: tuple[float, ...]
    combine_wait_us: tuple[float, ...]
    recv_tokens: tuple[int, ...]
    compute_us: float
    sent_tokens: tuple[int, ...]
    experts: ExpertRows | None = None

    def __post_init__(self):
        for name in ("node_of_rank", *_PER_RANK):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        problem = self._problem()
        if problem:
            raise ValueError(problem)

    def _problem(self) -> str | None:
        for name in ("window", "rank", "num_ranks", "num_calls"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                return f"{name}={value!r}: must be an integer of at least 0"
        if self.rank >= self.num_ranks:
            return f"rank {self.rank} is not in 0..{self.num_ranks - 1}"
        for name in ("t_start", "t_end", "compute_us"):
            if not _is_amount(getattr(self, name)):
                return f"{name}={getattr(self, name)!r}: must be a finite number of at least 0"
        if self.t_end < self.t_start:
            return f"t_end={self.t_end} is before t_start={self.t_start}"
        for name in ("node_of_rank", *_PER_RANK):
            values = getattr(self, name)
            if len(values) != self.num_ranks:
                return f"{name} has {len(values)} entries for {self.num_ranks} ranks"
            for j, value in enumerate(values):
                if not _is_amount(value):
                    return f"{name}[{j}]={value!r}: must be a finite number of at least 0"
        return None

    def to_line(self) -> str:
        """One line of the log, newline included."""
        data = {"schema": SCHEMA, **asdict(self)}
        if self.experts is None:
            del data["experts"]
        return json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n"

    @staticmethod
    def from_line(line: str) -> "WindowRecord":
        """ValueError saying what is wrong with the line. Fields of later versions are ignored."""
        data = json.loads(line)
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema is {data.get('schema')!r}, not {SCHEMA!r}")
        names = [field.name for field in fields(WindowRecord) if field.name != "experts"]
        missing = [name for name in names if name not in data]
        if missing:
            raise ValueError(f"fields are missing: {', '.join(missing)}")
        for name in ("node_of_rank", *_PER_RANK):
            if not isinstance(data[name], list):
                raise ValueError(f"{name} is no list")
        experts = data.get("experts")
        if experts is not None:
            try:
                experts = ExpertRows(**{field.name: experts[field.name] for field in fields(ExpertRows)})
            except (TypeError, KeyError) as error:
                raise ValueError(f"experts is no such table: {error}") from None
        return WindowRecord(**{name: data[name] for name in names}, experts=experts)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


@dataclass(frozen=True)
class LogProblem:
    """Something in the log that could not be used. line: 1-based, 0 when the whole file is meant."""

    file: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


@dataclass(frozen=True)
class WindowLog:
    """records: sorted by window, then rank, one of each pair. problems: what was skipped, and where."""

    records: tuple[WindowRecord, ...]
    problems: tuple[LogProblem, ...]


def read_log(directory: str | Path) -> WindowLog:
    """Reads every diagnose_rank*.log and .log.1 of a directory. Broken lines are skipped and reported as problems.

    OSError when the directory cannot be read; ValueError when it holds no such file or no usable line.
    """
    directory = Path(directory)
    files = sorted(
        (int(match[1]), not match[2], path) for path in directory.iterdir() if (match := _FILE_NAME.match(path.name))
    )
    if not files:
        raise ValueError(f"{directory} holds no diagnose_rank*.log")
    records: dict[tuple[int, int], WindowRecord] = {}
    problems: list[LogProblem] = []
    for rank, _, path in files:
        _read_file(path, rank, records, problems)
    if not records:
        raise ValueError(f"{directory}: no usable line" + "".join(f"\n  {problem}" for problem in problems[:10]))
    num_ranks = next(iter(records.values())).num_ranks
    silent = sorted(set(range(num_ranks)) - {rank for _, rank in records})
    if silent:
        problems.append(LogProblem(directory, 0, f"nothing from rank {', '.join(map(str, silent))} of {num_ranks}"))
    return WindowLog(tuple(records[key] for key in sorted(records)), tuple(problems))


def _read_file(path: Path, rank: int, records: dict[tuple[int, int], WindowRecord], problems: list[LogProblem]) -> None:
    shape = next(((r.num_ranks, r.node_of_rank) for r in records.values()), None)
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            record = WindowRecord.from_line(raw.decode())
            if record.rank != rank:
                raise ValueError(f"a line of rank {record.rank} in the file of rank {rank}")
            if shape is None:
                shape = record.num_ranks, record.node_of_rank
            if (record.num_ranks, record.node_of_rank) != shape:
                raise ValueError(f"{record.num_ranks} ranks on nodes {record.node_of_rank}, the lines before: {shape}")
            if (record.window, rank) in records:
                raise ValueError(f"window {record.window} is there twice; was the directory used by two runs?")
        except ValueError as error:
            problems.append(LogProblem(path, number, str(error)))
            continue
        records[record.window, rank] = record
