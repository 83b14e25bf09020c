"""read_load: reads load files of eprt and of other programs.

Each format is a module with a function from a path to a LoadFile. A new format is a new module and an entry below that
says by which file names it is recognised. The formats know nothing of each other.
"""

import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np

from ..loads import LoadFile
from . import eprt_npz, json_load, sglang, tensorrt_llm

_BY_SUFFIX = {
    ".npz": eprt_npz.read,
    ".pt": sglang.read,
    ".json": json_load.read,
    ".jsonl": json_load.read,
    ".safetensors": tensorrt_llm.read,
}
# What zipfile raises for damaged members, numpy for their heads, and json for what is nested without end.
_DAMAGED = (zlib.error, NotImplementedError, RuntimeError, MemoryError, SyntaxError, tokenize.TokenError)


def read_load(path: str | Path) -> LoadFile:
    """Reads any format that docs/files.md lists, recognised by suffix and content.

    path: a file, or the directory of a dump of several files. OSError if it cannot be opened; ValueError names file,
    field, layer and value if it does not hold a valid load.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    try:
        return _countable(_reader(path)(path))
    except (ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: {error}") from None
    except OverflowError as error:
        raise ValueError(f"{path}: a number beyond all measure: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: lists or objects nested too deep to be a load file") from None
    except _DAMAGED as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"{path}: damaged: {error}") from None  # zipfile followed a damaged offset


def _countable(file: LoadFile) -> LoadFile:
    with np.errstate(over="ignore"):
        if not np.isfinite(file.load_WLE.sum()):
            raise ValueError("the sum of its load is beyond all numbers")
    return file


def _reader(path: Path):
    if path.is_dir():
        if (path / tensorrt_llm.META).exists():
            return tensorrt_llm.read
        if any(path.glob("*.pt")):
            return sglang.read
        known = f"{tensorrt_llm.META} (TensorRT-LLM) nor *.pt (SGLang)"
        raise ValueError(f"the directory holds neither {known}; name the file itself")
    if path.name == tensorrt_llm.META:
        return tensorrt_llm.read
    if path.suffix not in _BY_SUFFIX:
        known = f"{', '.join(_BY_SUFFIX)} or a directory of dumps"
        raise ValueError(f"cannot read {path.suffix or 'files without suffix'}; use {known}")
    return _BY_SUFFIX[path.suffix]
