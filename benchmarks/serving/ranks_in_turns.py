"""What benchmarks of CPU ranks share that compute one thing in several ways: the model's shape, and the turns."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.tools.timing import Timing, quantile
from eprt import EPGroup
from eprt.bind import bind

# Seconds by the clock, on rank 0; and of the busiest rank's processor.
BothTimes = tuple[float, float]


def open_group(threads: int | None) -> EPGroup:
    """The ranks of mpirun, each on cores of its own. threads: of each; None: its share of the cores."""
    group = EPGroup.from_mpi()
    bind("core", group.allgather)
    if threads is not None:
        torch.set_num_threads(threads)
    return group


@contextmanager
def shape_with(shape: Path, changes: Mapping[str, Any]) -> Iterator[Path]:
    """A directory with the config.json of the shape, some of its values changed."""
    config = json.loads((shape / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, **changes}))
        yield Path(folder)


def both_times(group: EPGroup, work: Callable[[], object]) -> BothTimes:
    """Of work that all ranks begin together."""
    group.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    work()
    times = group.allgather((time.perf_counter() - start, time.process_time() - cpu_start))
    return times[0][0], max(cpu for _, cpu in times)


def measure_in_turns(ways: Mapping[str, Callable[[], BothTimes]], turns: int, ratios: Mapping[str, str]) -> dict:
    """Columns of a row: times of each way, whose first calls do not count, and ratios over the way "alone".

    ratios: the name of each way's column.
    """
    samples: dict[str, list[BothTimes]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    for turn in range(turns):
        for name in sorted(ways, reverse=turn % 2 == 1):
            samples[name].append(ways[name]())
    columns: dict[str, float] = {}
    for i, suffix in enumerate(("", "_cpu")):
        for name, taken in samples.items():
            columns |= Timing.from_samples([both[i] for both in taken]).columns(name + suffix, "ms")
        for name, column in ratios.items():
            each = sorted(one[i] / alone[i] for one, alone in zip(samples[name], samples["alone"]))
            for at, q in (("", 0.5), ("_p10", 0.1), ("_p90", 0.9)):
                columns[f"{column}{suffix}{at}"] = quantile(each, q)
    return columns
