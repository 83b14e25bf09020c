"""Reading a checkpoint: one rank's tensors, from disk or the page cache to where it computes, in GB/s.

    python -m benchmarks.bench_load --gb 8 --device cuda

safetensors   safe_open and get_tensor straight to the device, tensor by tensor: what most loaders do
eprt          Checkpoint.read_ahead and read (models/parallel_reader.py): threads ahead, pinned memory, a copy stream
published     files as they are published: all experts of a layer side by side
converted     files as `eprt convert --num-ranks N` writes them
cold          the files' pages are dropped from the page cache before (a virtual disk's host may still hold them)

An fp8 checkpoint of DeepSeek-V3's kind, narrower, is written first. The competitors take turns in one run.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.report import Report, Timing
from benchmarks.shapes import DEEPSEEK_V3
from eprt import EngineConfig
from eprt.ep.placement import SlotMap
from eprt.models.checkpoint import INDEX_NAME, Checkpoint
from eprt.models.convert import convert
from eprt.models.deepseek_tensors import expected_tensors
from eprt.models.dummy import DummyCheckpoint
from eprt.models.hf_config import read_model_config

NUM_RANKS = 0

NARROWER = {
    "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 1024, "n_routed_experts": 64,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32768, "q_lora_rank": 512,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
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


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2, help="rank 0 of so many reads")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--folder", help="where to write the checkpoint; default: the system's temporary folder")
    args = parser.parse_args()
    device = torch.device(args.device)
    loaders: dict[str, Callable[[Path, list[str], torch.device], int]] = {
        "safetensors": with_safetensors, "eprt": with_eprt,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        layouts = {"published": Path(temporary) / "published", "converted": Path(temporary) / "converted"}
        write_checkpoint(layouts["published"], args.gb, device)
        converted = convert(layouts["published"], layouts["converted"], args.ranks)
        names = names_of_rank(layouts["published"], args.ranks)
        report = Report(f"load_{args.device}", {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "checkpoint_gb": round(converted.num_bytes / 1e9, 2), "ranks": args.ranks,
            "threads": len(os.sched_getaffinity(0)),
            "convert_GBps": round(converted.num_bytes / 1e9 / converted.seconds, 2),
        })  # fmt: skip
        for cache in ("warm", "cold"):
            times: dict[tuple[str, str], list[float]] = {(layout, by): [] for layout in layouts for by in loaders}
            num_bytes = 0
            for sample in range(args.samples + 1):
                for (layout, by), seconds in times.items():
                    if cache == "cold":
                        drop_from_cache(layouts[layout])
                    start = time.perf_counter()
                    num_bytes = loaders[by](layouts[layout], names, device)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    if sample:  # the first warms the cache up, and pinned memory
                        seconds.append(time.perf_counter() - start)
            first_s = Timing.of(times["published", "safetensors"]).median_s
            for (layout, by), seconds in times.items():
                timing = Timing.of(seconds)
                report.row(
                    cache=cache, layout=layout, by=by, gb=num_bytes / 1e9, **timing.columns("time", "ms"),
                    GBps=num_bytes / 1e9 / timing.median_s, times_faster=first_s / timing.median_s,
                )  # fmt: skip
    report.finish()


if __name__ == "__main__":
    main()
