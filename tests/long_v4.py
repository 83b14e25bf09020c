"""What a chunk at the end of a long context takes, in a process of its own: python -m tests.long_v4 DIRECTORY.

Prints the bytes by which the most that the process ever held grew. The cache before the chunk is made up: what is there
changes no size.
"""

import resource
import sys

import torch

from eprt import EngineConfig, EPGroup
from eprt.models.loader import load_model
from tests.paged_v4 import HybridRunner

NUM_POSITIONS, NUM_ROWS = 65536, 2048


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(directory: str) -> None:
    model = load_model(EngineConfig(directory, chunk_size=NUM_ROWS), EPGroup.single())
    runner = HybridRunner(model, num_pages=NUM_POSITIONS // 256 + 8)
    for layer in runner.layers:
        for pages in (*layer.context.values(), *(ring.slots_PSD for ring in layer.tail.values())):
            pages.normal_()
    tokens = torch.randint(2, 128, (NUM_ROWS,), generator=torch.Generator().manual_seed(0))
    runner.end_of_context(tokens[:64], NUM_POSITIONS)  # what is loaded and allocated once
    before = peak_bytes()
    logits = runner.end_of_context(tokens, NUM_POSITIONS)
    assert logits.isfinite().all()
    print(peak_bytes() - before)


if __name__ == "__main__":
    main(sys.argv[1])
