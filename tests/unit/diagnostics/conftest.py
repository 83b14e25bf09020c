"""Logs of 8 and of 256 ranks, as files and served; a server that speaks as eprt's does."""

from tests.unit.diagnostics.speaker import speaker  # noqa: F401  (fixtures)
from tests.web.conftest import log_8, log_256, server_8  # noqa: F401  (fixtures)
