"""What the runner (benchmarks/suite) tells its processes: which GPU each sees, which tests need not run again.

Ends the processes that wait for another case. Knows no test.
"""

import json
import os

from tests.gpu import spare_ranks
from tests.gpu.gpus import TOTAL_VARIABLE

DONE_VARIABLE = "GPU_SUITE_DONE"  # a JSON list of names of tests


def gpu_of_worker(worker: str, total: int, visible: str) -> str:
    """What CUDA_VISIBLE_DEVICES should be. worker: xdist's name of it, "gw3". visible: what it was; "" means all."""
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(total)]
    return gpus[int(worker.removeprefix("gw")) % total]


if "PYTEST_XDIST_WORKER" in os.environ and TOTAL_VARIABLE in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of_worker(
        os.environ["PYTEST_XDIST_WORKER"],
        int(os.environ[TOTAL_VARIABLE]),
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )


def pytest_collection_modifyitems(config, items):
    done = set(json.loads(os.environ.get(DONE_VARIABLE, "[]")))
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionfinish():
    spare_ranks.SPARES.stop_all()
