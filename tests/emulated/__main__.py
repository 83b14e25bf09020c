"""python -m tests.emulated: the kernels of the exchange on the CPU, more than the test suite runs (some minutes).

--races: fewer cases, under ThreadSanitizer, which knows what orders memory on a GPU (order.h); needs libtsan.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from eprt.compat.deep_ep import dispatch_layout
from tests.emulated import cases_meeting
from tests.emulated.cases import calls_low_latency, calls_normal, in_layers, layouts, token_rows
from tests.emulated.device import emulated_ranks
from tests.emulated.kernels import WATCHED
from tests.gpu import (
    cases_deep_ep_low_latency,
    cases_low_latency,
    cases_low_latency_lost_ranks,
    cases_low_latency_signals,
    cases_normal_rows,
    cases_static_bound,
)

VERB_SHAPES = [
    (256, 4, 4, 9, "fp8", False),
    (1008, 3, 2, 10, "same", False),
    (256, 2, 3, 7, "fp8", True),
    (384, 40, 10, 40, "fp8", False),
]
NORMAL_SHAPES = [
    (256, 8, 4, 9, "fp8", False),
    (1008, 9, 3, 70, "same", False),
    (384, 40, 10, 33, "fp8", True),
    (8192, 24, 8, 40, "fp8", False),
    (16, 8, 1, 600, "same", True),
]
FACE_SHAPES = [(512, 4, 4, 9), (1024, 9, 8, 40)]


def run(num_ranks: int, case: Callable[..., None], **kwargs: Any) -> None:
    started = time.monotonic()
    emulated_ranks(num_ranks, case, **kwargs)
    print(f"{num_ranks} ranks, {case.__name__} {kwargs}: {time.monotonic() - started:.1f} s", flush=True)


def races() -> None:
    """In a process that was begun with ThreadSanitizer (begin_watched)."""
    cases_normal_rows.ROWS_NUM_SMS[:] = [None, 1]
    with patch.object(dispatch_layout, "_MOST_BLOCKS", 4):  # it takes 8000 threads at most
        run(2, layouts)
    run(2, calls_low_latency, shape=(256, 2, 3, 7, "fp8", False), num_sms=2)
    run(2, calls_low_latency, shape=(256, 2, 3, 7, "same", True), num_sms=1)
    run(2, cases_low_latency_signals.missing_signal, timeout_s=5.0, shape=(256, 2, 4, 9, "fp8", False))
    run(2, calls_normal, shape=(256, 8, 4, 9, "fp8", False), num_sms=3)
    run(2, token_rows, shape=(1008, 9, 3, 7, "same", False), num_sms=2)


def begin_watched() -> NoReturn:
    """This program again, with ThreadSanitizer from the beginning and, as it wants, memory where it always is. Ends
    with status 66 when it has found a race."""
    find = ["gcc", "-print-file-name=libtsan.so"]
    library = Path(subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip()).resolve()
    options = f"suppressions={Path(__file__).with_name('races.txt')} history_size=2 report_thread_leaks=0 exitcode=66"
    environment = {**os.environ, "LD_PRELOAD": str(library), "TSAN_OPTIONS": options}
    command = ["setarch", platform.machine(), "-R", sys.executable, "-m", "tests.emulated", "--races"]
    os.execvpe(command[0], command, environment)


def main() -> None:
    if "--races" in sys.argv[1:]:
        return races() if WATCHED else begin_watched()
    cases_deep_ep_low_latency.SHAPES[:] = FACE_SHAPES
    cases_normal_rows.ROWS_NUM_SMS[:] = [None, 1, 5]
    for num_ranks in (1, 2, 3, 4, 7, 8):
        for number, shape in enumerate(VERB_SHAPES):
            run(num_ranks, calls_low_latency, shape=shape, num_sms=1 + (number + num_ranks) % 3)
        run(num_ranks, layouts)
        run(num_ranks, cases_meeting.many_meetings, size=num_ranks, num_meetings=300)
        for number, shape in enumerate(NORMAL_SHAPES):
            run(num_ranks, calls_normal, shape=shape, num_sms=1 + 2 * ((number + num_ranks) % 3))
            if not shape[5]:
                run(num_ranks, token_rows, shape=shape, num_sms=1 + (number + num_ranks) % 3)
        run(num_ranks, cases_static_bound.too_many_rows, exact=num_ranks % 2 == 0)
        run(num_ranks, cases_static_bound.too_many_items)
    for num_ranks, ranks_per_node in ((2, 1), (3, 1), (4, 1), (4, 2), (6, 3), (7, 1), (8, 2)):
        for number, shape in enumerate(VERB_SHAPES):
            how = {"shape": shape, "num_sms": 1 + (number + num_ranks) % 3, "ranks_per_node": ranks_per_node}
            run(num_ranks, calls_low_latency, **how)
            run(num_ranks, in_layers, of=calls_low_latency, **how)
    for num_ranks in (2, 3, 4):
        run(num_ranks, cases_deep_ep_low_latency.shapes, seed=num_ranks, cases_per_shape=6)
        run(num_ranks, cases_deep_ep_low_latency.in_flight)
        run(num_ranks, cases_deep_ep_low_latency.scale_formats)
        run(num_ranks, cases_low_latency.two_in_flight)
        run(num_ranks, cases_low_latency_lost_ranks.masked_before)


if __name__ == "__main__":
    main()
