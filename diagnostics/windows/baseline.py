"""Baseline: what was usual in a run, to compare a later run with. Knows files, and judges nothing.

Baseline.from_matrices(report.matrices).save("usual.npz")
baseline = Baseline.load("usual.npz")
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from .matrices import WindowMatrices
from .medians import median

SCHEMA = "eprt.baseline/1"
MOST_WINDOWS = 8  # kept: each the median of several, so that the file has both what is usual and how it varies


@dataclass(frozen=True, eq=False)
class Baseline:
    """B windows of N ranks, per call; NaN where nothing is known."""

    node_of_rank_N: np.ndarray
    dispatch_us_WNN: np.ndarray
    combine_us_WNN: np.ndarray
    recv_tokens_WN: np.ndarray  # of each rank, from all
    compute_us_WN: np.ndarray

    @staticmethod
    def from_matrices(matrices: WindowMatrices) -> "Baseline":
        """Medians of at most MOST_WINDOWS parts of the run, one after the other."""
        parts = np.array_split(np.arange(len(matrices.window_W)), min(MOST_WINDOWS, len(matrices.window_W)))

        def medians(values: np.ndarray) -> np.ndarray:
            return np.stack([median(values[part], 0) for part in parts]).astype(np.float32)

        return Baseline(
            matrices.node_of_rank_N,
            medians(matrices.dispatch_us_WNN),
            medians(matrices.combine_us_WNN),
            medians(matrices.recv_tokens_WNN.sum(axis=2)),
            medians(matrices.compute_us_WN),
        )

    @property
    def wait_us_WNN(self) -> np.ndarray:
        return self.dispatch_us_WNN + self.combine_us_WNN

    def save(self, path: str | Path) -> None:
        """OSError from the disk."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, schema=np.array(SCHEMA), **arrays)

    @staticmethod
    def load(path: str | Path) -> "Baseline":
        """OSError where it cannot be read; ValueError where it is no baseline."""
        try:
            with np.load(path, allow_pickle=False) as data:
                if "schema" not in data or str(data["schema"]) != SCHEMA:
                    raise ValueError(f"{path} is not a baseline (eprt diagnose DIR --save-baseline FILE writes one)")
                arrays = {field.name: data[field.name] for field in fields(Baseline)}
                _check_arrays(arrays)
        except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            if "is not a baseline" in str(error):
                raise
            raise ValueError(
                f"{path} is not a baseline (eprt diagnose DIR --save-baseline FILE writes one): {error}"
            ) from None
        return Baseline(**arrays)

    def check_fits(self, node_of_rank: Sequence[int]) -> None:
        """ValueError for a job of other ranks or nodes."""
        if len(self.node_of_rank_N) != len(node_of_rank):
            raise ValueError(f"the baseline is of {len(self.node_of_rank_N)} ranks, the log of {len(node_of_rank)}")
        if (different := self.node_of_rank_N != np.asarray(node_of_rank)).any():
            rank = int(np.flatnonzero(different)[0])
            before, now = self.node_of_rank_N[rank], node_of_rank[rank]
            raise ValueError(f"rank {rank} is on node {now} in the log, and on node {before} in the baseline")


def _check_arrays(arrays: dict[str, np.ndarray]) -> None:
    """ValueError where they are not of the same ranks and windows, or hold nothing to compare with."""
    windows, num_ranks = len(arrays["dispatch_us_WNN"]), arrays["node_of_rank_N"].size
    for name, values in arrays.items():
        shape = {"_N": (num_ranks,), "_WN": (windows, num_ranks), "_WNN": (windows, num_ranks, num_ranks)}
        expected = shape[name[name.rindex("_") :]]
        if values.shape != expected or not np.issubdtype(values.dtype, np.number):
            raise ValueError(f"{name} is {values.dtype}{list(values.shape)}, expected numbers{list(expected)}")
        if (values < 0).any():
            raise ValueError(f"{name} has values below 0")
    if not np.isfinite(arrays["dispatch_us_WNN"] + arrays["combine_us_WNN"]).any():
        raise ValueError("it has no wait of any rank")
