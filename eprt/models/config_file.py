"""ConfigFile: a JSON file whose fields are checked as they are taken; errors name the file, the field and the value."""

import json
import math
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

_NO_DEFAULT = object()
_LONGEST = 200  # characters of a value that a message quotes
_MOST = (1 << 31) - 1  # of any integer: 32 bits hold sizes and positions
# To list the tensors of a model with more would take all memory: some hundred times as many as any model has.
_MOST_OF = {"num_hidden_layers": 10_000, "n_routed_experts": 100_000, "num_nextn_predict_layers": 1_000}
_Built = TypeVar("_Built")


class ConfigFile:
    """null counts as absent. where: the file's name in errors, and the section's."""

    def __init__(self, path: Path):
        self.path, self.where = path, str(path)
        try:
            self.fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file; a model directory needs a config.json") from None
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}: not valid JSON: it is nested too deeply") from None
        if not isinstance(self.fields, dict):
            raise ValueError(f"{path}: expected a JSON object, found {type(self.fields).__name__}")

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = _NO_DEFAULT) -> Any:
        value = self.fields.get(name)
        if value is None:
            if default is _NO_DEFAULT:
                raise ValueError(f"{self.where}: field {name!r} is missing")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{self.where}: {name}={shown(value)} has the wrong type ({type(value).__name__})")
        return value

    def section(self, name: str) -> "ConfigFile":
        """The object that field `name` holds, empty where it is absent."""
        inner = copy(self)
        inner.where, inner.fields = f"{self.where}: {name}", self.take(name, dict, {})
        return inner

    def integer(self, name: str, default: Any = _NO_DEFAULT, least: int = 0) -> int:
        value = self.take(name, int, default)
        if isinstance(value, int) and value < least:
            raise ValueError(f"{self.where}: {name}={shown(value)}: must be at least {least}")
        most = _MOST_OF.get(name, _MOST)
        if isinstance(value, int) and value > most:
            raise ValueError(f"{self.where}: {name}={shown(value)}: must be at most {most}")
        return value

    def size(self, name: str, default: Any = _NO_DEFAULT) -> int:
        return self.integer(name, default, least=1)

    def number(self, name: str, default: Any = _NO_DEFAULT) -> float:
        given = self.take(name, (int, float), default)
        try:
            value = float(given)
        except OverflowError:
            raise ValueError(f"{self.where}: {name}={shown(given)}: must be a finite number") from None
        if not math.isfinite(value):  # JSON as Python writes it has NaN and Infinity
            raise ValueError(f"{self.where}: {name}={value}: must be a finite number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self.take(name, bool, default)

    def build(self, kind: Callable[..., _Built], /, **fields: Any) -> _Built:
        """kind(**fields), whose complaints about values get the name of the file."""
        try:
            return kind(**fields)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses any value but these; absent is fine."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise ValueError(
                f"{self.where}: {name}={shown(value)} is not supported, only {', '.join(map(repr, allowed))}"
            )


def shown(value: Any) -> str:
    """The value in a message: on one line, and not without end."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
