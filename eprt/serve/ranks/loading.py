"""How far loading is: a bar on a terminal, lines in a log, messages for the frontend. Knows nothing of what is read."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from eprt.serve.ranks.channel import FrontendLostError
from eprt.serve.ranks.messages import Loading

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 10.0
_MESSAGE_EVERY_S = 0.5

# (bytes read, bytes to read)
Show = Callable[[int, int], None]


def loading_reason(ranks: Sequence[Loading]) -> str:
    """Why a server does not serve yet, by what its ranks have said last."""
    num_bytes, num_total = sum(r.num_bytes for r in ranks), sum(r.num_total for r in ranks)
    return f"the model is loading: {num_bytes / 1e9:.1f} of {num_total / 1e9:.1f} GB read"


def loading_messages(send: Callable[[Loading], None], show: Show | None = None) -> Show:
    """What a loader calls after each tensor: sends a message twice a second and at the end, and calls `show`."""
    told_s = -_MESSAGE_EVERY_S

    def tell(num_bytes: int, num_total: int) -> None:
        nonlocal told_s
        if show is not None:
            show(num_bytes, num_total)
        now_s = time.monotonic()
        if now_s - told_s >= _MESSAGE_EVERY_S or num_bytes == num_total:
            told_s = now_s
            with contextlib.suppress(FrontendLostError):  # whoever waits for messages notices, and says so
                send(Loading(num_bytes, num_total))

    return tell


@contextlib.contextmanager
def loading_progress() -> Iterator[Show]:
    """What a loader calls after each tensor."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from tqdm import tqdm

    # Not in the first second: an error before that has a line of its own.
    with tqdm(desc="loading", unit="B", unit_scale=True, mininterval=0.3, delay=1) as bar:

        def show(num_bytes: int, num_total: int) -> None:
            bar.total = num_total
            bar.update(num_bytes - bar.n)

        yield show


def _lines() -> Show:
    started_s = told_s = time.monotonic()

    def show(num_bytes: int, num_total: int) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s < _LINE_EVERY_S or not 0 < num_bytes < num_total:
            return
        told_s = now_s
        left_s = (now_s - started_s) * (num_total - num_bytes) / num_bytes
        done = f"{num_bytes / 1e9:.1f} of {num_total / 1e9:.1f} GB"
        _log.info("loading: %s, %d %%, about %.0f s left", done, 100 * num_bytes // num_total, left_s)

    return show
