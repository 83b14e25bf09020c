"""What ranks do in test_launch.py."""

import os


def greet(group, word: str) -> None:
    print(f"{word} from {group.rank} of {group.size}: {group.allgather(group.rank * 10)}", flush=True)


def fail_on(group, rank: int) -> None:
    if group.rank == rank:
        raise ValueError(f"rank {rank} cannot")


def die_on(group, rank: int) -> None:
    if group.rank == rank:
        print(f"rank {rank} dies", flush=True)
        os._exit(3)
