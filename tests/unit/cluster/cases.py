"""DeepSeek-V3's shape and times that others published, for the tests of eprt/cluster."""

from pathlib import Path

from eprt.cluster.model_cost import ModelCost
from eprt.config import EngineConfig
from eprt.models.hf_config import read_model_config

DEEPSEEK_V3 = Path(__file__).parents[3] / "benchmarks" / "shapes" / "deepseek_v3"

# DeepEP V1, H800, 128 tokens of 7168, top-8, cards of 50 GB/s: us of dispatch (fp8) and combine (bf16), by EP size.
# Its README at de8cfca (NVLink inside a node) and at 1a0c8f6 (the card for every message).
LOW_LATENCY = {8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
LOW_LATENCY_CARDS_ONLY = {
    8: (163, 318),
    16: (173, 329),
    32: (182, 350),
    64: (186, 353),
    128: (192, 369),
    256: (194, 360),
}
# Normal mode, 4096 tokens, us of dispatch (fp8) and combine (bf16), implied by the GB/s of the same README. EP64's test
# chooses 4 of 8 groups, EP32's chooses freely.
NORMAL = {32: (1887, 3723), 64: (2154, 4262)}
# pplx-garden's README: 128 tokens on ConnectX-7 cards of 50 GB/s, its own kernels and DeepEP beside them.
LOW_LATENCY_OF_OTHERS = {
    "pplx-garden": {16: (110.2, 185.5), 32: (153.9, 266), 64: (187.5, 309)},
    "DeepEP at pplx": {16: (124, 203), 32: (159, 285), 64: (178, 325)},
}
# The same, 4096 tokens: a copy for each expert of a token, and DeepEP's copy for each node.
NORMAL_PER_EXPERT = {"dispatch": {16: 2735, 32: 4012, 64: 4665}, "combine": {32: 7527, 64: 8771}}
NORMAL_ONCE_PER_NODE = {"combine": {32: 3565, 64: 5923}}
# Not explained by any way of sending in fp8: 1.6 to 3.7 times the prediction.
OUTLIERS_ONCE_PER_NODE = {"dispatch": {16: 2482, 32: 3680, 64: 5072}}


def deepseek_v3() -> ModelCost:
    return ModelCost(read_model_config(EngineConfig(model_dir=str(DEEPSEEK_V3))))
