"""How a GPU's SMs are divided where communication runs beside the experts.

Single-batch overlap, tile by tile: combine send reads rows as the down projection writes them, sums those of a token
and stores one row per token and rank. That hides the time it takes by itself, but the products have fewer SMs, and as
most tokens are complete only near the end, most of the work is left for then. With S SMs, k of them sending:

    saved   OVERHEAD_S + bytes that cross / LINK_GB_S
    cost    BESIDE_S + k / S * time of both products + LATE * bytes loaded and stored / (k * SEND_GB_S_PER_SM)

The k of least cost is taken if that is less than what is saved, else none: the outputs are then sent when all are
there. Between GPUs of one NVLink host no shape pays whose experts are 768 or more wide: sending is fast there, and with
more rows the products take longer, too. It pays where a link is slow against the products, as between hosts;
--overlap-sms overrides.

Two-batch overlap: the other half's dispatch or combine comes and goes on some SMs while a product runs. A product that
gave each SM its share of tiles beforehand would be as late as the SMs that were taken; with one program per tile the
hardware gives tiles to whoever is free.
"""

import functools

from eprt.config import MoEConfig
from eprt.gpu.device import multiprocessors

LINK_GB_S = 340.0  # leave an H200 over NVLink
SEND_GB_S_PER_SM = 38.0  # loaded and stored, by thread blocks that sum rows
HBM_GB_S = 4000.0
GROUPED_TFLOPS = 630.0  # of the grouped product in fp8, with many rows; bfloat16 has fewer
OVERHEAD_S = 10e-6
BESIDE_S = 20e-6  # streams that fork and meet, counters, the other ranks' last tiles
LATE = 0.8  # of the work, when the last rows are there
MOST_SMS = 24
ONE_PROGRAM_PER_TILE = 1 << 20  # SMs to ask a product's programs for: more than it has tiles
_WEIGHT_BYTES = {"fp8": 1.0, "int8": 1.0, "fp4": 0.5 + 1 / 32, "same": 2.0}  # a value; of fp4 with scales


def tile_rows(config: MoEConfig, num_tokens: int, num_ranks: int, num_slots: int) -> int:
    """Rows of a tile that combine send waits for: about what a slot gets, as the products can have it."""
    rows = max(1, num_tokens * config.top_k * num_ranks // num_slots)
    return min(64, max(16, 1 << (rows - 1).bit_length()))


def send_sms(
    config: MoEConfig, num_tokens: int, num_ranks: int, num_local_slots: int, sms: int, link_gb_s: float = LINK_GB_S
) -> int:
    """For combine send beside the down projection; 0: after it, on all. num_tokens: of each rank. sms: the GPU's."""
    row_bytes = 2 * config.hidden_size
    ranks_of_token = num_ranks * (1 - (1 - 1 / num_ranks) ** config.top_k)
    crossing = num_tokens * ranks_of_token * (num_ranks - 1) / num_ranks * row_bytes
    moved = num_tokens * (config.top_k + ranks_of_token) * row_bytes
    per_sm_s = _products_s(config, num_tokens, num_ranks, num_local_slots) / sms
    late_s = LATE * moved / (SEND_GB_S_PER_SM * 1e9)
    best = min(range(1, MOST_SMS + 1), key=lambda k: k * per_sm_s + late_s / k)
    saved_s = OVERHEAD_S + crossing / (link_gb_s * 1e9)
    return best if BESIDE_S + best * per_sm_s + late_s / best < saved_s else 0


def _products_s(config: MoEConfig, num_tokens: int, num_ranks: int, num_local_slots: int) -> float:
    """Of a rank, on all SMs: the time to read the weights, or with many rows to multiply."""
    touched = num_local_slots * (1 - (1 - config.top_k / config.num_experts) ** (num_tokens * num_ranks))
    size = 3 * config.hidden_size * config.intermediate_size  # elements of an expert
    read_s = touched * size * _WEIGHT_BYTES[config.weight_format] / (HBM_GB_S * 1e9)
    return max(read_s, num_tokens * config.top_k * 2 * size / (GROUPED_TFLOPS * 1e12))


@functools.cache
def device_sms() -> int:
    """Of the current GPU; a process has one."""
    return multiprocessors()
