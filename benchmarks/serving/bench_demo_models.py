"""Processor time of a decode step: the demo model of V4's kind beside the one of V3's kind, in turns.

    EPRT_CPU_ISA=avx2 OMP_NUM_THREADS=1 python -m benchmarks.serving.bench_demo_models

Both are served by one process, which computes a step of one, then a step of the other, so that what else the machine
does meets both alike. Each stream decodes behind a prompt of about 60 tokens, greedily.

v3_ms, v4_ms    processor time of a step, the median; all threads of the process together
speed           v3_ms / v4_ms: how fast the model of V4's kind is, as a share of the other's speed. Target: 0.5
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt import EngineConfig, SamplingParams
from eprt.engine.engine import Engine
from eprt.ops import native

NUM_RANKS = 0

MODELS = {"v3": DEMO_MODEL, "v4": f"{DEMO_MODEL}_v4"}
_WARM_UP = 8  # steps
_PROMPT = 60  # tokens


def start(path: str, num_streams: int, num_steps: int) -> Engine:
    """An engine whose requests decode for more steps than are measured."""
    engine = Engine(EngineConfig(path, kv_cache_gb=0.1, max_num_seqs=num_streams))
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_steps + 2 * _WARM_UP)
    for i in range(num_streams):
        prompt = torch.randint(3, 600, (_PROMPT + i,), generator=generator).tolist()
        engine.add_request(str(i), prompt, params)
    for _ in range(_WARM_UP):
        engine.step()
    return engine


def measure(num_streams: int, num_steps: int) -> dict[str, Any]:
    engines = {name: start(path, num_streams, num_steps) for name, path in MODELS.items()}
    took: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(num_steps):
        for name, engine in engines.items():
            began = time.process_time()
            outputs = engine.step().outputs
            took[name].append(time.process_time() - began)
            assert len(outputs) == num_streams, "every stream decodes in every step"
    for engine in engines.values():
        engine.close()
    v3_ms, v4_ms = (median(took[name]) * 1e3 for name in MODELS)
    return {"v3_ms": v3_ms, "v4_ms": v4_ms, "speed": v3_ms / v4_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=300, help="of each model")
    args = parser.parse_args()
    settings = {"isa": native.isa(), "threads": torch.get_num_threads(), "steps": args.steps}
    report = BenchmarkReport("demo_models_cpu", settings)
    for num_streams in args.streams:
        report.add_row(streams=num_streams, **measure(num_streams, args.steps))
    report.finish()


if __name__ == "__main__":
    main()
