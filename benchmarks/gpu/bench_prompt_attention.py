"""Attention of prompts whose keys and values are expanded, DeepSeek-V3's 128 heads in bfloat16, by every kernel.

Beside them cuDNN's (torch), which takes one prompt without a cached prefix. They take turns. The expansion
counts apart: what it takes stands in rows of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.graph_timer import gpu_time, gpu_times_in_turns, gpu_word
from benchmarks.gpu.random_inputs import latent_cache
from benchmarks.shapes import HEADS, LATENT, ROPE
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import expanded_eprt, expanded_triton, mla_expanded

NUM_RANKS = 0
NEEDS_GPU = True
NOPE, VALUE, SCALE = 128, 128, 0.1
KERNELS = {"eprt": expanded_eprt, "triton": expanded_triton}


@dataclass(frozen=True)
class Batch:
    new: list[int]  # tokens of each request
    cached: list[int]

    @property
    def lengths(self) -> list[int]:
        return [new + cached for new, cached in zip(self.new, self.cached)]

    @property
    def operations(self) -> float:
        """Of both products."""
        pairs = sum(new * cached + new * (new + 1) / 2 for new, cached in zip(self.new, self.cached))
        return 2 * HEADS * pairs * (NOPE + ROPE + VALUE)


BATCHES = {
    "8192": Batch([8192], [0]),
    "2048 after 30720": Batch([2048], [30720]),
    "2048 after 6144": Batch([2048], [6144]),
    "4 x 2048": Batch([2048] * 4, [0] * 4),
    "16 x 512": Batch([512] * 16, [0] * 16),
    "mixed": Batch([100 + 311 * i % 1900 for i in range(12)], [977 * i % 5000 for i in range(12)]),
}


@dataclass
class Inputs:
    q_TND: Tensor
    q_rope_TNR: Tensor
    kv_SNE: Tensor
    rope_SR: Tensor
    context: PagedContext

    @staticmethod
    def draw(batch: Batch) -> "Inputs":
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        q, positions = normal(sum(batch.new), HEADS, NOPE + ROPE), sum(batch.lengths)
        width = -(-max(batch.lengths) // 64)
        pages = latent_cache(len(batch.new) * width * 64, False)
        table = torch.randperm(len(pages), device="cuda").int().view(-1, width)
        length = torch.tensor(batch.lengths, device="cuda").int()
        start = torch.tensor([0, *batch.new], device="cuda").cumsum(0).int()
        context = PagedContext(pages, table, length, start, positions)
        kv, rope = normal(positions, HEADS, NOPE + VALUE), normal(positions, ROPE)
        return Inputs(q, q[..., NOPE:].contiguous(), kv, rope, context)

    def call_of(self, module: ModuleType) -> Callable[[], None] | None:
        """None where the kernel does not take these."""
        out = torch.empty(*self.q_TND.shape[:2], VALUE, device="cuda", dtype=torch.bfloat16)
        queries = self.q_TND[..., :NOPE], self.q_rope_TNR
        if module.refusal(*queries, self.kv_SNE) is not None:
            return None
        return partial(module.attend, out, *queries, self.kv_SNE, self.rope_SR, self.context, SCALE)

    def call_of_cudnn(self) -> Callable[[], Tensor]:
        k = torch.cat((self.kv_SNE[..., :NOPE], self.rope_SR[:, None].expand(-1, HEADS, -1)), -1)
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q_TND, k, self.kv_SNE[..., NOPE:]))

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)

        return call


def main() -> None:
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    device = {"device": torch.cuda.get_device_name(), "gpus": 1, "torch": torch.__version__}
    report = BenchmarkReport(f"prompt_attention_{gpu_word()}", device)
    for what, batch in BATCHES.items():
        add_rows(report, what, batch, Inputs.draw(batch))
        torch.cuda.empty_cache()
    report.finish()


def add_rows(report: BenchmarkReport, what: str, batch: Batch, inputs: Inputs) -> None:
    found = {name: inputs.call_of(module) for name, module in KERNELS.items()}
    calls: dict[str, Callable[[], object]] = {name: call for name, call in found.items() if call is not None}
    if len(batch.new) == 1 and batch.cached == [0]:
        calls["cudnn"] = inputs.call_of_cudnn()
    for name, times in gpu_times_in_turns({name: [call] for name, call in calls.items()}, samples=9).items():
        tflops = batch.operations / times.median_s / 1e12
        report.add_row(what=f"{what}, {name}", rows=sum(batch.new), **times.columns("eprt"), tflops=tflops)
    w_kv_b = torch.randn(HEADS * (NOPE + VALUE), LATENT, device="cuda", dtype=torch.bfloat16) * LATENT**-0.5
    queries = inputs.q_TND[..., :NOPE], inputs.q_TND[..., NOPE:]
    for name, attend in (("with expansion", None), ("expansion", lambda *inputs: None)):
        call = partial(mla_expanded.attend_prompts, *queries, inputs.context, w_kv_b, SCALE, attend=attend)
        report.add_row(what=f"{what}, {name}", rows=sum(batch.new), **gpu_time([call], samples=5).columns("eprt"))


if __name__ == "__main__":
    main()
