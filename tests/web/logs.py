"""Logs to look at: waits with planted faults, expert rows with a migration, in as many ranks as asked for."""

from pathlib import Path

import numpy as np
from eprt.diagnostics import ExpertRows, WindowRecord, WindowWriter

CALLS = 500
STEP_CALLS = 20  # in each step
SLOTS = 3  # of each rank and layer
LATE_RANK, FIRST_LATE_WINDOW = 5, 2
SLOW_LINK = (2, 6)  # rank 2 waits for rank 6
MIGRATED_WINDOW = 3


def make_window(window: int, num_ranks: int, ranks_per_node: int, *, experts: bool = True) -> list[WindowRecord]:
    """From window 2 on rank 5 computes long and is awaited; link 6 -> 2 is slow from the start. (Where they exist.)"""
    rng = np.random.default_rng(1000 * num_ranks + window)
    node = np.arange(num_ranks) // ranks_per_node
    wait_us_NN = np.where(node[:, None] == node[None, :], 80, 240) * rng.lognormal(0, 0.15, (num_ranks, num_ranks))
    compute_us_N = np.full(num_ranks, 200.0)
    if num_ranks > max(SLOW_LINK):
        wait_us_NN[SLOW_LINK] *= 5
    if window >= FIRST_LATE_WINDOW and num_ranks > LATE_RANK:
        wait_us_NN[:, LATE_RANK] *= 3
        wait_us_NN[LATE_RANK] /= 3
        compute_us_N[LATE_RANK] *= 3
    np.fill_diagonal(wait_us_NN, 0)
    tokens_NN = rng.poisson(16, (num_ranks, num_ranks)) * CALLS
    return [
        WindowRecord(
            window=window,
            t_start=1_760_000_000.0 + 10 * window,
            t_end=1_760_000_010.0 + 10 * window,
            rank=rank,
            num_ranks=num_ranks,
            node_of_rank=node.tolist(),
            num_calls=CALLS,
            dispatch_wait_us=np.round(0.6 * CALLS * wait_us_NN[rank], 1).tolist(),
            combine_wait_us=np.round(0.4 * CALLS * wait_us_NN[rank], 1).tolist(),
            recv_tokens=tokens_NN[rank].tolist(),
            compute_us=CALLS * compute_us_N[rank],
            sent_tokens=tokens_NN[:, rank].tolist(),
            experts=expert_rows(rank, window, num_ranks) if experts else None,
            usage={"steps": CALLS / STEP_CALLS, "step_us": CALLS / STEP_CALLS * step_us(window, num_ranks)},
        )
        for rank in range(num_ranks)
    ]


def step_us(window: int, num_ranks: int) -> float:
    return 16_000.0 if window >= FIRST_LATE_WINDOW and num_ranks > LATE_RANK else 9_000.0


def expert_rows(rank: int, window: int, num_ranks: int) -> ExpertRows:
    """Two layers; expert e of layer 1 gets 10 e tokens. In window 3 the last slot of rank 0 changes its expert."""
    experts = [SLOTS * rank + slot for slot in range(SLOTS)]
    moved = window >= MIGRATED_WINDOW
    first = [*experts[:-1], 2 * num_ranks] if moved and rank == 0 else experts
    return ExpertRows(int(moved), (1, 2), (first, experts), ([10 * e for e in first], [7] * SLOTS))


def write_log(directory: Path, num_ranks: int, num_windows: int, ranks_per_node: int, **options) -> Path:
    writer = WindowWriter(directory)
    for window in range(num_windows):
        for record in make_window(window, num_ranks, ranks_per_node, **options):
            writer.write(record)
    return directory
