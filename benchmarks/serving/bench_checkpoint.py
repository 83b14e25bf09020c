"""Reading a checkpoint: one rank's tensors, from disk or the page cache to its device, in GB/s.

    python -m benchmarks.serving.bench_checkpoint --gb 8 --device cuda

safetensors   safe_open and get_tensor straight to the device, tensor by tensor, as most loaders do
eprt          Checkpoint.read_ahead and read (models/parallel_reader.py): threads ahead, pinned memory, a copy stream
published     files as published: all experts of a layer side by side
converted     files as `eprt convert --num-ranks N` writes them
warm          the files are in the page cache, so that the disk plays no part
cold          their pages are dropped from the cache before each reading, after they were written to disk, which may
              take long (a virtual disk's host may still hold them)

Writes a narrower fp8 checkpoint of DeepSeek-V3's kind first. The loaders take turns in one run; stderr tells the
progress.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.shapes import DEEPSEEK_V3
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt import EngineConfig
from eprt.ep.placement.slot_map import SlotMap
from eprt.models.checkpoint import INDEX_NAME, Checkpoint
from eprt.models.convert import convert
from eprt.models.deepseek_tensors import expected_tensors
from eprt.models.dummy import DummyCheckpoint
from eprt.models.hf_config import read_model_config

NUM_RANKS = 0

NARROWER = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32768,
    "q_lora_rank": 512,
    "num_nextn_predict_layers": 0,
}
LAYER_GB = 0.42  # of a MoE layer
SHARD_BYTES = 1 << 30


def write_checkpoint(folder: Path, gb: float, device: torch.device) -> None:
    """As published: tensors layer by layer in files of a gigabyte."""
    folder.mkdir()
    config = {
        **json.loads((DEEPSEEK_V3 / "config.json").read_text()),
        **NARROWER,
        "num_hidden_layers": 3 + max(1, round(gb / LAYER_GB)),
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = read_model_config(EngineConfig(str(folder)))
    dummy = DummyCheckpoint(folder, model, expected_tensors(model), device)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name in dummy.tensors:
        shard[name] = dummy.read(name).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES or name == list(dummy.tensors)[-1]:
            file = f"model-{len(set(weight_map.values())):05d}.safetensors"
            save_file(shard, folder / file)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def names_of_rank(folder: Path, num_ranks: int) -> list[str]:
    """What rank 0 of so many reads, in the loader's order."""
    model = read_model_config(EngineConfig(str(folder)))
    assert model.moe is not None
    local = set(SlotMap.contiguous(model.moe.num_experts, num_ranks).experts_of_rank(0, num_ranks))
    checkpoint, names = Checkpoint(folder), []
    for name in expected_tensors(model):
        expert = name.partition(".mlp.experts.")[2].partition(".")[0]
        if not expert or int(expert) in local:
            names += [name, *([f"{name}_scale_inv"] if f"{name}_scale_inv" in checkpoint.tensors else [])]
    checkpoint.close()
    return names


def with_safetensors(folder: Path, names: list[str], device: torch.device) -> int:
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    where = "cuda:0" if device.type == "cuda" else "cpu"
    files = {file: safe_open(folder / file, framework="pt", device=where) for file in set(weight_map.values())}
    num_bytes = 0
    for name in names:
        tensor = files[weight_map[name]].get_tensor(name)
        if device.type == "cpu":
            tensor = tensor.clone()  # else nothing has been read
        num_bytes += tensor.nbytes
    return num_bytes


def with_eprt(folder: Path, names: list[str], device: torch.device) -> int:
    checkpoint = Checkpoint(folder, device=device)
    checkpoint.read_ahead(names)
    num_bytes = sum(checkpoint.read(name).nbytes for name in names)
    checkpoint.close()
    return num_bytes


def drop_from_cache(folder: Path) -> bool:
    """Whether nothing of the files is left there, as far as samples tell; a file system in memory keeps everything."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(handle).st_size
            if any(_is_cached(handle, size * i // 16) for i in range(16)):
                return False
        finally:
            os.close(handle)
    return True


def _is_cached(handle: int, offset: int) -> bool:
    try:
        return os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot tell has no disk to wait for
        return True


class Progress:
    """Prints on stderr what has been done, and when, so that a slow disk shows."""

    def __init__(self):
        self._start = time.perf_counter()

    def __call__(self, what: str) -> None:
        print(f"{time.perf_counter() - self._start:6.1f} s  {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class TwoLayouts:
    """The same tensors in two layouts, and which of them one rank reads."""

    folders: dict[str, Path]  # layout -> checkpoint
    names: list[str]  # tensors that one rank reads, in the loader's order
    num_bytes: int  # of the checkpoint
    converted_s: float  # what the conversion took

    @staticmethod
    def write(folder: Path, gb: float, num_ranks: int, device: torch.device, say: Progress) -> "TwoLayouts":
        folders = {layout: folder / layout for layout in ("published", "converted")}
        write_checkpoint(folders["published"], gb, device)
        names = names_of_rank(folders["published"], num_ranks)
        say(f"published form written ({folder})")
        converted = convert(folders["published"], folders["converted"], num_ranks)
        say(f"converted: {converted.num_bytes / 1e9:.2f} GB in {converted.seconds:.1f} s")
        return TwoLayouts(folders, names, converted.num_bytes, converted.seconds)


def measure(
    subject: TwoLayouts, cache: str, samples: int, device: torch.device, report: BenchmarkReport, say: Progress
) -> None:
    """The loaders by turns, from a cache that is left alone or dropped before each."""
    turns = [(layout, by) for layout in subject.folders for by in LOADERS]
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    num_bytes, warm_up = 0, cache == "warm"  # of the cache, and of pinned memory
    for sample in range(samples + warm_up):
        for layout, by in turns:
            if cache == "cold" and not drop_from_cache(subject.folders[layout]):
                say(f"{subject.folders[layout]} stays in memory: nothing cold can be measured")
                return
            start = time.perf_counter()
            num_bytes = LOADERS[by](subject.folders[layout], subject.names, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            say(f"{cache} {layout} {by}: {num_bytes / 1e9 / seconds:.2f} GB/s")
            if sample or not warm_up:
                times[layout, by].append(seconds)
    first_s = Timing.from_samples(times[turns[0]]).median_s
    for layout, by in turns:
        timing = Timing.from_samples(times[layout, by])
        report.add_row(
            cache=cache,
            layout=layout,
            by=by,
            gb=num_bytes / 1e9,
            **timing.columns("time", "ms"),
            GBps=num_bytes / 1e9 / timing.median_s,
            times_faster=first_s / timing.median_s,
        )


LOADERS: dict[str, Callable[[Path, list[str], torch.device], int]] = {
    "safetensors": with_safetensors,
    "eprt": with_eprt,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5, help="written twice: as published and converted")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2, help="rank 0 of so many reads")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--cache", nargs="+", default=["warm"], choices=("warm", "cold"))
    parser.add_argument("--folder", help="where to write the checkpoint; default: the system's temporary folder")
    args = parser.parse_args()
    device, say = torch.device(args.device), Progress()
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        subject = TwoLayouts.write(Path(temporary), args.gb, args.ranks, device, say)
        report = BenchmarkReport(
            f"load_{args.device}",
            {
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                "checkpoint_gb": round(subject.num_bytes / 1e9, 2),
                "ranks": args.ranks,
                "threads": len(os.sched_getaffinity(0)),
                "convert_GBps": round(subject.num_bytes / 1e9 / subject.converted_s, 2),
            },
        )
        for cache in args.cache:
            measure(subject, cache, args.samples, device, report, say)
        report.finish()


if __name__ == "__main__":
    main()
