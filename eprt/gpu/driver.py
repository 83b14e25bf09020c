"""The CUDA driver through cuda-bindings: every status becomes an exception with the driver's own words."""

import functools
from typing import Any


class CudaError(RuntimeError):
    """A driver call failed; the message names the call and the driver's reason."""


@functools.cache
def api():
    """cuda.bindings.driver. ImportError names the remedy."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ImportError(f"GPU support needs cuda-bindings: pip install 'eprt[cuda13]' ({error})") from None
    return driver


def check(result: tuple, what: str) -> Any:
    """The values of a driver call's result tuple. CudaError unless its status is success."""
    status, *values = result
    if status != api().CUresult.CUDA_SUCCESS:
        _, name = api().cuGetErrorString(status)
        raise CudaError(f"{what}: {name.decode() if name else status}")
    return values[0] if len(values) == 1 else tuple(values)
