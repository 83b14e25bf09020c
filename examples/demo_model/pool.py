"""A pool of training blocks that worker processes keep filling while the model trains."""

import itertools
import multiprocessing
import threading
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import dataset

BLOCKS_PER_TASK = 512


class BlockPool:
    """Blocks drawn at random from all that were made so far; at most `capacity` are made."""

    def __init__(self, tokenizer_path: Path, capacity: int, num_workers: int, device: str, seed: int):
        self._blocks = torch.zeros((capacity, dataset.BLOCK_TOKENS), dtype=torch.int32, device=device)
        self._num_blocks = 0
        self._ready = threading.Event()
        self._generator = torch.Generator().manual_seed(seed)
        self._processes = multiprocessing.get_context("spawn").Pool(
            num_workers, _open_tokenizer, (str(tokenizer_path),)
        )
        num_tasks = capacity // BLOCKS_PER_TASK
        seeds = itertools.islice(itertools.count(seed * 1_000_000), num_tasks)
        self._results = self._processes.imap_unordered(_make_blocks, seeds)
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        for blocks in self._results:
            count = len(blocks)
            self._blocks[self._num_blocks : self._num_blocks + count] = torch.from_numpy(blocks.astype(np.int32)).to(
                self._blocks.device
            )
            self._num_blocks += count
            self._ready.set()

    @property
    def num_blocks(self) -> int:
        """How many blocks have been made."""
        return self._num_blocks

    def draw(self, num_rows: int, row_tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids and "trained on" flags, both [num_rows, row_tokens], on the pool's device."""
        if not self._ready.wait(timeout=300):
            raise TimeoutError("no training block after 300 s; are the worker processes alive?")
        num_blocks = num_rows * row_tokens // dataset.BLOCK_TOKENS
        block_idx = torch.randint(self._num_blocks, (num_blocks,), generator=self._generator)
        values = self._blocks[block_idx.to(self._blocks.device)].view(num_rows, row_tokens).long()
        return values & (dataset.TRAINED_BIT - 1), values >= dataset.TRAINED_BIT

    def close(self) -> None:
        """End the worker processes."""
        self._processes.terminate()
        self._processes.join()


_tokenizer: Tokenizer | None = None


def _open_tokenizer(path: str) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_file(path)


def _make_blocks(seed: int) -> np.ndarray:
    assert _tokenizer is not None
    return dataset.make_blocks(_tokenizer, seed, BLOCKS_PER_TASK)
