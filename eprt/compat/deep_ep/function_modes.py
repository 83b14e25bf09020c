"""without_function_modes: a decorator that switches off torch's function modes during a call.

torch.set_default_device, which DeepEP's tests use, is such a mode and makes every access to a tensor several
microseconds slower. Tensors that the call creates must name their device and dtype.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Call = TypeVar("_Call", bound=Callable[..., Any])


def without_function_modes(call: _Call) -> _Call:
    @functools.wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_torch_function_mode_enabled():
            return call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return run  # type: ignore[return-value]
