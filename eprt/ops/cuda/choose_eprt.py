"""The indexer's choice by eprt's own kernel for Hopper: csrc/cuda/index_choose.cu, by eprt/gpu/index_choose.py.

Knows what the kernel takes, not how it chooses.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from eprt.gpu import index_choose


def is_installed() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def refusal(score_XS: Tensor, top_k: int) -> str | None:
    """Why the kernel cannot choose among these; None when it can."""
    if index_choose.words_of(score_XS.shape[1]) is None:
        return f"it takes contexts of at most {32 * index_choose.SIZES[-1]} tokens, not {score_XS.shape[1]}"
    if top_k > index_choose.ROOM:
        return f"it chooses at most {index_choose.ROOM} tokens, not {top_k}"
    return _refusal_of_device(score_XS.device.index) if score_XS.is_cuda else "it runs on GPUs"


@functools.cache
def _refusal_of_device(device: int) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it runs on Hopper only"
    try:
        index_choose.load(device)
    except ImportError as error:
        return str(error)
    return None


choose = index_choose.choose
