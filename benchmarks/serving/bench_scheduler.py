"""Host time of one engine step at 128 running requests, without the forward pass. Target: under 200 us.

The model returns the same logits every time. bookkeeping is schedule + header exchange + batch assembly + commit: the
step without forward pass and sampler; the sampler's time (vocabulary of 4096) has its own column. Cases:

    decode            every request generates one token per step
    decode, sampled   the same with temperature and top_p
    churn             in every second step one request is aborted and another, with its prompt to prefill, arrives

Each case runs twice: with "warm" caches, and with "cold" ones, where the forward pass sweeps 64 MB of memory, as a real
one does.
"""

import time
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Stopwatch, Timing, quantile
from eprt.config import EngineConfig
from eprt.engine import engine as engine_module
from eprt.engine import sampler
from eprt.engine.engine import Engine
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.exchange import Exchange
from eprt.models.model import Model

NUM_RANKS = 0

NUM_RUNNING, PROMPT, VOCAB, STEPS, WARMUP = 128, 256, 4096, 500, 50
PAGE_SIZE, LATENT, ROPE = 16, 3, 1


class FixedLogits(Model):
    """A model that computes nothing.

    sweep_bytes: memory that its forward pass touches, to leave the caches as a real one would
    """

    device, kv_dtype, exchange = torch.device("cpu"), torch.float32, Exchange({})

    def __init__(self, sweep_bytes: int):
        self.config = SimpleNamespace(
            vocab_size=VOCAB,
            num_hidden_layers=1,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            indexer=None,
            v4=None,
            max_position_embeddings=8192,
            eos_token_ids=(),
        )
        self.logits_XV = torch.randn(NUM_RUNNING, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
        self.swept = np.zeros(sweep_bytes, dtype=np.uint8)

    def forward(self, batch, cache_L):
        self.swept += 1
        return self.logits_XV[: batch.logits_idx.shape[0]]


def build(sweep_bytes: int) -> Engine:
    page_gb = PAGE_SIZE * (LATENT + ROPE) * 4 / 2**30
    config = EngineConfig(
        "none", kv_cache_gb=40_000 * page_gb, page_size=PAGE_SIZE, max_num_seqs=NUM_RUNNING, chunk_size=512
    )
    return Engine(config, model=FixedLogits(sweep_bytes))  # type: ignore[abstract]


def prompt(rng: np.random.Generator) -> list[int]:
    return rng.integers(0, VOCAB, PROMPT).tolist()


def measure(
    params: SamplingParams, sweep_bytes: int, churn: bool, num_steps: int = STEPS
) -> tuple[list[float], list[float]]:
    """Seconds of bookkeeping and of sampling, per step."""
    rng = np.random.default_rng(0)
    engine, forward, sampling = build(sweep_bytes), Stopwatch(), Stopwatch()
    engine.model.forward = forward.wrap(engine.model.forward)
    engine_module.sampler = SimpleNamespace(launch=sampling.wrap(sampler.launch))
    for i in range(NUM_RUNNING):
        engine.add_request(f"start-{i}", prompt(rng), params)
    while sum(request.decoding for request in engine.scheduler.running) < NUM_RUNNING:
        engine.step()
    own_s, sample_s = [], []
    for step in range(WARMUP + num_steps):
        if churn and step % 2 == 0:
            engine.abort(engine.scheduler.running[step % NUM_RUNNING].request_id)
            engine.add_request(f"churn-{step}", prompt(rng), params)
        forward.total_s = sampling.total_s = 0.0
        start = time.perf_counter()
        engine.step()
        own_s.append(time.perf_counter() - start - forward.total_s - sampling.total_s)
        sample_s.append(sampling.total_s)
    engine_module.sampler = sampler
    engine.check_integrity()
    return own_s[WARMUP:], sample_s[WARMUP:]


def run(report: BenchmarkReport, case: str, params: SamplingParams, churn: bool = False) -> None:
    for caches, sweep_bytes in (("warm", 1), ("cold", 64 << 20)):
        own_s, sample_s = measure(params, sweep_bytes, churn)
        own = Timing.from_samples(own_s)
        report.add_row(
            case=case,
            caches=caches,
            **own.columns("bookkeeping"),
            bookkeeping_p99_us=float(f"{quantile(sorted(own_s), 0.99) * 1e6:.5g}"),
            sampler_us=float(f"{Timing.from_samples(sample_s).median_s * 1e6:.5g}"),
            ratio_to_target=round(own.median_s / 200e-6, 3),
        )


def main() -> None:
    torch.set_num_threads(1)
    report = BenchmarkReport(
        "bench_scheduler", {"running": NUM_RUNNING, "prompt": PROMPT, "vocab": VOCAB, "page_size": PAGE_SIZE}
    )
    greedy = SamplingParams(max_tokens=4000, temperature=0)
    run(report, "decode", greedy)
    run(report, "decode, sampled", SamplingParams(max_tokens=4000, temperature=0.8, top_p=0.95, seed=1))
    run(report, "churn", greedy, churn=True)
    report.finish()


if __name__ == "__main__":
    main()
