"""Readers of load files, ours and other programs'. Each is a function from a path to a LoadFile.

To add one: write it in a file of its own, and say below by which names or fields it is known.
"""

import zipfile
import zlib
from pathlib import Path

from ..loads import LoadFile
from . import eprt_npz, json_load, sglang, tensorrt_llm

_BY_SUFFIX = {
    ".npz": eprt_npz.read,
    ".pt": sglang.read,
    ".json": json_load.read,
    ".jsonl": json_load.read,
    ".safetensors": tensorrt_llm.read,
}


def read_load(path: str | Path) -> LoadFile:
    """Any of the formats that docs/files.md lists, by suffix and content; a directory for dumps of several files.

    OSError when it cannot be opened, ValueError naming file, field, layer and value when it holds no valid load.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    try:
        return _reader(path)(path)
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None
    except (zlib.error, NotImplementedError, RuntimeError) as error:  # what zipfile says of damaged members
        raise ValueError(f"{path}: damaged: {error}") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"{path}: damaged: {error}") from None  # zipfile sought where a false offset led


def _reader(path: Path):
    if path.is_dir():
        if (path / tensorrt_llm.META).exists():
            return tensorrt_llm.read
        if any(path.glob("*.pt")):
            return sglang.read
        raise ValueError(
            f"the directory holds neither {tensorrt_llm.META} (TensorRT-LLM) nor *.pt (SGLang); name the file itself"
        )
    if path.name == tensorrt_llm.META:
        return tensorrt_llm.read
    if path.suffix not in _BY_SUFFIX:
        raise ValueError(
            f"cannot read {path.suffix or 'files without suffix'}; give {', '.join(_BY_SUFFIX)} or a directory of dumps"
        )
    return _BY_SUFFIX[path.suffix]
