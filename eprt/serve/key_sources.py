"""Where a server's keys come from: a flag, which others of the host see in the list of processes, a file, a variable.

A line of the clients' file may give its key a tier of service: "KEY tier=NAME". Knows nothing of what a key opens
(keys.py).
"""

import contextlib
import os
import re
import stat
from pathlib import Path

from eprt import env
from eprt.serve.errors import print_line
from eprt.serve.keys import ServerKeys
from eprt.serve.options import OptionError, ServeOptions

_WITH_TIER = re.compile(r"(.*\S)\s+tier=(\S*)")


def read_keys(options: ServeOptions) -> ServerKeys:
    """Called where the HTTP frontend is started. OptionError where a file cannot be read or a key cannot be one."""
    tiers: dict[str, str] = {}
    clients = _read("api", options.api_key, options.api_key_file, [tier.name for tier in options.tiers], tiers)
    return ServerKeys(clients, _read("admin", options.admin_key, options.admin_key_file), tiers)


def tell_open_files(options: ServeOptions) -> None:
    """Says which files of keys every user of the host can read. Once, where the HTTP frontend is started."""
    for flag, file in (("--api-key-file", options.api_key_file), ("--admin-key-file", options.admin_key_file)):
        with contextlib.suppress(OSError):
            if file is not None and os.stat(file).st_mode & stat.S_IROTH:
                print_line(
                    f"eprt: {flag} {file}: every user of this host can read it: `chmod o-r` keeps its keys secret"
                )


def _read(
    kind: str,
    key: str | None,
    file: str | None,
    tiers: list[str] | None = None,
    tier_of_key: dict[str, str] | None = None,
) -> tuple[str, ...]:
    """tiers: names of those that a key may have; None: no key of this kind has one. tier_of_key: is filled."""
    if key is None and file is None:
        variable = env.get(f"EPRT_{kind.upper()}_KEY")
        return () if variable is None else (variable,)
    from_file = ()
    if file is not None:
        flag = f"--{kind}-key-file {file}"
        lines = _read_file(flag, Path(file))
        from_file = (
            tuple(lines)
            if tiers is None
            else _take_tiers(flag, lines, tiers, {} if tier_of_key is None else tier_of_key)
        )
    return (*(() if key is None else (key,)), *from_file)


def _read_file(flag: str, path: Path) -> dict[str, int]:
    """One key a line, with its number; empty lines and lines that begin with # are none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise OptionError(f"{flag}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if not (line.isascii() and line.isprintable()):
            raise OptionError(f"{flag}: line {number}: a key must be printable ASCII")
    keys = {line: number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise OptionError(f"{flag}: has no key; write one a line")
    return keys


def _take_tiers(flag: str, lines: dict[str, int], tiers: list[str], tier_of_key: dict[str, str]) -> tuple[str, ...]:
    """The lines' keys; those that have a tier go into tier_of_key. No line is shown: it has a key."""
    keys = []
    for line, number in lines.items():
        if found := _WITH_TIER.fullmatch(line):
            line, tier = found.groups()
            if tier not in tiers:
                want = f"must be one of {', '.join(tiers)}" if tiers else "there are no tiers; give --tier too"
                raise OptionError(f"{flag}: line {number}: tier={tier}: {want}")
            if tier_of_key.setdefault(line, tier) != tier:
                raise OptionError(f"{flag}: line {number}: this key has another tier in an earlier line; give it one")
        keys.append(line)
    return tuple(dict.fromkeys(keys))
