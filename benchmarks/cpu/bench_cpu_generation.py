"""Generation on CPUs beside llama.cpp: time to first token and time per token, at the shapes of DeepSeek models.

    python -m benchmarks.cpu.bench_cpu_generation --llama DIR     # DIR has llama-bench and llama-batched-bench

A server of ours with dummy weights and llama.cpp with a random GGUF of the same shape (random_gguf.py) take turns on
the same cores; ours is asked over HTTP and sleeps meanwhile.

ttft      of a prompt of so many tokens. llama.cpp: llama-bench -p, which leaves out sampling and HTTP
decode    a step of so many streams after prompts of --decode-prompt tokens. llama.cpp: llama-batched-bench
layout    ours alone, in the first format, once for each --layouts RANKSxTHREADS

--pairs: formats of weights, ours and llama.cpp's, joined by a colon; without a colon ours alone. speedup is
llama.cpp's time over ours.
"""

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.llama_peer import LlamaPeer
from benchmarks.cpu.random_gguf import write_gguf
from benchmarks.cpu.served_model import ServedModel, served
from benchmarks.shapes import DEEPSEEK_V2_LITE, DEEPSEEK_V3
from benchmarks.tools.report import RESULTS, BenchmarkReport
from eprt.ops import native

NUM_RANKS = 0
NEEDS = "llama-bench and llama-batched-bench in the folder --llama"
ON_REQUEST = "needs 20 GB of memory and llama.cpp"

SHAPES = {"v2-lite": DEEPSEEK_V2_LITE, "v3": DEEPSEEK_V3}
Samples = dict[tuple[str, int], dict[str, list[float]]]  # by what and size, then by who: seconds


@dataclass(frozen=True)
class GenerationCase:
    """What is measured."""

    config: Mapping[str, Any]  # config.json
    layers: int
    prompts: Sequence[int]
    streams: Sequence[int]
    decode_prompt: int
    decode_tokens: int
    turns: int
    flags: Sequence[str]  # more flags of our server

    @property
    def max_tokens(self) -> int:
        return max(*self.prompts, self.decode_prompt) + self.decode_tokens + 16

    def serve(self, weight_format: str, num_ranks: int):
        return served(self.config, weight_format, num_ranks, self.layers, self.max_tokens, *self.flags)

    def warm_up(self, model: ServedModel) -> None:
        """Touches weights and cache once."""
        model.prompt_seconds(self.prompts[0])
        model.decode_seconds(max(self.streams), self.decode_prompt, 2)

    def time_ours(self, model: ServedModel, into: Samples, who: str = "eprt") -> None:
        for tokens in self.prompts:
            into["ttft", tokens][who].append(model.prompt_seconds(tokens))
        for streams in self.streams:
            seconds = model.decode_seconds(streams, self.decode_prompt, self.decode_tokens)
            into["decode", streams][who].append(seconds)

    def time_llama(self, peer: LlamaPeer, file: Path, into: Samples) -> None:
        for tokens, seconds in peer.prompt_seconds(file, self.prompts).items():
            into["ttft", tokens]["llama"].append(seconds)
        decoded = peer.decode_seconds(file, self.streams, self.decode_prompt, self.decode_tokens)
        for streams, seconds in decoded.items():
            into["decode", streams]["llama"].append(seconds)


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def new_samples() -> Samples:
    return defaultdict(lambda: defaultdict(list))


def add_rows(report: BenchmarkReport, samples: Samples, **labels: Any) -> None:
    for (what, size), by_who in samples.items():
        median_s = {who: statistics.median(seconds) for who, seconds in by_who.items()}
        tokens = size if what == "decode" else 1
        row = {**labels, "what": what, "size": size, "samples": len(by_who["eprt"])}
        for who, seconds in median_s.items():
            row |= {f"{who}_ms": seconds * 1e3, f"{who}_spread_ms": (max(by_who[who]) - min(by_who[who])) * 1e3}
            row |= {f"{who}_tokens_s": tokens / seconds} if what == "decode" else {}
        if "llama" in median_s:
            row["speedup"] = median_s["llama"] / median_s["eprt"]
        report.add_row(**row)


def bench_pair(
    case: GenerationCase,
    pair: str,
    peer: LlamaPeer | None,
    work: Path,
    late: Callable[[], bool],
    save: Callable[[Samples], None],
) -> None:
    """late: whether no further turn should begin. save: called after each turn with what there is."""
    ours, _, theirs = pair.partition(":")
    file, samples = work / f"random-{theirs}.gguf", new_samples()
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write_gguf, file, case.config, case.layers, theirs) if theirs and peer else None
        try:
            with case.serve(ours, 1) as model:
                log(f"{pair}: server ready")
                case.warm_up(model)
                for turn in range(case.turns):
                    if turn and late():
                        break
                    log(f"{pair}: turn {turn}")
                    case.time_ours(model, samples)
                    save(samples)
                    if peer and written:
                        written.result()
                        log(f"{pair}: llama.cpp")
                        try:
                            case.time_llama(peer, file, samples)
                        except RuntimeError as error:
                            log(str(error))
                    save(samples)
        finally:
            file.unlink(missing_ok=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--llama", type=Path, help="folder of llama.cpp's programs; without it ours is measured alone")
    add("--no-repack", action="store_true", help="llama.cpp keeps weights as they are in the file, without AMX")
    add("--shape", choices=SHAPES, default="v2-lite")
    add("--layers", type=int, help="default: all of the shape's")
    add("--pairs", nargs="+", default=["int8:q8_0", "bf16:bf16", "fp8"], metavar="OURS[:THEIRS]")
    add("--layouts", nargs="*", default=[], metavar="RANKSxTHREADS")
    add("--cpus", type=int, default=16, help="how many of this machine's both may use, default %(default)s")
    add("--prompts", type=int, nargs="+", default=[128, 1024, 4096])
    add("--streams", type=int, nargs="+", default=[1, 4, 16])
    add("--decode-prompt", type=int, default=128)
    add("--decode-tokens", type=int, default=32)
    add("--turns", type=int, default=2)
    add("--flags", nargs="*", default=[], help="more flags of our server, without --, as chunk-size=2048")
    add("--work", type=Path, default=Path("/dev/shm"), help="where the GGUF file is written, default %(default)s")
    add("--seconds", type=float, default=1e9, help="after which no further turn, pair or layout begins")
    add("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args, start_s = parse(), time.monotonic()
    cpus = sorted(os.sched_getaffinity(0))[: args.cpus]
    os.sched_setaffinity(0, cpus)  # the server and llama.cpp inherit it

    def late() -> bool:
        return time.monotonic() - start_s > args.seconds

    config = json.loads((SHAPES[args.shape] / "config.json").read_text())
    layers = args.layers or config["num_hidden_layers"]
    flags = [part for flag in args.flags for part in f"--{flag}".split("=")]
    sizes = (args.prompts, args.streams, args.decode_prompt, args.decode_tokens)
    case = GenerationCase(config, layers, *sizes, args.turns, flags)
    peer = LlamaPeer(args.llama, len(cpus), not args.no_repack) if args.llama else None
    native.load()
    about = {"shape": args.shape, "layers": layers, "cpus": len(cpus), "isa": native.isa(), "flags": flags}
    about |= {
        "llama": peer.version() if peer else None,
        "repacks": peer.repacks if peer else None,
        "decode_prompt": args.decode_prompt,
    }
    report = BenchmarkReport(f"cpu_generation_{args.shape}_{native.isa()}", about)
    for pair in args.pairs:
        done = len(report.rows)

        def save(samples: Samples, pair: str = pair, done: int = done) -> None:
            del report.rows[done:]
            add_rows(report, samples, weights=pair, layout=f"1x{len(cpus)}")
            report.write(args.out)

        if not late():
            bench_pair(case, pair, peer, args.work, late, save)
            report.finish(args.out)
    for layout in args.layouts:
        if late():
            break
        ours, samples = args.pairs[0].partition(":")[0], new_samples()
        with case.serve(ours, int(layout.partition("x")[0])) as model:
            case.warm_up(model)
            for _ in range(args.turns):
                case.time_ours(model, samples)
        add_rows(report, samples, weights=ours, layout=layout)
        report.finish(args.out)


if __name__ == "__main__":
    main()
