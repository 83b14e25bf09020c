"""Mutes: findings that somebody knows of and does not want to be woken for, each until a date. A file beside the log.

    DIR/mutes.json    {"schema": "eprt.mutes/1", "mutes": [{"place": "column:3", "until": 1760000000.0, "note": "..."}]}

Muted findings are still shown, last. Knows findings as JSON objects (eprt.findings/1) and nothing of how they are made.
"""

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

FILE_NAME = "mutes.json"
SCHEMA = "eprt.mutes/1"
_MOST_NOTE, _MOST_PLACE = 1000, 200  # characters
_KINDS = ("column", "row", "hang", "point", "node", "path", "tier", "job")


@dataclass(frozen=True)
class Mute:
    """Of the findings at one place."""

    place: str  # as place_of() has it
    until: float  # Unix time
    note: str = ""  # why, for whoever reads it later


@dataclass(frozen=True)
class MuteChange:
    """A mute that begins, or ends."""

    place: str
    mute: Mute | None  # None: it ends

    @staticmethod
    def from_json(body: bytes, now_s: float) -> "MuteChange":
        """{"place": "column:3", "until": "12h", "note": "..."}; until as parse_until has it, null: the mute ends.
        ValueError says what is wrong."""
        try:
            fields = json.loads(body)
        except ValueError as error:
            raise ValueError(f"the body is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        if not isinstance(fields, dict) or not isinstance(place := fields.get("place"), str) or "until" not in fields:
            raise ValueError("the body must be an object with place and until (null: the mute ends)")
        until, note = fields["until"], fields.get("note", "")
        if len(place) > _MOST_PLACE:
            raise ValueError(f"place has {len(place)} characters, more than {_MOST_PLACE}")
        place = check_place(place)
        if until is None:
            return MuteChange(place, None)
        if not isinstance(until, str):
            raise ValueError(f"until={json.dumps(until)[:40]}: must be a string, as 12h or 2026-12-01, or null")
        if not isinstance(note, str) or len(note) > _MOST_NOTE:
            raise ValueError(f"note: must be a string of at most {_MOST_NOTE} characters")
        return MuteChange(place, Mute(place, parse_until(until, now_s), note.strip()))


def place_of(finding: Mapping[str, Any]) -> str:
    """column:3, row:3, hang:3, point:2-6 (2 waits for 6), node:1, path:0-1, tier:NAME, job."""
    kind, rank, src = finding["kind"], finding.get("rank"), finding.get("src")
    if rank is not None:
        return f"{kind}:{rank}"
    if src is not None:
        return f"{kind}:{src}-{finding['dst']}"
    what = "-".join(map(str, finding.get("nodes") or ())) or finding.get("tier") or ""
    return f"{kind}:{what}" if what else kind


@dataclass(frozen=True)
class JobPlaces:
    """Where a job's findings can be."""

    num_ranks: int
    nodes: frozenset[int] | None = None  # None: not known yet
    tiers: tuple[str, ...] = (
        "inside nodes",
        "between halves of a node",
        "between nodes",
        "between racks",
        "between all nodes",
    )

    def check(self, place: str) -> None:
        """place: as check_place() gives it. ValueError where this job can have no such finding, with what it has."""
        kind, _, what = place.partition(":")
        if kind == "tier":
            if what not in self.tiers:
                raise ValueError(f"{place}: the tiers are {', '.join(self.tiers)}; --topology FILE names further ones")
            return
        numbers = [int(part) for part in what.split("-")] if what else []
        if len(numbers) == 2 and numbers[0] == numbers[1]:
            raise ValueError(f"{place}: both ends are the same; nobody waits for itself")
        if kind in ("node", "path"):
            self._check_nodes(place, numbers)
        elif missing := [rank for rank in numbers if rank >= self.num_ranks]:
            has = f"ranks 0 to {self.num_ranks - 1}" if self.num_ranks > 1 else "rank 0 alone"
            raise ValueError(f"{place}: there is no rank {missing[0]}; the job has {has}")

    def _check_nodes(self, place: str, numbers: Sequence[int]) -> None:
        if self.nodes is None:
            return
        if missing := [node for node in numbers if node not in self.nodes]:
            has = f"nodes {', '.join(map(str, sorted(self.nodes)))}" if len(self.nodes) > 1 else "one node"
            raise ValueError(f"{place}: there is no node {missing[0]}; the job has {has}")
        if len(self.nodes) == 1:
            raise ValueError(f"{place}: the job has one node, whose findings are those of its ranks, or job")


def check_place(text: str) -> str:
    """The place as findings spell it: column:3 for column:03, path:0-1 for path:1-0. ValueError where no finding of any
    job can be there."""
    kind, colon, what = text.partition(":")
    parts = what.split("-")
    one, two = (len(parts) == n and all(part.isdecimal() for part in parts) for n in (1, 2))
    right = {"job": not colon, "tier": bool(what), "point": two, "path": two, "hang": one or two}.get(kind, one)
    if kind not in _KINDS or not right:
        raise ValueError(
            f"{text}: must be column:RANK, row:RANK, hang:RANK, point:SRC-DST, node:N, path:N-M, tier:T or job"
        )
    if not (one or two) or kind == "tier":
        return text
    numbers = [int(part) for part in parts]
    return f"{kind}:{'-'.join(map(str, sorted(numbers) if kind == 'path' else numbers))}"


def parse_until(text: str, now_s: float) -> float:
    """A date or time (ISO 8601, UTC unless it says otherwise), or a span as 30m, 12h, 7d. ValueError for the past."""
    number, unit = text[:-1], text[-1:]
    if number.isdecimal() and unit in ("m", "h", "d"):
        if not 0 < int(number) < 1_000_000:
            raise ValueError(f"{text}: must be at least 1{unit} and below 1000000{unit}")
        return now_s + timedelta(**{{"m": "minutes", "h": "hours", "d": "days"}[unit]: int(number)}).total_seconds()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text}: must be a date, as 2026-12-01 or 2026-12-01T08:00, or a span, as 12h or 7d"
        ) from None
    try:
        until = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).timestamp()
    except OverflowError:
        raise ValueError(f"{text}: must be in the years 1 to 9999, in UTC") from None
    if until <= now_s:
        raise ValueError(f"{text}: is over already")
    return until


class MuteFile:
    """One file; others may write it, too. path: need not exist."""

    def __init__(self, path: Path):
        self.path = path

    def read(self, now_s: float) -> list[Mute]:
        """Those that are not over. ValueError or OSError where the file cannot be used."""
        try:
            data = json.loads(self.path.read_text())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        except RecursionError:
            raise ValueError(f"{self.path}: nested too deeply") from None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("mutes"), list):
            raise ValueError(f"{self.path}: not an object of schema {SCHEMA} with a list of mutes")
        try:
            mutes = [Mute(check_place(m["place"]), float(m["until"]), str(m.get("note", ""))) for m in data["mutes"]]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.path}: a mute is not a place and a time: {error}") from None
        return [mute for mute in mutes if now_s < mute.until < math.inf]

    def why_read_only(self) -> str:
        """Why this process cannot change it; empty: it can."""
        if os.access(self.path.parent, os.W_OK | os.X_OK):
            return ""
        if not self.path.parent.is_dir():
            return f"{self.path.parent} is not there; a server makes it with its first window"
        return f"{self.path.parent} cannot be written by this process"

    def change(self, change: MuteChange, now_s: float) -> bool:
        """Whether something is different now: False for the end of a mute that is none."""
        if change.mute is None:
            return self.remove_mute(change.place, now_s)
        self.add_mute(change.mute, now_s)
        return True

    def add_mute(self, mute: Mute, now_s: float) -> None:
        """In place of one for the same place."""
        with self._locked():
            self._write([*(m for m in self.read(now_s) if m.place != mute.place), mute])

    def remove_mute(self, place: str, now_s: float) -> bool:
        """Whether there was one."""
        with self._locked():
            mutes = self.read(now_s)
            self._write([mute for mute in mutes if mute.place != place])
        return any(mute.place == place for mute in mutes)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Against other threads and processes of this host that change it; some network file systems have no locks."""
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, mutes: Sequence[Mute]) -> None:
        document = {"schema": SCHEMA, "mutes": [asdict(mute) for mute in mutes]}
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(self.path)


def with_mutes(findings: Sequence[Mapping[str, Any]], mutes: Sequence[Mute]) -> list[dict[str, Any]]:
    """Each with three more fields: place, muted_until (Unix time or null) and mute_note. Muted ones last."""
    by_place = {mute.place: mute for mute in mutes}
    told = []
    for finding in findings:
        place = place_of(finding)
        mute = by_place.get(place)
        fields = {"place": place, "muted_until": mute and mute.until, "mute_note": mute and mute.note}
        told.append({**finding, **fields})
    return sorted(told, key=lambda finding: finding["muted_until"] is not None)


def mutes_beside(directory: str | Path, now_s: float | None = None) -> list[Mute]:
    """Of a log directory. ValueError or OSError where there is a file that cannot be used."""
    return MuteFile(Path(directory) / FILE_NAME).read(time.time() if now_s is None else now_s)
