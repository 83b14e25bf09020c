"""Reading ahead by several threads: every tensor's own bytes, whatever the order, the sizes and the window."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from eprt.models import parallel_reader
from eprt.models.checkpoint import Checkpoint, CheckpointError
from eprt.models.parallel_reader import ParallelReader, byte_ranges
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three files of tensors of all sizes, and what they hold as bytes."""
    folder, generator = tmp_path_factory.mktemp("tensors"), torch.Generator().manual_seed(1)
    paths, stored = [], {}
    for i in range(3):
        sizes = [0, 1, 7, 63, 64, 65, 1000, *torch.randint(1, 300, (40,), generator=generator).tolist()]
        tensors = {
            f"{i}.{j}": torch.randint(256, (size,), generator=generator).to(random.Random(j).choice(DTYPES))
            for j, size in enumerate(sizes)
        }
        paths.append(folder / f"{i}.safetensors")
        save_file(tensors, paths[-1])
        stored.update(load_file(paths[-1]))
    where = {name: place for path in paths for name, place in byte_ranges(path).items()}
    return where, {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in stored.items()}


DTYPES = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)


@pytest.mark.parametrize("extent_bytes, sorted_bytes, window_bytes", [(32 << 20, 1 << 28, 1 << 28), (64, 500, 200)])
@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("take", ["in order", "out of order"])
def test_every_tensor_has_its_bytes(files, monkeypatch, extent_bytes, sorted_bytes, window_bytes, num_threads, take):
    monkeypatch.setattr(parallel_reader, "_EXTENT_BYTES", extent_bytes)
    monkeypatch.setattr(parallel_reader, "_SORTED_BYTES", sorted_bytes)
    monkeypatch.setattr(parallel_reader, "_MOST_PARTS", 3)
    where, want = files
    names = list(want)
    random.Random(4).shuffle(names)
    reader = ParallelReader(where, names, CPU, num_threads=num_threads, window_bytes=window_bytes)
    if take == "out of order":
        random.Random(5).shuffle(names)
    for name in names:
        assert name in reader
        assert torch.equal(reader.take(name), want[name]), name
        assert name not in reader
    reader.close()


def test_a_reader_that_is_not_emptied_can_be_closed(files):
    where, want = files
    reader = ParallelReader(where, want, CPU, num_threads=2, window_bytes=1)
    reader.take(next(iter(want)))
    reader.close()


def test_a_file_that_shrinks_is_named(tmp_path):
    tiny.save(tiny.make_variant("v3"), tmp_path)
    checkpoint = Checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    checkpoint.read_ahead(checkpoint.tensors)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot read tensor .*: the file ends at byte"):
        for name in checkpoint.tensors:
            checkpoint.read(name)
    checkpoint.close()
