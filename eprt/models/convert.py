"""eprt convert: a checkpoint laid out for N ranks, so that each reads few files from front to end.

eprt convert path/to/DeepSeek-V3 path/to/DeepSeek-V3-8 --num-ranks 8

The result is a Hugging Face directory like the source, every tensor bit for bit: only which file holds which tensor
changes. dense-*.safetensors has what every rank reads, rank-R-*.safetensors the experts that rank R of N starts with,
in the order of reading. It serves any other number of ranks too, only with more files per rank.
"""

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eprt.ep.placement.slot_map import SlotMap
from eprt.models.checkpoint import INDEX_NAME, Checkpoint
from eprt.models.config_file import ConfigFile
from eprt.models.tensor_family import expert_number

TEMPLATE_DIRS = ("additional_chat_templates", "encoding")  # where serve/openai looks for templates and encodings
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class Converted:
    num_files: int
    num_bytes: int
    seconds: float
    not_copied: tuple[str, ...]  # directories of the source that a checkpoint does not need


def convert(
    source: str | Path,
    target: str | Path,
    num_ranks: int,
    *,
    max_file_bytes: int = 2 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Writes target, which must not exist yet; it appears when it is complete, and nothing of it stays when it cannot
    be. Memory: max_file_bytes, or one tensor.

    ValueError for a source that is no checkpoint, a target that exists, too many ranks or too little room on the disk.
    """
    source, target = Path(source), Path(target)
    started_s = time.monotonic()
    if target.exists() or target.is_symlink():
        what = "exists" if target.exists() else "is a symbolic link to nothing"
        raise ValueError(f"{target} {what}; name a directory that does not exist, or remove it")
    checkpoint = Checkpoint(source)
    num_bytes = sum(info.num_bytes for info in checkpoint.tensors.values())
    files = list(_files(checkpoint, _rank_of_expert(source, num_ranks), max_file_bytes))
    partial = target.with_name(target.name + ".partial")
    _make_room(partial, num_bytes)
    try:
        checkpoint.read_ahead(name for _, names in files for name in names)
        for file_name, names in files:
            _write(partial / file_name, {name: checkpoint.read(name) for name in names})
            if progress is not None:
                progress(checkpoint.num_bytes_read, num_bytes)
        _write_index(partial, files, num_bytes)
        not_copied = _copy_the_rest(source, partial)
        partial.rename(target)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        checkpoint.close()
    return Converted(len(files), num_bytes, time.monotonic() - started_s, not_copied)


def _rank_of_expert(source: Path, num_ranks: int) -> dict[int, int]:
    """Where the runtime puts each expert at the start, for the checkpoint's number of experts."""
    config = ConfigFile(source / "config.json")
    num_experts = config.integer("n_routed_experts", 0) or config.integer("num_experts", 0)
    if num_experts == 0:
        raise ValueError(f"{config.path} has no n_routed_experts: a model without experts needs no conversion")
    if not 1 <= num_ranks <= num_experts:
        raise ValueError(f"--num-ranks {num_ranks}: must be in 1..{num_experts}, the number of experts")
    slots = SlotMap.contiguous(num_experts, num_ranks)
    experts = [slots.experts_of_rank(rank, num_ranks) for rank in range(num_ranks)]
    return {expert: rank for rank, mine in enumerate(experts) for expert in mine if expert >= 0}


def _files(checkpoint: Checkpoint, rank_of_expert: dict[int, int], max_bytes: int) -> Iterator[tuple[str, list[str]]]:
    """File name -> its tensors, in the order of reading: dense ones first, then rank by rank."""
    by_shard: dict[int, list[str]] = {-1: []}
    for name in sorted(checkpoint.tensors, key=_reading_order):
        expert = expert_number(name)
        if expert is not None and expert not in rank_of_expert:
            raise ValueError(f"tensor {name}: config.json says there are {len(rank_of_expert)} experts")
        by_shard.setdefault(-1 if expert is None else rank_of_expert[expert], []).append(name)
    for shard in sorted(by_shard):
        stem = "dense" if shard < 0 else f"rank-{shard:03d}"
        parts: list[list[str]] = [[]]
        size = 0
        for name in by_shard[shard]:
            num_bytes = checkpoint.tensors[name].num_bytes
            if parts[-1] and size + num_bytes > max_bytes:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += num_bytes
        yield from ((f"{stem}-{i:05d}.safetensors", part) for i, part in enumerate(parts) if part)


def _reading_order(name: str) -> tuple[int, int, str]:
    layer, expert = _LAYER.match(name), expert_number(name)
    return (int(layer[1]) if layer else -1, -1 if expert is None else expert, name)


def _make_room(partial: Path, num_bytes: int) -> None:
    if partial.exists():  # of a conversion that was killed
        shutil.rmtree(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(partial.parent).free
    if num_bytes > free:
        raise ValueError(
            f"{partial.parent} has {free / 1e9:.1f} GB free; the checkpoint needs {num_bytes / 1e9:.1f} GB"
        )
    partial.mkdir()


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk too, and no OSError
        raise OSError(f"{path}: cannot be written: {error}") from None


def _write_index(directory: Path, files: list[tuple[str, list[str]]], num_bytes: int) -> None:
    weight_map = {name: file_name for file_name, names in files for name in names}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _copy_the_rest(source: Path, target: Path) -> tuple[str, ...]:
    not_copied = []
    for path in sorted(source.iterdir()):
        if path.name in TEMPLATE_DIRS and path.is_dir():
            shutil.copytree(path, target / path.name)
        elif path.is_dir():
            not_copied.append(path.name)
        elif path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copy2(path, target / path.name)
    return tuple(not_copied)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="SOURCE", help="Hugging Face checkpoint directory")
    parser.add_argument("target", metavar="TARGET", help="directory to write; must not exist")
    parser.add_argument("--num-ranks", type=int, required=True, metavar="N", help="ranks that will serve it")
    parser.add_argument(
        "--max-file-gb", type=float, default=2.0, metavar="GB", help="split files at this size, default %(default)g"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 when the arguments or the checkpoint cannot be used."""
    arguments = build_parser().parse_args(argv)
    try:
        if not 0 < arguments.max_file_gb < math.inf:
            raise ValueError(f"--max-file-gb {arguments.max_file_gb}: must be a number above 0")
        result = convert(
            arguments.source,
            arguments.target,
            arguments.num_ranks,
            max_file_bytes=int(arguments.max_file_gb * 1e9),
            progress=_show if sys.stderr.isatty() else None,
        )
    except (ValueError, OSError) as error:
        print(f"eprt convert: {error}", file=sys.stderr)
        return 2
    left = f"; not copied: {', '.join(result.not_copied)}" if result.not_copied else ""
    print(
        f"{arguments.target}: {result.num_files} files, {result.num_bytes / 1e9:.2f} GB in {result.seconds:.1f} s "
        f"({result.num_bytes / 1e9 / result.seconds:.2f} GB/s){left}"
    )
    return 0


def _show(done: int, total: int) -> None:
    print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end="\n" if done == total else "", file=sys.stderr, flush=True)
