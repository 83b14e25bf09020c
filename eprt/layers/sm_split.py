"""How a GPU's SMs are divided where communication runs beside the experts.

Single-batch overlap: combine send reads the rows that the down projection writes, sums those of a token and stores one
row per token and rank. It should take no longer than the down projection, whose time is that of reading its weights,
with as few SMs as that takes: the rest read weights. Both rates were measured on H200; --overlap-sms overrides.
"""

import functools
import math

import torch

from eprt.config import MoEConfig

SEND_GB_S_PER_SM = 38.0  # loaded and stored, by thread blocks that sum rows
HBM_GB_S = 4000.0
MARGIN = 1.5  # for uneven routing, and for the tiles that come last
LEAST_SMS, MOST_SMS = 4, 24
_WEIGHT_BYTES = {"fp8": 1, "int8": 1, "same": 2}


def tile_rows(config: MoEConfig, num_tokens: int, num_ranks: int, num_slots: int) -> int:
    """Rows of a tile that combine send waits for: about what a slot gets, as the products can have it."""
    rows = max(1, num_tokens * config.top_k * num_ranks // num_slots)
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def send_sms(config: MoEConfig, num_tokens: int, num_ranks: int, num_local_slots: int) -> int:
    """For combine send beside the down projection. num_tokens: of each rank."""
    row_bytes = 2 * config.hidden_size
    ranks_of_token = num_ranks * (1 - (1 - 1 / num_ranks) ** config.top_k)
    send_bytes = num_tokens * (config.top_k + ranks_of_token) * row_bytes
    touched = num_local_slots * (1 - (1 - config.top_k / config.num_experts) ** (num_tokens * num_ranks))
    weights = touched * config.hidden_size * config.intermediate_size * _WEIGHT_BYTES[config.weight_format]
    down_s = weights / (HBM_GB_S * 1e9)
    needed = send_bytes / (SEND_GB_S_PER_SM * 1e9) / max(down_s, 1e-6) * MARGIN
    return min(MOST_SMS, max(LEAST_SMS, math.ceil(needed)))


@functools.cache
def device_sms() -> int:
    """Of the current GPU; a process has one."""
    return torch.cuda.get_device_properties().multi_processor_count
