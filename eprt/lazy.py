"""Objects by name, imported on first use: how an interface finds implementations that import the interface."""

from importlib import import_module
from typing import Any


def load_named(path: str) -> Any:
    """The object that "module:name" names."""
    module, name = path.split(":")
    return getattr(import_module(module), name)
