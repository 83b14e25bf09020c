"""DeepSeek-V3.2's sparse attention on one GPU: rows, the indexer's scores and choice, attention to 2048 chosen tokens.

Every kernel that is installed, in turns, on different data; attention has 128 heads. Beside them torch.topk, whose
order and ties are others, and FlashMLA's kernels for chosen tokens: pip install --no-deps sgl-flash-mla. Those of
decodes take an fp8 cache, those of prompts one of bfloat16; the same number of tokens and heads.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from benchmarks.gpu.graph_timer import gpu_times_in_turns, gpu_word
from benchmarks.gpu.random_inputs import latent_cache
from benchmarks.shapes import HEADS, LATENT, ROPE
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops import cuda
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import choose_eprt, choose_triton, mla_eprt, mla_triton, scores_eprt, scores_triton
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import hadamard
from eprt.ops.weight import Weight

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "FlashMLA where installed"

TOP_K, PAGE, COPIES = 2048, 64, 3
CHOICES = {"4 x 163840": (4, 163840), "64 x 131072": (64, 131072), "64 x 1048576": (64, 1 << 20)} | {
    "4096 x 32768": (4096, 32768)
}
# Requests, rows of each (the last ones of its context), tokens of its context.
SCORES = {"64 x 131072": (64, 1, 131072), "128 x 2 x 32768": (128, 2, 32768)} | {
    f"2048 of {length}": (1, 2048, length) for length in (4096, 65536)
}
ROWS = (1, 16, 64, 128, 256, 1024)  # of attention, each to tokens of its own
CACHE = 1 << 21  # tokens
TOKENS = (1, 16, 128)  # of a step, whose rows become cache entries and queries
QUERY_LATENT = 1536
AGAIN = 20  # times in one graph: the start of a graph takes as long as such a kernel
SCORERS = {"eprt": scores_eprt, "triton": scores_triton}
CHOOSERS = {"eprt": choose_eprt, "triton": choose_triton}
ATTENDERS = {"eprt": mla_eprt, "triton": mla_triton}

Calls = dict[str, list[Callable[[], object]]]


def main() -> None:
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    device = {"device": torch.cuda.get_device_name(), "gpus": 1, "torch": torch.__version__}
    report = BenchmarkReport(f"sparse_attention_{gpu_word()}", device)
    for tokens in TOKENS:
        for what, calls in separate_and_joined(tokens).items():
            for name, times in gpu_times_in_turns(calls, samples=9).items():
                report.add_row(what=f"{what}, {tokens} tokens, {name}", rows=tokens, **times.columns("eprt"))
    for what, (rows, length) in CHOICES.items():
        add_choices(report, what, rows, length)
    for fp8 in (True, False):
        cache = latent_cache(CACHE, fp8)
        for rows in ROWS:
            add_attention(report, rows, cache)
        del cache
        torch.cuda.empty_cache()
    report.write()  # what there is, whatever becomes of the rest
    for what, (requests, rows, length) in SCORES.items():
        add_scores(report, what, requests, rows, length)
    report.finish()


def add_choices(report: BenchmarkReport, what: str, rows: int, length: int) -> None:
    """Of random normal scores, of which all are seen."""
    table = torch.randperm(length // PAGE, device="cuda").int()[None]
    request, seen = torch.zeros(rows, device="cuda").int(), torch.full((rows,), length, device="cuda").int()
    slot_XK = torch.empty(rows, TOP_K, dtype=torch.int32, device="cuda")
    copies = [torch.randn(rows, length, device="cuda") for _ in range(COPIES)]
    calls: Calls = {"torch.topk": [partial(torch.topk, score, TOP_K, sorted=False) for score in copies]}
    for name, module in CHOOSERS.items():
        if module.is_installed() and module.refusal(copies[0], TOP_K) is None:
            calls[name] = [partial(module.choose, slot_XK, score, table, request, seen, PAGE) for score in copies]
    for name, times in gpu_times_in_turns(calls, samples=9).items():
        GBps = 4 * rows * length / times.median_s / 1e9
        report.add_row(what=f"choice, {what}, {name}", rows=rows, **times.columns("eprt"), GBps=GBps)


def add_scores(report: BenchmarkReport, what: str, requests: int, rows: int, length: int) -> None:
    """Of random keys in fp8, with the rounding of queries."""
    X, pages = requests * rows, length // PAGE
    keys = torch.randint(0, 120, (requests * pages, PAGE, 132), device="cuda", dtype=torch.uint8)
    keys[..., 128:] = torch.ones(1, device="cuda").view(torch.uint8)
    table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    request = torch.arange(requests, device="cuda").int().repeat_interleave(rows)
    seen = (torch.arange(rows, device="cuda").int() + (length - rows + 1)).repeat(requests)
    query, weight = torch.randn(X, 64, 128, device="cuda", dtype=torch.bfloat16), torch.randn(X, 64, device="cuda")
    score_XS = torch.empty(X, length, device="cuda")
    calls: Calls = {}
    for name, module in SCORERS.items():
        if module.is_installed() and module.refusal(query, keys) is None:
            calls[name] = [partial(module.score, score_XS, query, weight, keys, table, request, seen)]
    pairs = seen.sum().item()
    for name, times in gpu_times_in_turns(calls, samples=7).items():
        report.add_row(
            what=f"scores, {what}, {name}",
            rows=X,
            **times.columns("eprt"),
            tflops=2 * 64 * 128 * pairs / times.median_s / 1e12,
            GBps=requests * length * 132 / times.median_s / 1e9,
        )


def add_attention(report: BenchmarkReport, rows: int, cache: Tensor) -> None:
    """Schedules, which a step makes once for all layers, are not timed."""
    q = torch.randn(rows, HEADS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    chosen = [torch.randint(CACHE, (rows, TOP_K), device="cuda").int().sort(dim=1).values for _ in range(COPIES)]
    length, entries = torch.full((rows,), TOP_K, device="cuda").int(), cache.view(-1, 1, cache.shape[2])
    contexts = [PagedContext(entries, slots, length) for slots in chosen]
    queries = q[..., :LATENT], q[..., LATENT:]
    calls: Calls = {}
    for name, module in ATTENDERS.items():
        if module.is_installed() and module.refusal(*queries, contexts[0]) is None:
            attend = partial(module.attend, *queries, softmax_scale=0.1, plans={})
            calls[name] = [partial(attend, context) for context in contexts]
    if find_spec("flash_mla") is not None:
        calls["flashmla"] = flashmla_calls(q, cache, chosen)
    fp8 = cache.dtype == torch.uint8
    operations = 2 * rows * TOP_K * HEADS * (2 * LATENT + ROPE)
    for name, times in gpu_times_in_turns(calls, samples=9).items():
        report.add_row(
            what=f"attention, {rows} tokens, {name}" + (", fp8 cache" if fp8 else ""),
            rows=rows,
            **times.columns("eprt"),
            tflops=operations / times.median_s / 1e12,
            GBps=rows * TOP_K * cache.shape[2] * cache.element_size() / times.median_s / 1e9,
        )


def separate_and_joined(tokens: int) -> dict[str, Calls]:
    """What becomes of a step's products before attention, with fp8 caches: by one kernel, and by one for each part."""
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    slots, position = torch.randperm(1 << 16, device="cuda")[:tokens], torch.arange(tokens, device="cuda") * 50
    table = torch.randn(1 << 14, ROPE, device="cuda")
    pages, key_pages = latent_cache(1 << 16, True), torch.empty(1 << 10, PAGE, 132, device="cuda", dtype=torch.uint8)
    entries = pages, slots, normal(tokens, LATENT + ROPE), normal(LATENT), 1e-6, Rotation(table, position, True)
    latent = normal(tokens, QUERY_LATENT), normal(QUERY_LATENT), 1e-6
    query, key, norm = normal(tokens, 64, 128), normal(tokens, 128), torch.randn(2, 128, device="cuda")
    rotation, matrix = Rotation(table, position, False), Weight(hadamard(128, torch.bfloat16, query.device))

    def turned(rows: Tensor) -> Tensor:
        rows = torch.cat((cuda.rope(rows[..., :ROPE], rotation), rows[..., ROPE:]), dim=-1)
        product = cuda.linear(rows.view(-1, 128), matrix, None, torch.float32) * 128**-0.5
        return product.view(rows.shape).to(rows.dtype)

    def insert_key() -> None:
        normed = layer_norm(key.float(), (128,), norm[0], norm[1], 1e-6).to(key.dtype)
        cuda.index_insert(key_pages, slots, turned(normed[:, None])[:, 0])

    def norm_and_insert() -> None:
        cuda.rms_norm(*latent)
        cuda.latent_insert(*entries)

    joined_key = partial(cuda.index_key_insert, key_pages, slots, key, norm[0], norm[1], 1e-6, rotation)
    return {
        "query norm, key rotation, insertion": {
            "eprt": [partial(cuda.norm_insert, *latent, *entries)] * AGAIN,
            "separate": [norm_and_insert] * AGAIN,
        },
        "index keys": {"eprt": [joined_key] * AGAIN, "separate": [insert_key] * AGAIN},
        "index queries": {
            "eprt": [partial(cuda.index_queries, query, rotation, torch.uint8)] * AGAIN,
            "separate": [partial(turned, query)] * AGAIN,
        },
    }


def flashmla_calls(q: Tensor, cache: Tensor, chosen: list[Tensor]) -> list[Callable[[], object]]:
    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

    if cache.dtype != torch.uint8:
        kv = cache.view(-1, 1, cache.shape[2])
        return [partial(flash_mla_sparse_fwd, q, kv, slots[:, None], 0.1, LATENT, use_legacy=True) for slots in chosen]
    theirs = cache.view(-1, cache.shape[2]).clone()  # its entries have four scales in front of the rotated keys
    scales = torch.full((len(theirs), 4), 1 / 64, device="cuda").view(torch.uint8)
    theirs[:, LATENT:] = torch.cat((scales, cache.view(-1, cache.shape[2])[:, LATENT : LATENT + 2 * ROPE]), 1)
    theirs, plan = theirs.view(-1, PAGE, 1, cache.shape[2]), get_mla_metadata()[0]
    options = {"softmax_scale": 0.1, "is_fp8_kvcache": True, "use_legacy": True}
    return [
        partial(flash_mla_with_kvcache, q[:, None], theirs, None, None, LATENT, plan, indices=slots[:, None], **options)
        for slots in chosen
    ]


if __name__ == "__main__":
    main()
