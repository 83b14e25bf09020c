"""Attention over several CPU ranks (--attention-tp): time per token and to the first, against each rank by itself.

    mpirun -n 2 --bind-to none python -m benchmarks.serving.bench_attention_tp --threads 1

Rank 0 gets the first stream, the others the next ones in turn; with one stream they have nothing else to do. Three
engines of the same dummy weights take turns:

alone    each rank has all heads, as without --attention-tp
gather   each has its share of them; outputs are gathered, to the bit those of `alone`
reduce   the same; outputs are added up

A time per token is that of a step in which each stream gets one; ratio is over alone, the median of the turns'; cpu is
the processor time of the rank that takes most, waits included. read_mb is what a rank holds, and reads in each step, of
heads' weights. --layers of the model's are MoE layers, and its vocabulary is small: what is compared is attention.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.serving.ranks_in_turns import BothTimes, both_times, measure_in_turns, open_group, shape_with
from benchmarks.shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from benchmarks.tools.report import BenchmarkReport
from eprt import LLM, SamplingParams
from eprt.layers.mla import MLA
from eprt.layers.split_mla import SplitMLA
from eprt.models.deepseek import DeepseekModel

NUM_RANKS = 2
SHAPES = {"v2-lite": DEEPSEEK_V2_LITE, "v3": DEEPSEEK_V3}
WAYS = ("alone", "gather", "reduce")
SHAPE = {"vocab_size": 4096, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1}


class TimedEngine:
    """One rank's end of one of the ways."""

    def __init__(self, llm: LLM):
        self._llm, self._rng = llm, np.random.default_rng(0)

    def _prompts(self, num: int, num_tokens: int) -> list[list[int]]:
        return self._rng.integers(3, SHAPE["vocab_size"], (num, num_tokens)).tolist()

    def decode(self, streams: int, num_tokens: int, context: int) -> BothTimes:
        """Seconds of a step in which each stream gets a token; and of the busiest rank's processor."""
        params = SamplingParams(max_tokens=num_tokens + 1, temperature=0, ignore_eos=True)
        self._llm.group.barrier()
        start, cpu_start, pieces = 0.0, 0.0, 0
        for _ in self._llm.stream(self._prompts(streams, context), params):
            pieces += 1
            if pieces == 1:
                start, cpu_start = time.perf_counter(), time.process_time()
        took, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        times = self._llm.group.allgather((took, cpu) if pieces else (0.0, 0.0))
        return times[0][0] / num_tokens, max(cpu for _, cpu in times) / num_tokens

    def first_token(self, num_tokens: int) -> BothTimes:
        """Of a prompt of rank 0 that nobody has computed before."""
        prompts, params = self._prompts(1, num_tokens), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        return both_times(self._llm.group, lambda: self._llm.generate(prompts, params))

    def head_bytes(self) -> int:
        """Of weights, in all layers, that belong to heads."""
        model = self._llm.engine.model
        assert isinstance(model, DeepseekModel)
        return sum(_head_bytes(layer.attention) for layer in model.layers)


def _head_bytes(layer: MLA) -> int:
    if isinstance(layer, SplitMLA):
        return layer.split.head_bytes
    w, config = layer.weights, layer.config
    queries = w.qkv_a.parts[0].weight.data[: config.num_attention_heads * config.qk_head_dim]
    queries = queries if w.q_b is None else w.q_b.weight.data
    return queries.nbytes + w.w_kv_b.nbytes + w.o.weight.data.nbytes


def measure(engines: dict[str, TimedEngine], what: str, arguments: Sequence[int], turns: int) -> dict[str, Any]:
    ways = {name: partial(getattr(engine, what), *arguments) for name, engine in engines.items()}
    return measure_in_turns(ways, turns, {name: f"{name}_ratio" for name in WAYS[1:]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="v3", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8, help="of each layer")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=16, help="of each stream")
    parser.add_argument("--context", type=int, default=64, help="tokens of each stream's prompt")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512], help="tokens; the first token is timed")
    parser.add_argument("--threads", type=int, help="of each rank; default: its share of the cores")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    group = open_group(args.threads)
    config = {"shape": args.shape, "layers": args.layers, "ranks": group.size, "threads": torch.get_num_threads()}
    report = BenchmarkReport("attention_tp", config)
    longest = max([args.context + args.tokens, *args.prompts]) + 16
    options = {"load_format": "dummy", "num_hidden_layers": args.layers, "dtype": "bfloat16", "kv_cache_gb": 0.1}
    options |= {"max_model_len": longest, "enable_prefix_cache": False, "spare_experts": 0}
    teams = {name: {"attention_tp": group.size, "attention_tp_form": name} for name in WAYS[1:]}
    changes = {**SHAPE, "quantization_config": None, "n_routed_experts": args.experts}
    with shape_with(SHAPES[args.shape], changes) as directory, ExitStack() as stack:
        llms = {name: LLM(directory, group, **options, **teams.get(name, {})) for name in WAYS}
        engines = {name: TimedEngine(stack.enter_context(llm)) for name, llm in llms.items()}
        read = {f"{name}_read_mb": engine.head_bytes() / 1e6 for name, engine in engines.items()}
        for streams in args.streams:
            arguments = streams, args.tokens, args.context
            report.add_row(what="token", streams=streams, **measure(engines, "decode", arguments, args.turns), **read)
        for num_tokens in args.prompts:
            row = measure(engines, "first_token", (num_tokens,), args.turns)
            report.add_row(what="first token", prompt=num_tokens, **row, **read)
    if group.rank == 0:
        report.finish()
    group.close()


if __name__ == "__main__":
    main()
