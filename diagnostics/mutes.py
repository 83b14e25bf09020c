"""Mutes: findings that somebody knows of and does not want to be woken for, each until a date. A file beside the log.

    DIR/mutes.json    {"schema": "eprt.mutes/1", "mutes": [{"place": "column:3", "until": 1760000000.0, "note": "..."}]}

Muted findings are still shown, last. Knows findings as JSON objects (eprt.findings/1) and nothing of how they are made.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

FILE_NAME = "mutes.json"
SCHEMA = "eprt.mutes/1"
_KINDS = ("column", "row", "hang", "point", "node", "path", "tier", "job")


@dataclass(frozen=True)
class Mute:
    """Of the findings at one place."""

    place: str  # as place_of() has it
    until: float  # Unix time
    note: str = ""  # why, for whoever reads it later


def place_of(finding: Mapping[str, Any]) -> str:
    """column:3, row:3, hang:3, point:2-6 (2 waits for 6), node:1, path:0-1, tier:NAME, job."""
    kind, rank, src = finding["kind"], finding.get("rank"), finding.get("src")
    if rank is not None:
        return f"{kind}:{rank}"
    if src is not None:
        return f"{kind}:{src}-{finding['dst']}"
    what = "-".join(map(str, finding.get("nodes") or ())) or finding.get("tier") or ""
    return f"{kind}:{what}" if what else kind


def check_place(text: str) -> str:
    """ValueError where no finding can be there."""
    kind, colon, what = text.partition(":")
    parts = what.split("-")
    one, two = (len(parts) == n and all(part.isdecimal() for part in parts) for n in (1, 2))
    right = {"job": not colon, "tier": bool(what), "point": two, "path": two, "hang": one or two}.get(kind, one)
    if kind not in _KINDS or not right:
        raise ValueError(
            f"{text}: must be column:RANK, row:RANK, hang:RANK, point:SRC-DST, node:N, path:N-M, tier:T or job"
        )
    return text


def parse_until(text: str, now_s: float) -> float:
    """A date or time (ISO 8601, UTC unless it says otherwise), or a span as 30m, 12h, 7d. ValueError for the past."""
    number, unit = text[:-1], text[-1:]
    if number.isdecimal() and unit in ("m", "h", "d"):
        return now_s + timedelta(**{{"m": "minutes", "h": "hours", "d": "days"}[unit]: int(number)}).total_seconds()
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text}: must be a date, as 2026-12-01 or 2026-12-01T08:00, or a span, as 12h or 7d"
        ) from None
    until = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
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
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("mutes"), list):
            raise ValueError(f"{self.path}: not an object of schema {SCHEMA} with a list of mutes")
        try:
            mutes = [Mute(check_place(m["place"]), float(m["until"]), str(m.get("note", ""))) for m in data["mutes"]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.path}: a mute is not a place and a time: {error}") from None
        return [mute for mute in mutes if mute.until > now_s]

    def add_mute(self, mute: Mute, now_s: float) -> None:
        """In place of one for the same place."""
        self._write([*(m for m in self.read(now_s) if m.place != mute.place), mute])

    def remove_mute(self, place: str, now_s: float) -> bool:
        """Whether there was one."""
        mutes = self.read(now_s)
        self._write([mute for mute in mutes if mute.place != place])
        return any(mute.place == place for mute in mutes)

    def _write(self, mutes: Sequence[Mute]) -> None:
        document = {"schema": SCHEMA, "mutes": [asdict(mute) for mute in mutes]}
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.replace(self.path)


def with_mutes(findings: Sequence[Mapping[str, Any]], mutes: Sequence[Mute]) -> list[dict[str, Any]]:
    """Each with one more field: muted_until, Unix time or null. Muted ones last."""
    until = {mute.place: mute.until for mute in mutes}
    told = [{**finding, "muted_until": until.get(place_of(finding))} for finding in findings]
    return sorted(told, key=lambda finding: finding["muted_until"] is not None)


def mutes_beside(directory: str | Path, now_s: float | None = None) -> list[Mute]:
    """Of a log directory. ValueError or OSError where there is a file that cannot be used."""
    return MuteFile(Path(directory) / FILE_NAME).read(time.time() if now_s is None else now_s)
