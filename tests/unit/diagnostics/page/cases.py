"""Sources of the page that the tests share."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from eprt.diagnostics.page.log_source import LogSource

from tests.web.conftest import wait_until


@contextlib.contextmanager
def opened(directory: Path, **options) -> Iterator[LogSource]:
    """Read and analysed to the end."""
    with contextlib.closing(LogSource(directory, **options)) as source:
        wait_until(lambda: source.overview()["findings"], "findings")
        yield source
