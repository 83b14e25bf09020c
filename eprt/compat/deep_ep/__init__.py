"""DeepEP v1's Python interface (v1.2.1) over eprt's exchange between the GPUs of one NVLink domain.

    import eprt.compat.deep_ep as deep_ep

or, under code that imports deep_ep itself, before it does: sys.modules["deep_ep"] = eprt.compat.deep_ep. What differs
from DeepEP is said in docs/deep_ep.md.
"""

import torch

from eprt.compat.deep_ep.buffer import Buffer
from eprt.compat.deep_ep.config import Config
from eprt.compat.deep_ep.event import EventHandle, EventOverlap

topk_idx_t = torch.int64  # of topk_idx; torch.int32 is taken too

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
