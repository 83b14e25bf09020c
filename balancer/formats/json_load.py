"""Load in JSON: one document, or one object per line.

- {"load": [[...]]}: eprt's plain form, [layers][experts] or [windows][layers][experts]; with several lines, each is a
  window.
- {"schema": "eprt.load/1", ...}: a server's answer to GET /v1/eprt/load. The counters start with the server; with
  several lines, the differences are the windows.
- {"logical_count": ...}: the input of SGLang's --init-expert-location, with the same shapes as load.
- {"log_stats": [[...]], "phy2log": ...}: a line of RTP-LLM's gpu_load_*.json.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import is_int
from ..loads import LoadFile

SERVER_SCHEMA = "eprt.load/1"
_MOVING_SUM = "RTP-LLM's log_stats are moving sums: neighbouring windows share most of their tokens"


def read(path: Path) -> LoadFile:
    text = path.read_text()
    try:
        documents = {0: json.loads(text)}
    except json.JSONDecodeError as error:
        documents = _lines(text, error)
    windows, formats = [], set()
    first_layer: int | None = None
    last: dict[str, Any] | None = None
    for line, document in documents.items():
        where = f"line {line}: " if line else ""
        try:
            name, load = _load(document)
            first_layer = _first_layer(document, name)
            if name == "server":
                load, last = _difference(load, document, last), document
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        formats.add(name)
        if load is not None:
            windows.append((where, load))
    if len(formats) > 1:
        raise ValueError(f"lines of different kinds: {', '.join(sorted(formats))}; a file holds one kind")
    return _file(windows, formats.pop(), first_layer)


def _file(windows: list[tuple[str, np.ndarray]], name: str, first_layer: int | None) -> LoadFile:
    notes = (_MOVING_SUM,) if name == "RTP-LLM" else ()
    if not windows:
        raise ValueError("the server's counters did not change: there is no window to plan for")
    if len(windows) == 1:
        return LoadFile(windows[0][1], None, name, notes, first_layer)
    for where, load in windows:
        if load.ndim != 2:
            raise ValueError(f"{where}load has shape {load.shape}; a line holds [layers][experts]")
        if load.shape != windows[0][1].shape:
            raise ValueError(f"{where}load has shape {load.shape}, the first line has {windows[0][1].shape}")
    return LoadFile(np.stack([load for _, load in windows]), None, name, notes, first_layer)


def _lines(text: str, whole: json.JSONDecodeError) -> dict[int, Any]:
    documents: dict[int, Any] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            documents[number] = json.loads(line)
        except json.JSONDecodeError as error:
            if number == 1:  # not one object per line: the error of the whole document says more
                raise ValueError(f"not JSON: {whole}") from None
            cut = " (the file is cut off?)" if number == len(lines) else ""
            raise ValueError(f"line {number}: not JSON: {error}{cut}") from None
    if not documents:
        raise ValueError("not JSON: the file is empty")
    return documents


def _load(document: Any) -> tuple[str, np.ndarray]:
    if not isinstance(document, dict):
        raise ValueError(f"a {type(document).__name__} at the top level; expected an object with a field 'load'")
    if document.get("schema") == SERVER_SCHEMA:
        if not document.get("layers"):
            raise ValueError("the server had not counted any load yet")
        try:
            rows = [layer["per_expert"] for layer in document["layers"]]
        except (KeyError, TypeError):
            raise ValueError("'layers' must be a list of objects with a field 'per_expert'") from None
        return "server", _array(rows, "layers[].per_expert")
    for field, name in (("load", "JSON"), ("logical_count", "SGLang"), ("log_stats", "RTP-LLM")):
        if field in document:
            return name, _array(document[field], field)
    have = ", ".join(map(repr, document)) or "none"
    raise ValueError(f"none of the fields 'load', 'logical_count', 'log_stats' or an eprt.load/1 schema; it has {have}")


def _first_layer(document: dict, name: str) -> int | None:
    """The model's layer of row 0. SGLang and RTP-LLM have a row for every layer of the model."""
    if name == "server":
        layer = document["layers"][0].get("layer")
        if layer is not None and not is_int(layer, 0):
            raise ValueError(f"layers[0].layer = {layer!r}: must be an integer of at least 0")
        return layer
    return 0 if name in ("SGLang", "RTP-LLM") else None


def _array(rows: Any, field: str) -> np.ndarray:
    try:
        return np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        shapes = "[layers][experts] or [windows][layers][experts]"
        raise ValueError(f"{field!r} must be equally long lists of numbers: {shapes}") from None


def _difference(load_LE: np.ndarray, document: dict, last: dict | None) -> np.ndarray | None:
    """Tokens since the previous answer; all tokens in the first answer and after a restart; None if there are none."""
    if last is not None and last.get("server_id") == document.get("server_id"):
        before_LE = _load(last)[1]
        if load_LE.shape != before_LE.shape:
            raise ValueError(f"the counters have shape {load_LE.shape}, in the line before {before_LE.shape}")
        load_LE = load_LE - before_LE
        if (load_LE < 0).any():
            raise ValueError("the counters are smaller than in the line before: the lines are out of order")
    return load_LE if load_LE.any() else None
