"""plain: calls without torch's function modes.

torch.set_default_device, which DeepEP's tests use, is such a mode and makes every access to a tensor several
microseconds slower. What is created inside must name its device and dtype.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Call = TypeVar("_Call", bound=Callable[..., Any])


def plain(call: _Call) -> _Call:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_torch_function_mode_enabled():
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return run  # type: ignore[return-value]
