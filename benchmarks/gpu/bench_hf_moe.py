"""One MoE layer of DeepSeek-V3 and of Qwen3-235B: transformers' own block beside EPMoE.from_hf of the same block.

    mpirun -n 2 python -m benchmarks.gpu.bench_hf_moe

bf16, random weights. transformers' block is whole on every GPU; EPMoE holds its rank's share of the experts. Each rank
has so many tokens. A row is one way to compute the layer:

    transformers X       experts_implementation X. deepgemm and sonicmoe need kernels that the package `kernels`
                         gets from the Hugging Face Hub; the report's `not_run` says what was missing
    eprt normal          EPMoE.forward; low_latency: with static shapes
    eprt fp8 ..          with expert weights in fp8: another precision, half the bytes
    .. graph             recorded by the caller, replayed

us: from event to event, all ranks begun together with idle GPUs, so that what the host needs to launch counts; the
slowest rank's median. peak_MB: what a call takes beyond weights and exchange buffers. weights_GB: of the layer on this
GPU. difference: norm of the difference to transformers' eager result over its norm. speedup: the best time of any
transformers row of this size, graphs included, over this one. floor_us: bytes of the chosen experts' weights over
measured HBM bandwidth, or operations over the rate of a large bf16 product, whichever takes longer.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import bandwidth, gpu_word, matrix_rate
from benchmarks.gpu.hf_blocks import IMPLEMENTATIONS, RECORDABLE, SHAPES, HfShape, use
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt import EPGroup, EPMoE
from eprt.config import MoEConfig
from eprt.ep.exchange import make_exchange
from eprt.gpu.device import take_device

NUM_RANKS = (1, 2, 4)
NEEDS_GPU = True
NEEDS = "transformers 5; NVLink"
TOKENS = (1, 8, 64, 512, 4096)
MOST_DECODED = 128  # tokens of a low-latency dispatch
MOST_RECORDED_BYTES = 16e9  # a graph keeps what its calls take
EXPERTS_PER_TOKEN = 8
EAGER = "transformers eager"

Call = Callable[[Tensor], Tensor]


class HfCase:
    """One block of one shape on this rank's device, and the layers made of it."""

    def __init__(self, group: EPGroup, name: str, shape: HfShape, formats: Sequence[str], device: str = "cuda"):
        self.group, self.name, self.device = group, name, device
        self.block: Any = shape.build(device)
        self.num_experts, self.hidden, self.width = self.block.experts.down_proj.shape
        self.layers = {weights: self._layer(weights) for weights in formats}

    def _layer(self, weight_format: str) -> EPMoE:
        """With both modes in one exchange."""
        payload = "fp8" if weight_format == "fp8" else "same"
        config = MoEConfig(
            self.hidden,
            self.width,
            self.num_experts,
            EXPERTS_PER_TOKEN,
            num_max_tokens_per_rank=max(TOKENS),
            payload=payload,
        )
        modes = {"normal": max(TOKENS), "low_latency": MOST_DECODED}
        ep = make_exchange(config, self.group, self.num_experts, "auto", modes, self.device)
        options = {"payload": payload, "weight_format": weight_format, "num_max_tokens_per_rank": max(TOKENS)}
        return EPMoE.from_hf(self.block, self.group, ep=ep, **options)

    def calls(self, tokens: int, implementations: list[str]) -> dict[str, Call]:
        """By the names of the rows, without graphs."""
        calls: dict[str, Call] = {}
        for name in implementations:
            calls[f"transformers {name}"] = lambda x, name=name: self._block_with(name, x)
        for weights, layer in self.layers.items():
            word = "eprt fp8" if weights == "fp8" else "eprt"
            calls[f"{word} normal"] = lambda x, layer=layer: layer(x, mode="normal")
            if tokens <= MOST_DECODED:
                calls[f"{word} low_latency"] = lambda x, layer=layer: layer(x, mode="low_latency")
        return calls

    def _block_with(self, implementation: str, x_1TH: Tensor) -> Tensor:
        use(self.block, implementation)
        out = self.block(x_1TH)
        return out[0] if isinstance(out, tuple) else out

    def is_recordable(self, what: str) -> bool:
        """Normal mode is where nothing is sent; between GPUs it tells the host how many rows come."""
        if what.startswith("transformers"):
            return what.split()[-1] in RECORDABLE
        return "low_latency" in what or self.group.size == 1

    def weights_bytes(self, what: str) -> int:
        if what.startswith("transformers"):
            return sum(parameter.nbytes for parameter in self.block.parameters())
        pool = self.layers["fp8" if "fp8" in what else "same"].pool
        others = [p for name, p in self.block.named_parameters() if not name.startswith("experts.")]
        return pool.expert_bytes * len(pool.parts[0]) + sum(parameter.nbytes for parameter in others)

    def floor_s(self, tokens: int, hbm: float, rate: float) -> float:
        """Uniform routing of all ranks' tokens."""
        pairs = tokens * EXPERTS_PER_TOKEN
        own = self.num_experts // self.group.size
        untouched = (1 - EXPERTS_PER_TOKEN / self.num_experts) ** (tokens * self.group.size)
        expert = 3 * self.hidden * self.width
        others = sum(p.numel() for name, p in self.block.named_parameters() if not name.startswith("experts."))
        moved = 2 * (expert * own * (1 - untouched) + others)
        return max(moved / hbm, 2 * (pairs * expert + tokens * others) / rate)

    def close(self) -> None:
        for layer in self.layers.values():
            layer.ep.close()


def recorded(call: Call, x: Tensor) -> Call:
    """A replay of the call on this x."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)

    def replay(_: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def peak_bytes(call: Call, x: Tensor) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def times_in_turns(group: EPGroup, calls: dict[str, Call], x: Tensor, samples: int) -> dict[str, Timing]:
    names = list(calls)
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    for turn in range(samples + 2):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            group.barrier()
            begin.record()
            calls[name](x)
            end.record()
            if turn >= 2:
                spans[name].append((begin, end))
    torch.cuda.synchronize()
    mine = {name: [begin.elapsed_time(end) / 1e3 for begin, end in row] for name, row in spans.items()}
    everyone = group.allgather(mine)
    return {
        name: Timing.from_samples(max((ranks[name] for ranks in everyone), key=statistics.median)) for name in names
    }


class HfBench:
    """The rows of one run.

    not_run: why transformers could not compute with an implementation, as far as it is known.
    """

    def __init__(self, group: EPGroup, arguments: argparse.Namespace):
        self.group, self.arguments = group, arguments
        self.hbm, self.rate = bandwidth(), matrix_rate()
        self.not_run: dict[str, str] = {}

    def rows(self, case: HfCase, tokens: int) -> list[dict[str, Any]]:
        generator = torch.Generator("cuda").manual_seed(self.group.rank)
        x = torch.randn(1, tokens, case.hidden, device="cuda", generator=generator).bfloat16()
        usable = [name for name in self.arguments.implementations if name not in self.not_run]
        calls, peaks, errors = {}, {}, {}
        expected: Tensor | None = None
        for name, call in case.calls(tokens, usable).items():
            if (result := self._tried(name, tokens, call, x)) is None:
                continue
            expected = result if expected is None else expected
            errors[name] = float((result - expected).float().norm() / expected.float().norm())
            calls[name], peaks[name] = call, peak_bytes(call, x)
            if case.is_recordable(name) and peaks[name] < MOST_RECORDED_BYTES:
                graph = f"{name}, graph"
                calls[graph], peaks[graph], errors[graph] = recorded(call, x), peaks[name], errors[name]
        times = times_in_turns(self.group, calls, x, self.arguments.samples)
        best_s = min((t.median_s for name, t in times.items() if name.startswith("transformers")), default=float("nan"))
        floor_us = case.floor_s(tokens, self.hbm, self.rate) * 1e6
        if self.arguments.profile:
            for name, call in calls.items():
                if "graph" not in name and (told := kernels_of(call, x)) and self.group.rank == 0:
                    print(f"-- {case.name}, {tokens} tokens, {name}: {told}", flush=True)
        return [
            {
                "shape": case.name,
                "tokens": tokens,
                "what": name,
                **timing.columns("layer"),
                "tokens_per_s": round(tokens * self.group.size / timing.median_s),
                "speedup": round(best_s / timing.median_s, 3),
                "floor_us": round(floor_us, 1),
                "peak_MB": round(peaks[name] / 1e6, 1),
                "weights_GB": round(case.weights_bytes(name) / 1e9, 2),
                "difference": round(errors[name], 5),
            }
            for name, timing in times.items()
        ]

    def _tried(self, name: str, tokens: int, call: Call, x: Tensor) -> Tensor | None:
        """The result, or None where transformers cannot: memory is short or a kernel is missing."""
        if not name.startswith("transformers"):
            return call(x)
        result, why = None, ""
        try:
            result = call(x)
        except torch.OutOfMemoryError:
            why = "out of memory"
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        told = [of_rank for of_rank in self.group.allgather(why) if of_rank]
        if not told:
            return result
        torch.cuda.empty_cache()
        implementation = name.split()[-1]
        self.not_run[f"{implementation}, {tokens} tokens" if "memory" in told[0] else implementation] = told[0]
        return None


def kernels_of(call: Call, x: Tensor, most: int = 12) -> str:
    """Where the time of one call goes, as a table."""
    call(x)
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(x)
    host_us = (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(x)
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    total, launches = sum(e.self_device_time_total for e in kernels), sum(e.count for e in kernels)
    lines = [f"{e.self_device_time_total:9.1f} us {e.count:4} x {e.key[:100]}" for e in kernels[:most]]
    return "\n".join([f"kernels {total:.0f} us in {launches} launches, host {host_us:.0f} us", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--formats", nargs="*", default=["same", "fp8"], choices=["same", "fp8"])
    parser.add_argument("--implementations", nargs="*", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="print where the time of each call goes")
    arguments = parser.parse_args()
    group = EPGroup.from_mpi()
    take_device("cuda", group)
    import transformers

    with torch.inference_mode():
        bench = HfBench(group, arguments)
        config = {"device": torch.cuda.get_device_name(), "gpus": group.size, "dtype": "bf16"}
        config |= {"torch": torch.__version__, "transformers": transformers.__version__, "not_run": bench.not_run}
        report = BenchmarkReport(f"hf_moe_{group.size}gpu_{gpu_word()}", config)
        for shape in arguments.shapes:
            case = HfCase(group, shape, SHAPES[shape], arguments.formats)
            for tokens in arguments.tokens:
                for row in bench.rows(case, tokens):
                    report.add_row(**row)
            case.close()
            del case
            torch.cuda.empty_cache()
    report.config["not_run"] = bench.not_run
    if group.rank == 0:
        report.finish()
    group.close()


if __name__ == "__main__":
    main()
