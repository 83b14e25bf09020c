"""A server of DeepSeek-V3's width on GPUs, over HTTP: latency and goodput by request rate and chunk size.

    python -m benchmarks.serving.bench_http_gpu                    # 2 GPUs, 20 layers, dummy weights: 2 minutes
    python -m benchmarks.serving.bench_http_gpu --ranks 4 --layers 40
    python -m benchmarks.serving.bench_http_gpu --model examples/demo_model/checkpoint --device cpu --rate 4 8

Nothing is simulated: for each --chunk-size a server is started as `eprt serve` starts one, and asked as `eprt bench
serve` asks one (open_loop.py), by prompts of random tokens at each --rate for --seconds. What is not DeepSeek-V3's own:
weights are random, and there are --layers layers of 61, as many as fit with all 256 experts on the GPUs there are; all
61 take so much longer. Writes the results and their picture.

    ttft, itl   of all requests of a rate; see open_loop.py, goodput too
    tokens_s_gpu   output tokens per second and GPU, from the first arrival to the last answer
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.serving.open_loop import TIERS, OpenLoopLoad, drive, summary
from benchmarks.shapes import DEEPSEEK_V3
from benchmarks.tools.report import RESULTS, BenchmarkReport
from eprt import machine
from eprt.serve.running import RunningServer

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "NVLink; matplotlib for the picture"

_START_S = 90.0  # within which the server must be ready
_WARM_UP = OpenLoopLoad(8.0, 1.0, 64, 16, 0.5, 500, 1)
_LINES = (("ttft_p95_ms", "time to first token, p95, ms"), ("itl_p95_ms", "time between tokens, p95, ms"))


def server_flags(args: argparse.Namespace, chunk_size: int) -> list[str]:
    flags = ["--device", args.device, "--chunk-size", str(chunk_size), "--max-num-seqs", str(args.max_num_seqs)]
    flags += ["--kv-cache-gb", f"{args.kv_cache_gb:g}", "--max-queue", "100000", "--bind", "none"]
    if args.model == DEEPSEEK_V3:
        flags += ["--load-format", "dummy", "--num-hidden-layers", str(args.layers), "--skip-tokenizer-init"]
        flags += ["--max-model-len", str(4 * args.input_tokens + 4 * args.output_tokens), "--spare-experts", "0"]
    if args.device == "cuda":
        flags += ["--ep-payload", "fp8", "--low-latency-max-tokens", str(args.max_num_seqs)]
        sizes = [size for size in (8, 16, 32, 64, 128, 256) if size <= args.max_num_seqs]
        flags += ["--graph-sizes", *map(str, sizes)]
    return flags


def loads(args: argparse.Namespace) -> list[OpenLoopLoad]:
    lengths = args.input_tokens, args.output_tokens, args.spread
    return [OpenLoopLoad(rate, args.seconds, *lengths, 500, seed) for seed, rate in enumerate(args.rate)]


def measure_server(report: BenchmarkReport, args: argparse.Namespace, chunk_size: int) -> None:
    """One server, all rates."""
    with RunningServer(args.model, args.ranks, *server_flags(args, chunk_size), timeout_s=_START_S) as server:
        asyncio.run(drive(server.url, server.model, _WARM_UP))
        for load in loads(args):
            served, took_s = asyncio.run(drive(server.url, server.model, load))
            row = summary(load, served, took_s)
            for error in [one.error for one in served if one.error is not None][:1]:
                print(f"{row['failed']} of {row['requests']} requests failed, one with {error}", flush=True)
            report.add_row(chunk_size=chunk_size, **row, tokens_s_gpu=row["tokens_s"] / args.ranks, took_s=took_s)


def page_table(content: Mapping[str, Any]) -> str:
    """The table of docs/figures-serving.md. Goodput of the tiers in their order."""
    percents = (50, 95, 99)
    lines = [
        "| `--chunk-size` | requests/s | time to first token ms, p50, p95, p99 | between tokens ms, p50, p95, p99 | "
        "tokens/s per GPU | goodput |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        cells = [
            str(row["chunk_size"]),
            f"{row['rate']:g}",
            ", ".join(f"{row[f'ttft_p{percent}_ms']:.0f}" for percent in percents),
            ", ".join(f"{row[f'itl_p{percent}_ms']:.1f}" for percent in percents),
            f"{row['tokens_s_gpu']:.0f}",
            ", ".join(f"{row[f'goodput_{ttft:g}s_{itl * 1e3:g}ms']:.1f}" for ttft, itl in TIERS),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path) -> Path:
    """Tails of latency and throughput against the rate, a line for each chunk size. Returns the PNG beside the file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = json.loads(path.read_text())
    rows, config = content["rows"], content["config"]
    panels = (*_LINES, ("tokens_s_gpu", "output tokens/s per GPU"))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12, 3.8), layout="constrained")
    for axis, (column, label) in zip(axes, panels):
        for chunk_size in dict.fromkeys(row["chunk_size"] for row in rows):
            chosen = [row for row in rows if row["chunk_size"] == chunk_size]
            points = [row["rate"] for row in chosen], [row[column] for row in chosen]
            axis.plot(*points, marker="o", label=f"--chunk-size {chunk_size}")
        axis.set(xlabel="requests/s", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    layers = f", {config['layers']} layers" if config["layers"] else ""
    figure.suptitle(
        f"{config['model']}{layers}, {config['ranks']} {config['device']}, {config['input_tokens']} tokens in, "
        f"{config['output_tokens']} out",
        fontsize=10,
    )
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=DEEPSEEK_V3, help="default: DeepSeek-V3's shape with dummy weights")
    add("--device", default="cuda", help="cuda or cpu")
    add("--ranks", type=int, default=2, help="GPUs")
    add("--layers", type=int, default=20, help="of DeepSeek-V3's 61, default %(default)s")
    add("--chunk-size", type=int, nargs="+", default=[512, 2048, 8192], metavar="N")
    add("--rate", type=float, nargs="+", default=[4.0, 8.0, 16.0, 24.0], metavar="R", help="requests per second")
    add("--seconds", type=float, default=5.0, help="how long requests arrive at each rate, default %(default)s")
    add("--input-tokens", type=int, default=2048, metavar="N", help="of a prompt, default %(default)s")
    add("--output-tokens", type=int, default=128, metavar="N", help="of an answer, default %(default)s")
    add("--spread", type=float, default=0.5, help="lengths vary by this fraction either way, default %(default)s")
    add("--max-num-seqs", type=int, default=128, metavar="N", help="of each rank, default %(default)s")
    add("--kv-cache-gb", type=float, default=16.0, metavar="GB", help="of each rank, default %(default)s")
    add("--draw", type=Path, metavar="FILE.json", help="only the picture of earlier results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, directory: Path = RESULTS) -> None:
    args = parse(argv)
    if args.draw:
        print(draw(args.draw))
        return
    settings = ("ranks", "input_tokens", "output_tokens", "spread", "seconds", "max_num_seqs", "kv_cache_gb")
    device = machine.gpus()[0].split(",")[0] if args.device == "cuda" else "CPU ranks"
    layers = args.layers if args.model == DEEPSEEK_V3 else None
    config = {"device": device, "model": args.model.resolve().name, "layers": layers}
    report = BenchmarkReport(
        f"http_{args.ranks}{'gpu' if args.device == 'cuda' else 'cpu'}",
        {**config, **{name: getattr(args, name) for name in settings}},
    )
    written = directory / f"{report.name}.json"
    for chunk_size in args.chunk_size:
        measure_server(report, args, chunk_size)
        report.finish(directory)  # whoever ends this early has what was measured
    if find_spec("matplotlib"):
        print(draw(written))
    else:
        print(f"no matplotlib here; elsewhere: python -m benchmarks.serving.bench_http_gpu --draw {written.name}")


if __name__ == "__main__":
    main()
