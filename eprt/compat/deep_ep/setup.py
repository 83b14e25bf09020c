"""BufferSetup: what both modes of a Buffer share."""

from dataclasses import dataclass

import torch

from eprt.compat.deep_ep.checks import BufferChecks
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.rank_mask import RankMask


@dataclass(frozen=True)
class BufferSetup:
    group: EPGroup
    checks: BufferChecks
    stream: torch.cuda.Stream  # for calls with async_finish
    mask: RankMask
    timeout_s: float  # deadline of every wait
    exact: bool  # low latency: every expert's output is sent separately
    shrink: bool  # a late rank is masked and the others go on; otherwise the next call raises EPTimeoutError as well
