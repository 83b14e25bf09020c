"""Which model types of config.json can be served, and who builds them."""

from collections.abc import Callable
from importlib import import_module

# model_type -> "module:function"; the function has the signature of loader.load_deepseek.
_BUILDERS = {
    "deepseek_v2": "eprt.models.loader:load_deepseek",
    "deepseek_v3": "eprt.models.loader:load_deepseek",
}


def builder_of(model_type: str, where: str) -> Callable:
    """ValueError naming the type and what is supported; where: the file it was read from."""
    if model_type not in _BUILDERS:
        raise ValueError(f"{where}: model_type={model_type!r} is not supported; supported: {', '.join(_BUILDERS)}")
    module, function = _BUILDERS[model_type].split(":")
    return getattr(import_module(module), function)
