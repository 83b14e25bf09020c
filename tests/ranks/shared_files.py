"""Files in shared memory, which are this machine's: of other tests, too."""

from pathlib import Path


def is_of_no_process(path: Path) -> bool:
    """Whether nobody maps it."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text():
                return False
        except OSError:
            continue
    return path.exists()
