"""MLA decode and extend on CPU, beside torch on the same paged cache and torch's attention alone.

eprt      the kernels of eprt.ops.attention, from paged latent cache to projected output
expanded  torch: gather the pages, expand them by w_kv_b to keys and values, scaled_dot_product_attention
absorbed  torch: gather the pages, absorb the query, products with the latent, project (decode only)
sdpa      torch: scaled_dot_product_attention alone, its keys and values expanded and gathered beforehand

`sdpa` needs a cache 71 times as large at 128 heads: it is a bound, not an alternative. torch's values are padded to the
width of the keys, which makes its attention up to four times as fast as without. Ratios are torch's time over eprt's.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tools.report import RESULTS, BenchmarkReport
from benchmarks.tools.timing import measure
from eprt.ops import attention, native
from eprt.ops.attention import PagedContext

NUM_RANKS = 0

NOPE, ROPE, VALUE, LORA, PAGE_SIZE = 128, 64, 128, 512, 64
SCALE = (NOPE + ROPE) ** -0.5
CHUNK = 256
MAX_EXPANDED_BYTES = 1 << 30  # rows whose keys and values would take more leave out the variants that expand


@dataclass(frozen=True)
class AttentionProblem:
    """Requests whose last tokens attend to all tokens before them."""

    heads: int
    batch: int  # requests
    context: int  # tokens of each
    num_new: int  # of them, the last ones, which are computed
    q_TND: Tensor
    kv_pages: Tensor  # [pages, PAGE_SIZE, LORA + ROPE]
    page_table_BP: Tensor  # int32
    w_kv_b: Tensor  # [heads * (NOPE + VALUE), LORA]

    @classmethod
    def random(cls, heads: int, batch: int, context: int, num_new: int, dtype: torch.dtype) -> "AttentionProblem":
        g = torch.Generator().manual_seed(0)
        num_pages = -(-context // PAGE_SIZE)
        pages = torch.randperm(batch * num_pages, generator=g)
        return cls(
            heads,
            batch,
            context,
            num_new,
            torch.randn(batch * num_new, heads, NOPE + ROPE, generator=g).to(dtype),
            torch.randn(len(pages), PAGE_SIZE, LORA + ROPE, generator=g).to(dtype),
            pages.view(batch, num_pages).to(torch.int32),
            (torch.randn(heads * (NOPE + VALUE), LORA, generator=g) * LORA**-0.5).to(dtype),
        )

    @property
    def expanded_bytes(self) -> int:
        return self.batch * self.context * self.heads * 2 * (NOPE + ROPE) * self.kv_pages.element_size()

    def eprt(self) -> Tensor:
        q = self.q_TND.split([NOPE, ROPE], dim=-1)
        seq_len = torch.full((self.batch,), self.context, dtype=torch.int32)
        if self.num_new == 1:
            context = PagedContext(self.kv_pages, self.page_table_BP, seq_len)
            return attention.mla_decode(*q, context, self.w_kv_b, SCALE)
        start = torch.arange(0, self.q_TND.shape[0] + 1, self.num_new, dtype=torch.int32)
        context = PagedContext(self.kv_pages, self.page_table_BP, seq_len, start)
        return attention.mla_extend(*q, context, self.w_kv_b, SCALE)

    def gather(self) -> Tensor:
        """[B, S, D]"""
        return self.kv_pages[self.page_table_BP.long()].flatten(1, 2)[:, : self.context]

    def expand(self) -> tuple[Tensor, Tensor]:
        """Keys and padded values, [B, N, S, nope + rope]."""
        latent, k_rope = self.gather().split([LORA, ROPE], dim=-1)
        kv = F.linear(latent, self.w_kv_b).view(self.batch, -1, self.heads, NOPE + VALUE).transpose(1, 2)
        k_nope, value = kv.split([NOPE, VALUE], dim=-1)
        k_rope = k_rope[:, None].expand(-1, self.heads, -1, -1)
        return torch.cat((k_nope, k_rope), dim=-1), F.pad(value, (0, NOPE + ROPE - VALUE))

    def sdpa(self, key: Tensor, value: Tensor) -> Tensor:
        q = self.q_TND.view(self.batch, self.num_new, self.heads, -1).transpose(1, 2)
        mask = None
        if self.num_new > 1:
            mask = torch.ones(self.num_new, self.context, dtype=torch.bool).tril(self.context - self.num_new)
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=SCALE)
        return out.transpose(1, 2).flatten(0, 1)[..., :VALUE]

    def absorbed(self) -> Tensor:
        kv = self.gather()
        w_k, w_v = self.w_kv_b.view(self.heads, NOPE + VALUE, LORA).split([NOPE, VALUE], dim=1)
        q_nope, q_rope = self.q_TND.split([NOPE, ROPE], dim=-1)
        q_lat = torch.bmm(q_nope.transpose(0, 1), w_k).transpose(0, 1)
        score = torch.bmm(torch.cat((q_lat, q_rope), dim=-1), kv.transpose(1, 2)).float() * SCALE
        o_lat = torch.bmm(score.softmax(-1).to(kv.dtype), kv[..., :LORA])
        return torch.bmm(o_lat.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)


def run(report: BenchmarkReport, op: str, problem: AttentionProblem, samples: int) -> None:
    candidates = {"eprt": problem.eprt}
    if op == "decode":
        candidates["absorbed"] = problem.absorbed
    if problem.expanded_bytes <= MAX_EXPANDED_BYTES:
        expanded = problem.expand()
        candidates["expanded"] = lambda: problem.sdpa(*problem.expand())
        candidates["sdpa"] = lambda: problem.sdpa(*expanded)
    want = problem.eprt().float()
    for name, call in candidates.items():
        error = (call().float() - want).norm() / want.norm()
        assert error < 0.02, f"{name} differs from eprt by {error:.3f}"
    times = measure(candidates, samples=samples, warmup=1)
    columns: dict[str, float] = {}
    for name, timing in times.items():
        columns |= timing.columns(name, "ms")
    for name in ("absorbed", "expanded", "sdpa"):
        if name in times:
            columns[f"x_{name}"] = times[name].median_s / times["eprt"].median_s
    report.add_row(op=op, heads=problem.heads, batch=problem.batch, context=problem.context, **columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.load()
    dtype = getattr(torch, arguments.dtype)
    kind = "" if dtype == torch.bfloat16 else "_float32"
    report = BenchmarkReport(
        f"cpu_attention{kind}_{native.isa()}_{arguments.threads}t",
        {"isa": native.isa(), "dtype": arguments.dtype, "threads": arguments.threads, "page_size": PAGE_SIZE},
    )
    for heads in (16, 128):
        for context in (512, 2048, 8192):
            for batch in (1, 8):
                run(report, "decode", AttentionProblem.random(heads, batch, context, 1, dtype), arguments.samples)
        for prefix in (0, 512, 2048):
            run(report, "extend", AttentionProblem.random(heads, 1, prefix + CHUNK, CHUNK, dtype), arguments.samples)
    report.finish(arguments.out)


if __name__ == "__main__":
    main()
