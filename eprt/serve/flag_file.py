"""`--config FILE`: flags of `eprt serve` from a YAML or TOML file. A flag on the command line wins over the file.

    model: /models/DeepSeek-V2-Lite
    ranks: 8
    allowed-origins: [https://chat.example.org]
    rebalance: auto

Knows the parser that it fills, and nothing of what a flag means.
"""

import argparse
import tomllib
from pathlib import Path
from typing import Any


def with_flags_of_file(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """argv with the flags of the file that its --config names put before it. ValueError naming the file and the key."""
    path = _given_file(argv)
    if path is None:
        return argv
    by_flag = {flag: action for action in parser._actions for flag in action.option_strings}
    given = {action.dest for word in argv if (action := by_flag.get(word.partition("=")[0])) is not None}
    words: list[str] = []
    read: set[str] = set()
    for key, value in _read(path).items():
        flag = "--" + str(key).replace("_", "-").lstrip("-")
        action = by_flag.get(flag)
        if action is None or action.dest in ("config", "help"):
            raise ValueError(f"--config {path}: {key}: there is no flag {flag} for a file; --help lists the flags")
        said = {flag} if value is False else {flag, action.dest}  # `no-graphs: false` leaves room for graph-sizes
        if said & read:
            raise ValueError(f"--config {path}: {key}: the file says this twice; say it once")
        read |= said
        if action.dest not in given:
            words += _words(f"--config {path}: {key}", flag, action, value)
    return [*words, *argv]


def _given_file(argv: list[str]) -> str | None:
    """The last one, as argparse would take it."""
    found = None
    for i, word in enumerate(argv):
        if word == "--config" and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith("--config="):
            found = word.partition("=")[2]
    return found


def _read(path: str) -> dict[str, Any]:
    suffix = Path(path).suffix.lower()
    if suffix not in (".yaml", ".yml", ".toml"):
        raise ValueError(f"--config {path}: must end in .yaml, .yml or .toml")
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = tomllib.loads(text) if suffix == ".toml" else _parse_yaml(text)
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"--config {path}: is not {suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"--config {path}: is nested too deeply") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: must hold names of flags with their values, as `ranks: 4`")
    return content


def _parse_yaml(text: str) -> Any:
    """ValueError also for a key that stands twice: YAML forbids it, and the parser would drop the first in silence."""
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        keys = [str(key.value) for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    if twice := next((key for i, key in enumerate(keys) if key in keys[:i]), None):
        raise ValueError(f"{twice} stands twice; say it once")
    return content


def _words(where: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    """The flag as it would stand on the command line."""
    if action.nargs == 0:
        return _switch(where, flag, action, value)
    if value is None:
        raise ValueError(f"{where}: has no value; give it one or leave it out")
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, (dict, list, bool)) or each is None for each in values):
        raise ValueError(f"{where}: {value!r}: must be a text or a number")
    texts = [str(each) for each in values]
    if isinstance(action, argparse._AppendAction):
        return [f"{flag}={text}" for text in texts]
    if action.nargs is not None:
        return [flag, *texts]
    if len(texts) != 1:
        raise ValueError(f"{where}: takes one value, not {len(texts)}")
    return [f"{flag}={texts[0]}"]


def _switch(where: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {value!r}: must be true or false")
    if value:
        return [flag]
    opposite = next((each for each in action.option_strings if each == f"--no-{flag[2:]}"), None)
    return [] if opposite is None else [opposite]
