"""DeepEP's Python interface (v1.2.1) over eprt's kernels, for the GPUs of one NVLink domain.

    import eprt.compat.deep_ep as deep_ep

For code that imports deep_ep itself, first: sys.modules["deep_ep"] = eprt.compat.deep_ep. docs/deep_ep.md lists the
differences from DeepEP. Knows nothing of models, placements or EPMoE.
"""

import torch

from eprt.compat.deep_ep.buffer import Buffer
from eprt.compat.deep_ep.config import Config
from eprt.compat.deep_ep.event import EventHandle, EventOverlap

topk_idx_t = torch.int64  # of topk_idx; torch.int32 is accepted too

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
