"""GpuSpeed: what the kernels of a kind of GPU reach, from measurements.

`h200` is eprt's own: each figure is of a file in benchmarks/results, which its comment names, and a test holds them
together. `h800` is DeepEP V1 inside a node as its README has it, and the data sheet of an H800 by the H200's shares.
"""

from dataclasses import dataclass, replace

# A kernel that reads and computes takes (read^3 + compute^3)^(1/3): within 3 % of expert products of 8 to 512 rows.
_SOFTNESS = 3


@dataclass(frozen=True)
class Leg:
    """A way that messages take: it costs start_us and moves GBps."""

    start_us: float
    GBps: float

    def us(self, num_bytes: float) -> float:
        return self.start_us + num_bytes / self.GBps * 1e-3


@dataclass(frozen=True)
class GpuSpeed:
    name: str
    memory_gb: float  # of a GPU, in 10^9 bytes
    expert_GBps: float  # expert products of few rows, by the bytes of their weights
    linear_GBps: float  # other products of few rows
    expert_tflops: float  # expert products in fp8, with many rows
    linear_tflops: float  # other products in fp8
    attention_GBps: float  # decodes over latents, by the bytes of the cache
    attention_tflops: float
    prompt_tflops: float  # a whole layer over prompts
    dispatch: Leg  # low latency, inside a node, by the bytes that leave a GPU
    combine: Leg
    normal_dispatch_GBps: float  # normal mode, fp8, likewise
    normal_combine_GBps: float
    other_us_per_request: float  # of a decode layer: what is none of the above

    def expert_us(self, num_bytes: float, flops: float) -> float:
        return _soft_maximum(num_bytes / self.expert_GBps * 1e-3, flops / self.expert_tflops * 1e-6)

    def linear_us(self, num_bytes: float, flops: float) -> float:
        return _soft_maximum(num_bytes / self.linear_GBps * 1e-3, flops / self.linear_tflops * 1e-6)

    def attention_us(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.attention_GBps * 1e-3, flops / self.attention_tflops * 1e-6)


def _soft_maximum(read_us: float, compute_us: float) -> float:
    return (read_us**_SOFTNESS + compute_us**_SOFTNESS) ** (1 / _SOFTNESS)


H200 = GpuSpeed(
    "NVIDIA H200, eprt's kernels",
    memory_gb=141.0,
    expert_GBps=4219.0,  # gpu_layers_h200: experts fp8, 8 rows, 0.949 of 4446
    linear_GBps=2980.0,  # gpu_layers_h200: fp8 7168 x 16384, 32 rows, 0.671 of 4446
    expert_tflops=598.0,  # gpu_layers_h200: experts fp8, 512 rows
    linear_tflops=1090.0,  # gpu_layers_h200: fp8 7168 x 16384, 4096 rows
    attention_GBps=2746.0,  # latent_attention_h200: 128 requests of 4096, which are bound by computing
    attention_tflops=664.0,  # latent_attention_h200: 128 requests of 4096
    prompt_tflops=838.0,  # layer_prefill_2gpu: a layer over 8192 tokens in 12.4 ms, its exchange apart
    dispatch=Leg(11.2, 216.0),  # ep_low_latency_2gpu, _4gpu: 128 tokens
    combine=Leg(13.7, 268.0),
    normal_dispatch_GBps=247.0,  # ep_normal_4gpu: 4096 tokens in 333 us
    normal_combine_GBps=321.0,  # the same in 496 us
    other_us_per_request=1.0,  # makes the step of generation_61x64_2gpu at 128 requests right
)
H800 = replace(
    H200,
    name="NVIDIA H800, DeepEP V1 inside a node",
    memory_gb=80.0,
    expert_GBps=H200.expert_GBps * 3.35 / 4.8,
    linear_GBps=H200.linear_GBps * 3.35 / 4.8,
    attention_GBps=H200.attention_GBps * 3.35 / 4.8,
    dispatch=Leg(35.0, 160.0),
    combine=Leg(35.0, 160.0),
    normal_dispatch_GBps=160.0,
    normal_combine_GBps=160.0,
)
SPEEDS = {"h200": H200, "h800": H800}
