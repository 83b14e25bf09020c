"""One prompt over several CPU ranks (--prompt-ranks): time to first token, split against not.

    mpirun -n 2 --bind-to none python -m benchmarks.serving.bench_prompt_ranks --threads 1

Rank 0 gets one prompt; the other ranks have nothing else to do. The same engine computes it both ways, in turns:

split    the ranks compute a part of its tokens each
alone    rank 0 computes all of them, and the others only their experts, as without --prompt-ranks

ratio is split over alone, the median of the turns'; cpu is the processor time of the rank that takes most, which on a
crowded machine says more. --layers of the model's, with dummy weights. The prefix cache is off.
"""

import argparse
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.serving.ranks_in_turns import BothTimes, both_times, measure_in_turns, open_group, shape_with
from benchmarks.shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from benchmarks.tools.report import BenchmarkReport
from eprt import LLM, SamplingParams
from eprt.engine.prompt_split import ChunkOffer
from eprt.engine.prompt_team import PromptTeam

NUM_RANKS = 2

SHAPES = {"v2-lite": DEEPSEEK_V2_LITE, "v3": DEEPSEEK_V3}


class TimedPrompts:
    """One rank's end: prompts that all ranks know."""

    def __init__(self, llm: LLM):
        self._llm, self._rng = llm, np.random.default_rng(0)

    def seconds(self, num_tokens: int, is_split: bool) -> BothTimes:
        """Until the first token of a prompt that nobody has computed before; and of the busiest rank's processor."""
        prompt = self._rng.integers(3, self._llm.engine.model.config.vocab_size, num_tokens).tolist()
        offer = PromptTeam.offer if is_split else _offer_nothing
        with patch.object(PromptTeam, "offer", offer):
            params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
            return both_times(self._llm.group, lambda: self._llm.generate([prompt], params))


def _offer_nothing(*_: object) -> ChunkOffer:
    return ChunkOffer()


def measure(prompts: TimedPrompts, num_tokens: int, turns: int) -> dict[str, float]:
    ways = {name: partial(prompts.seconds, num_tokens, name == "split") for name in ("split", "alone")}
    return measure_in_turns(ways, turns, {"split": "ratio"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="v2-lite", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, help="of each MoE layer; default: the model's")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048], help="--chunk-size")
    parser.add_argument("--threads", type=int, help="of each rank; default: its share of the cores")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    group = open_group(args.threads)
    config = {"shape": args.shape, "layers": args.layers, "ranks": group.size, "threads": torch.get_num_threads()}
    of_ranks = "" if group.size == NUM_RANKS else f"_{group.size}ranks"
    report = BenchmarkReport(f"prompt_ranks{of_ranks}", config)
    changes = {} if args.experts is None else {"n_routed_experts": args.experts}
    with shape_with(SHAPES[args.shape], changes) as directory:
        for chunk_size in args.chunks:
            options = {"load_format": "dummy", "num_hidden_layers": args.layers, "dtype": "bfloat16"}
            limits = {"kv_cache_gb": 0.5, "max_model_len": max(args.tokens) + 16, "enable_prefix_cache": False}
            more = {"prompt_ranks": group.size, "chunk_size": chunk_size}
            with LLM(directory, group, **options, **limits, **more) as llm:
                prompts = TimedPrompts(llm)
                for num_tokens in args.tokens:
                    row = measure(prompts, num_tokens, args.turns)
                    report.add_row(chunk=chunk_size, tokens=num_tokens, **row)
    if group.rank == 0:
        report.finish()
    group.close()


if __name__ == "__main__":
    main()
