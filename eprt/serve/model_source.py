"""Where `--model` leads: a directory, or the snapshot of a repository in the cache of Hugging Face's hub.

Nothing is downloaded. Knows nothing of what the files hold.
"""

import os
import re
import stat
from pathlib import Path

from eprt import env
from eprt.serve.errors import shortened

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model_dir(given: str) -> str:
    """The directory. ValueError, with the remedy, where there is none."""
    if os.path.isdir(given) or given == "":
        _check_files(given or ".")
        return given
    if not _REPOSITORY.fullmatch(given):
        raise ValueError(f"--model {shortened(given, 300)}: no such directory")
    snapshot = _snapshot(given)
    if snapshot is None:
        raise ValueError(
            f"--model {given}: no such directory, and the hub's cache ({env.hub_cache()}) has no snapshot of it; "
            f"download it with `hf download {given}`"
        )
    return str(snapshot)


def _check_files(folder: str) -> None:
    """ValueError for a pipe or the like, which whoever reads the model would wait for without end."""
    try:
        files = [file for file in os.scandir(folder) if file.name.endswith((".json", ".safetensors", ".jinja"))]
        modes = {file.path: file.stat().st_mode for file in files if os.path.exists(file.path)}
    except OSError as error:
        raise ValueError(f"--model {folder}: {error.strerror}") from None
    for path, mode in modes.items():
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ValueError(f"--model {folder}: {os.path.basename(path)} is not a regular file")


def default_name(given: str) -> str:
    """What clients call the model where no name is given: the directory's name as it was given, or the repository's."""
    if not os.path.isdir(given) and _REPOSITORY.fullmatch(given):
        return given
    return os.path.basename(os.path.abspath(given)) or "model"


def _snapshot(repository: str) -> Path | None:
    """Of the branch main, else the newest one."""
    folder = env.hub_cache() / f"models--{repository.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        main = snapshots / (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        main = None
    if main is not None and main.is_dir():
        return main
    found = [path for path in snapshots.glob("*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
