"""Which GPUs of this host the ranks of a server's instances have: each its own, or as many on one as may share it.

Knows nothing of how GPUs are found (device_check.py), nor of processes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from eprt.serve.options import ServeOptions

_SHARING = "EPRT_RANKS_PER_GPU lets ranks share one, for tests"


def choose_gpus(num_ranks: int, gpus: Sequence[str], taken: Iterable[str], ranks_per_gpu: int) -> tuple[str, ...]:
    """One for each rank of an instance, those with the fewest ranks first. taken: each as often as it has a rank.
    ValueError where there is no room."""
    load = Counter(gpu for gpu in taken if gpu in gpus)
    num_free = len(gpus) * ranks_per_gpu - load.total()
    if num_ranks > num_free:
        each = f", {ranks_per_gpu} ranks on each" if ranks_per_gpu > 1 else ""
        raise ValueError(
            f"an instance of {_count(num_ranks, 'rank')} needs room on as many GPUs: of {_count(len(gpus), 'GPU')}"
            f"{each}, other instances' ranks have {load.total()}, which leaves {max(num_free, 0)}; retire one first"
        )
    chosen: list[str] = []
    for _ in range(num_ranks):
        chosen.append(min(gpus, key=lambda gpu: load[gpu]))  # the first one of equals
        load[chosen[-1]] += 1
    return tuple(chosen)


def why_no_room(options: ServeOptions, num_gpus: int, ranks_per_gpu: int) -> str:
    """Why the instances of the start do not find GPUs, with the arithmetic; "" where they do."""
    wanted, room = options.total_ranks, num_gpus * ranks_per_gpu
    if wanted <= room:
        return ""
    roles = (
        ("prefill", options.num_prefill, options.prefill_ranks),
        ("decode", options.num_decode, options.decode_ranks),
    )
    flags = " ".join(f"--{role} {num} --{role}-ranks {ranks}" for role, num, ranks in roles if num)
    sums = " + ".join(f"{num} x {ranks}" for _, num, ranks in roles if num)
    there = _count(num_gpus, "GPU") + (f", {ranks_per_gpu} on each" if ranks_per_gpu > 1 else "")
    return (
        f"{flags}: {sums} = {_count(wanted, 'rank')} on {there}; each rank needs a GPU: take fewer instances or ranks "
        f"({_SHARING})"
    )


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'s' * (num != 1)}"
