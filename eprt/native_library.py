"""Where the libraries that `make build` makes of csrc/ are. Knows nothing of what is in them."""

from pathlib import Path

import eprt


def find_native_library(name: str) -> Path | None:
    """None where it was not built. An editable install keeps libraries in another root of the package than the
    sources."""
    candidates = (Path(root, "lib", name) for root in eprt.__path__)
    return next(filter(Path.exists, candidates), None)
