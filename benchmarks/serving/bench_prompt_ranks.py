"""One prompt over several CPU ranks (--prompt-ranks): time to first token, split against not.

    mpirun -n 2 --bind-to none python -m benchmarks.serving.bench_prompt_ranks --threads 1

Rank 0 gets one prompt; the other ranks have nothing else to do. The same engine computes it both ways, in turns:

split    the ranks compute a part of its tokens each
alone    rank 0 computes all of them, and the others only their experts, as without --prompt-ranks

ratio is split over alone, the median of the turns'; cpu is the processor time of the rank that takes most, which on a
crowded machine says more. --layers of the model's, with dummy weights. The prefix cache is off.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing, quantile
from eprt import LLM, EPGroup, SamplingParams
from eprt.bind import bind
from eprt.engine.prompt_split import ChunkOffer
from eprt.engine.prompt_team import PromptTeam

NUM_RANKS = 2

SHAPES = {"v2-lite": DEEPSEEK_V2_LITE, "v3": DEEPSEEK_V3}


@contextmanager
def shape_with(shape: Path, num_experts: int | None) -> Iterator[Path]:
    config = json.loads((shape / "config.json").read_text())
    if num_experts is not None:
        config["n_routed_experts"] = num_experts
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


class TimedPrompts:
    """One rank's end: prompts that all ranks know."""

    def __init__(self, llm: LLM):
        self._llm, self._rng = llm, np.random.default_rng(0)

    def seconds(self, num_tokens: int, is_split: bool) -> tuple[float, float]:
        """Until the first token of a prompt that nobody has computed before; and of the busiest rank's processor."""
        prompt = self._rng.integers(3, self._llm.engine.model.config.vocab_size, num_tokens).tolist()
        offer = PromptTeam.offer if is_split else _offer_nothing
        with patch.object(PromptTeam, "offer", offer):
            self._llm.group.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            self._llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
            took = time.perf_counter() - start, time.process_time() - cpu_start
        return took[0], max(self._llm.group.allgather(took[1]))


def _offer_nothing(*_: object) -> ChunkOffer:
    return ChunkOffer()


def measure(prompts: TimedPrompts, num_tokens: int, turns: int) -> dict[str, float]:
    samples: dict[str, list[tuple[float, float]]] = {"split": [], "alone": []}
    for name in samples:
        prompts.seconds(num_tokens, name == "split")
    for turn in range(turns):
        for name in ("split", "alone") if turn % 2 else ("alone", "split"):
            samples[name].append(prompts.seconds(num_tokens, name == "split"))
    columns: dict[str, float] = {}
    for i, suffix in enumerate(("", "_cpu")):
        for name, taken in samples.items():
            columns |= Timing.from_samples([both[i] for both in taken]).columns(name + suffix, "ms")
        ratios = sorted(split[i] / alone[i] for split, alone in zip(samples["split"], samples["alone"]))
        columns |= {f"ratio{suffix}": quantile(ratios, 0.5)}
        columns |= {f"ratio{suffix}_p10": quantile(ratios, 0.1), f"ratio{suffix}_p90": quantile(ratios, 0.9)}
    return columns


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
    group = EPGroup.from_mpi()
    bind("core", group.allgather)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    config = {"shape": args.shape, "layers": args.layers, "ranks": group.size, "threads": torch.get_num_threads()}
    report = BenchmarkReport("prompt_ranks", config)
    with shape_with(SHAPES[args.shape], args.experts) as directory:
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
