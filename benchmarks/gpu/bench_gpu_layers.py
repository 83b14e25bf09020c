"""Layers of DeepSeek-V3 on one GPU, beside their floors: the bytes they must move over measured HBM bandwidth.

experts    the routed experts of one of 8 ranks (32 of 256), 8 to 512 rows each: share of HBM bandwidth; drawn: that
           many on average, as uniform routing gives them
attention  absorbed latent attention of 32 to 128 requests at 4096 tokens of context, by every installed kernel
prompt     attention of up to 8192 new tokens, expanded and absorbed
linear     the projections of one attention layer, fp8 and bfloat16
step       a decoding step of K layers with dummy weights, as one CUDA graph (--layers K)
"""

import argparse
import os

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import bandwidth, gpu_time, gpu_time_of_replay, gpu_word, matrix_rate
from benchmarks.gpu.random_inputs import bf16_weight, decode_batch, drawn_rows, fp8_weight, latent_cache
from benchmarks.shapes import DEEPSEEK_V3, HEADS, HIDDEN, LATENT, ROPE, WIDTH
from benchmarks.tools.report import BenchmarkReport
from eprt import EngineConfig, EPGroup
from eprt.engine.graphs import DecodeGraphs, padding_rows
from eprt.gpu.device import take_device
from eprt.layers.layer_cache import LayerCache
from eprt.models.loader import load_model
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import attention, grouped_experts, linear, mla_expanded

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "FlashMLA beside Triton where installed"

CONTEXT = 4096


def bench_experts(report: BenchmarkReport, hbm: float, num_experts: int = 32) -> None:
    for name, make, size in (("fp8", fp8_weight, 1), ("bf16", bf16_weight, 2)):
        w13, w2 = make(num_experts, 2 * WIDTH, HIDDEN), make(num_experts, HIDDEN, WIDTH)
        for rows, drawn in [(rows, False) for rows in (8, 16, 32, 64, 128, 512)] + [(16, True), (32, True), (64, True)]:
            x = torch.randn(num_experts * rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            count = drawn_rows(num_experts, rows) if drawn else torch.full((num_experts,), rows, device="cuda").int()
            times = gpu_time([lambda x=x, count=count, w13=w13, w2=w2: grouped_experts(x, count, w13, w2)])
            moved = num_experts * 3 * WIDTH * HIDDEN * size + 4 * x.nbytes
            floor_s = moved / hbm
            report.add_row(
                what=f"experts {name}{', drawn' if drawn else ''}",
                rows=rows,
                **times.columns("eprt"),
                floor_us=floor_s * 1e6,
                share_of_hbm=floor_s / times.median_s,
                tflops=6 * len(x) * WIDTH * HIDDEN / times.median_s / 1e12,
            )


def bench_attention(report: BenchmarkReport, hbm: float) -> None:
    """Decodes. Below a few hundred tokens of context per byte read, 128 heads make this bound by arithmetic: both
    floors are told."""
    rate = matrix_rate()
    for requests in (32, 64, 128):
        for name, fp8 in [(name, False) for name in attention.installed()] + [("triton", True)]:
            pages = latent_cache(requests * CONTEXT, fp8)
            table = torch.randperm(len(pages), device="cuda").int().view(requests, -1)
            length = torch.full((requests,), CONTEXT, dtype=torch.int32, device="cuda")
            q = torch.randn(requests, HEADS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
            inputs = (q[..., :LATENT], q[..., LATENT:], PagedContext(pages, table, length), 0.1)
            attend = attention.kernels(name)[0].attend
            times = gpu_time([lambda inputs=inputs, attend=attend: attend(*inputs)])
            operations = 2 * requests * CONTEXT * HEADS * (2 * LATENT + ROPE)
            report.add_row(
                what=f"attention {name}{' fp8 cache' if fp8 else ''}",
                rows=requests,
                **times.columns("eprt"),
                floor_us=pages.nbytes / hbm * 1e6,
                share_of_hbm=pages.nbytes / hbm / times.median_s,
                compute_floor_us=operations / rate * 1e6,
                tflops=operations / times.median_s / 1e12,
            )


def bench_prompt(report: BenchmarkReport, hbm: float) -> None:
    """Attention of one prompt's new tokens over what is cached before them, expanded and absorbed."""
    w_kv_b = torch.randn(HEADS * 256, LATENT, device="cuda", dtype=torch.bfloat16) * LATENT**-0.5
    rate = matrix_rate()
    for new, cached in ((8192, 0), (1024, 7168), (1024, 0), (256, 0)):
        context = new + cached
        pages = latent_cache(context, False)
        table = torch.randperm(len(pages), device="cuda").int().view(1, -1)
        length, start = (torch.tensor(x, device="cuda").int() for x in ([context], [0, new]))
        q = torch.randn(new, HEADS, 192, device="cuda", dtype=torch.bfloat16)
        inputs = (q[..., :128], q[..., 128:], PagedContext(pages, table, length, start), w_kv_b, 0.1)
        pairs = HEADS * (new * context - new * (new - 1) / 2)
        operations = 2 * pairs * (192 + 128) + 2 * context * LATENT * HEADS * 256
        for form, attend in (("expanded", mla_expanded.attend_prompts), ("absorbed", attention.mla_decode)):
            times = gpu_time([lambda inputs=inputs, attend=attend: attend(*inputs)], samples=5)
            report.add_row(
                what=f"prompt {form}, {cached} cached",
                rows=new,
                **times.columns("eprt"),
                compute_floor_us=operations / rate * 1e6,
                tokens_per_s=new / times.median_s,
            )


def bench_linear(report: BenchmarkReport, hbm: float) -> None:
    for n, k in ((2112, HIDDEN), (HEADS * 192, 1536), (HIDDEN, HEADS * 128), (2 * WIDTH, HIDDEN)):
        for name, make in (("fp8", fp8_weight), ("bf16", bf16_weight)):
            copies = [make(n, k) for _ in range(8)]
            for rows in (32, 128, 4096):
                x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
                times = gpu_time([lambda x=x, w=w: linear(x, w) for w in copies])
                floor_s = (copies[0].data.nbytes + x.nbytes + 2 * rows * n) / hbm
                report.add_row(
                    what=f"linear {name} {n}x{k}",
                    rows=rows,
                    **times.columns("eprt"),
                    floor_us=floor_s * 1e6,
                    share_of_hbm=floor_s / times.median_s,
                    tflops=2 * rows * n * k / times.median_s / 1e12,
                )


def bench_step(report: BenchmarkReport, hbm: float, num_layers: int) -> None:
    engine = EngineConfig(
        str(DEEPSEEK_V3),
        device="cuda",
        load_format="dummy",
        num_hidden_layers=num_layers,
        low_latency_max_tokens=128,
        max_model_len=CONTEXT + 64,
    )
    model = load_model(engine, EPGroup.single())
    config, sizes, page_size = model.config, (32, 64, 128), 64
    num_pages = CONTEXT // page_size
    shape = (config.num_hidden_layers, sizes[-1] * num_pages + 1, page_size, config.kv_dim)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    cache_L = [LayerCache(latents_PSD) for latents_PSD in cache]
    for name, requests in ((name, requests) for name in attention.installed() for requests in sizes):
        os.environ["EPRT_GPU_ATTENTION"] = name
        with torch.inference_mode():
            padding = padding_rows(requests, num_pages, page_size, shape[1] - 1, cache.device)
            graphs = DecodeGraphs(lambda batch: model.forward_with_hidden(batch, cache_L), [requests], padding)
            graphs.compute_all()
            graphs.record()
            batch = decode_batch(requests, num_pages, page_size, config.vocab_size)
            graphs.run(batch)
            before = sum(sum(layer.expert_load()) for layer in model.moe_layers())
            graphs.run(batch)
            chosen = sum(sum(layer.expert_load()) for layer in model.moe_layers()) - before
            assert chosen == requests * 8 * len(model.moe_layers())
            times = gpu_time_of_replay(graphs, batch)
            floor_s = step_bytes(model, cache, requests, num_pages) / hbm
            report.add_row(
                what=f"step of {num_layers} layers, {name}",
                rows=requests,
                **times.columns("eprt"),
                floor_us=floor_s * 1e6,
                share_of_hbm=floor_s / times.median_s,
                times_floor=times.median_s / floor_s,
            )
            del graphs
    del os.environ["EPRT_GPU_ATTENTION"]
    model.close()


def step_bytes(model, cache: Tensor, requests: int, num_pages: int) -> float:
    """Every weight once (of the experts those that uniform routing would choose) and every cache entry once."""
    c = model.config
    attention = c.hidden_size * (c.q_lora_rank + c.kv_dim) + c.q_lora_rank * HEADS * c.qk_head_dim
    attention += HEADS * c.v_head_dim * c.hidden_size + 2 * HEADS * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank
    dense = 3 * c.hidden_size * c.intermediate_size
    touched = c.moe.num_experts * (1 - (1 - c.moe.top_k / c.moe.num_experts) ** requests) + 1
    experts = 3 * c.hidden_size * c.moe.intermediate_size * touched
    num_moe = len(model.moe_layers())
    layers = c.num_hidden_layers * attention + (c.num_hidden_layers - num_moe) * dense + num_moe * experts
    head = 2 * c.vocab_size * c.hidden_size
    kv = c.num_hidden_layers * requests * num_pages * cache[0, 0].nbytes
    return layers + head + kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["experts", "attention", "prompt", "linear", "step"])
    parser.add_argument("--layers", type=int, default=5, help="of the step: the first three are dense, the others MoE")
    arguments = parser.parse_args()
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    hbm = bandwidth()
    name = torch.cuda.get_device_name()
    report = BenchmarkReport(
        f"gpu_layers_{gpu_word()}",
        {"device": name, "gpus": 1, "hbm_GBps": round(hbm / 1e9), "torch": torch.__version__},
    )
    sections = {"experts": bench_experts, "attention": bench_attention, "prompt": bench_prompt, "linear": bench_linear}
    for section in arguments.only:
        if section in sections:
            sections[section](report, hbm)
            torch.cuda.empty_cache()
    if "step" in arguments.only:
        bench_step(report, hbm, arguments.layers)
    report.finish()


if __name__ == "__main__":
    main()
