"""Served logs of 8 and of 256 ranks, and a headless Chromium where the machine has one."""

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eprt.diagnostics.page.log_source import LogSource
from eprt.diagnostics.page.page import Page
from eprt.diagnostics.page.recording import Recording
from eprt.diagnostics.page.server import PageServer

from tests.web import chromium
from tests.web.logs import write_log


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 100.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def served(source: Recording, **options) -> Iterator[PageServer]:
    server = PageServer(Page(source), port=0, **options)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.05))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        source.close()


def open_log(directory: Path) -> LogSource:
    """Read and analysed to the end."""
    source = LogSource(directory)
    wait_until(lambda: source.overview()["findings"], "findings")
    return source


def of_yesterday(directory: Path) -> Path:
    """As if nobody had written to it for a day: such a log is not live."""
    then_s = time.time() - 86400
    for path in directory.iterdir():
        os.utime(path, (then_s, then_s))
    return directory


@pytest.fixture(scope="session")
def log_8(tmp_path_factory) -> Path:
    return of_yesterday(write_log(tmp_path_factory.mktemp("log8"), 8, 6, ranks_per_node=4))


@pytest.fixture(scope="session")
def log_256(tmp_path_factory) -> Path:
    return of_yesterday(write_log(tmp_path_factory.mktemp("log256"), 256, 3, ranks_per_node=8))


@pytest.fixture(scope="session")
def server_8(log_8) -> Iterator[PageServer]:
    with served(open_log(log_8)) as server:
        yield server


@pytest.fixture(scope="session")
def server_256(log_256) -> Iterator[PageServer]:
    with served(open_log(log_256)) as server:
        yield server


# Not for the session: while it is open an event loop runs in this thread, and other tests want their own.
@pytest.fixture(scope="module")
def browser():
    found = chromium.find()
    if found is None:
        pytest.skip(chromium.why_none())
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with pytest.MonkeyPatch.context() as patch:
        if len(tempfile.gettempdir()) > 40:  # Chromium puts a socket there, whose path may have 107 bytes
            patch.setenv("TMPDIR", "/tmp")
        with playwright.sync_playwright() as play:
            launched = play.chromium.launch(
                executable_path=found.path, args=found.arguments, env={**os.environ, **found.env}
            )
            yield launched
            launched.close()


@pytest.fixture
def open_page(browser):
    """open_page(url, dark=True, width=1440, height=900) -> a page whose findings are there. At the end of the test no
    page may have complained on its console."""
    contexts, complaints = [], []

    def open_one(url: str, *, dark: bool = True, width: int = 1440, height: int = 900):
        scheme = "dark" if dark else "light"
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(100_000)
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#verdict:not(:empty)")
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert complaints == []
