"""One MoE layer with and without overlap, and its timeline: `eprt bench layer -n N`.

Layers of DeepSeek-V3's width (on the CPU: of the demo model's) with dummy weights: attention, gate, dispatch, routed
and shared experts, combine. --experts-per-rank 32 is a rank's share of 256 experts over eight; each token goes to
top-k of all. A layer's time is that of --layers of them divided by their number, of the slowest rank; overlaps take
turns in one run. On GPUs decodes (low latency, --context tokens behind each request) are replays of CUDA graphs;
prompts (normal mode, --prompt tokens each) are launched anew, with what the host adds. sbo_8: with --overlap-sms 8;
tbo_8: the experts' products leave 8 SMs to the exchange.
X_saves: 1 - X / none, sample by sample. X_exposed_us: in the timeline of a layer on rank 0, exchange or idleness where
nothing is computed (decodes launched one by one there, not replayed); none_exposed_us, and none_shared_us of the shared
expert, are what there is to hide (decodes of one CPU rank have no none_shared_us: one operator computes it with all
experts). X_hidden: 1 - X_exposed / none_exposed. Prompts also tell what two-batch overlap could save at most, and what
power it draws (two_batch.py).

layer_decode_N, layer_prefill_N: the tables. layer_timeline_*: spans as JSON, and the picture (matplotlib).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.serving.layer_timeline import Span, Tracer, draw, exposed_us, period_us, save, stage_us
from benchmarks.serving.two_batch import PAUSE_S, TwoBatchBound, power_columns, rested_times
from benchmarks.shapes import DEEPSEEK_V3, DEMO_MODEL
from benchmarks.tools.report import RESULTS, BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt import EngineConfig, EPGroup, ops
from eprt.gpu.device import take_device
from eprt.layers.batch import ForwardBatch, Split
from eprt.layers.lanes import Lanes
from eprt.layers.layer_cache import LayerCache
from eprt.layers.layer_step import Microbatch
from eprt.layers.overlap import run_layers
from eprt.layers.sm_split import device_sms
from eprt.models.deepseek import DecoderLayer
from eprt.models.loader import load_model

NUM_RANKS = 2
NAME = "layer"
NEEDS_GPU = True
NEEDS = "NVLink; flags without --; CPU ranks too, by --device cpu"
PAGE_SIZE, VOCAB = 64, 1024


class LayerBench:
    """The layers of one rank, and batches for them."""

    def __init__(self, group: EPGroup, arguments: argparse.Namespace):
        self.group, self.arguments = group, arguments
        self.device = take_device(arguments.device, group)
        self.on_gpu = self.device.type == "cuda"
        most_requests = max([1, *arguments.requests])
        most_prompt_tokens = max([0, *arguments.prefill])
        most_tokens = max(most_prompt_tokens, most_requests)
        engine = EngineConfig(
            _shape(self.on_gpu, arguments, group.size),
            device=self.device.type,
            load_format="dummy",
            num_hidden_layers=arguments.layers,
            overlap="tbo",
            chunk_size=2 * most_tokens,
            low_latency_max_tokens=most_requests,
            ep_payload=arguments.payload,
        )
        self.model = load_model(engine, group)
        self.layers = [MoEOnly(layer) for layer in self.model.layers] if arguments.moe_only else self.model.layers
        config = self.model.config
        prompts = -(-most_prompt_tokens // arguments.prompt) * -(-arguments.prompt // PAGE_SIZE)
        pages = max(most_requests * -(-arguments.context // PAGE_SIZE), prompts)
        shape = (len(self.model.layers), pages, PAGE_SIZE, config.kv_dim)
        self.cache_L = [LayerCache(x) for x in torch.randn(shape, dtype=config.dtype, device=self.device)]
        if self.on_gpu:
            from benchmarks.tools.gpu_timer import GpuTimer

            self.timer = GpuTimer(group)

    def decodes(self, requests: int, overlap: str) -> ForwardBatch:
        """Every request at the last position of its own pages."""
        pages = -(-self.arguments.context // PAGE_SIZE)
        table = torch.arange(requests * pages, dtype=torch.int32).view(requests, pages)
        position = torch.full((requests,), pages * PAGE_SIZE - 1)
        return self._batch(
            position,
            table[:, -1].long() * PAGE_SIZE + PAGE_SIZE - 1,
            table,
            list(range(requests + 1)),
            requests,
            "low_latency",
            overlap,
        )

    def prompts(self, tokens: int, overlap: str) -> ForwardBatch:
        length = min(self.arguments.prompt, tokens)
        starts = [*range(0, tokens, length), tokens]
        position = torch.cat([torch.arange(end - begin) for begin, end in pairwise(starts)])
        pages = -(-length // PAGE_SIZE)
        table = torch.arange((len(starts) - 1) * pages, dtype=torch.int32).view(-1, pages)
        request = torch.repeat_interleave(torch.arange(len(starts) - 1), torch.tensor(starts).diff())
        slot = table[request, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE
        return self._batch(position, slot, table, starts, 0, "normal", overlap)

    def _batch(
        self, position: Tensor, slot: Tensor, table: Tensor, starts: list[int], decodes: int, mode: str, overlap: str
    ) -> ForwardBatch:
        seq_len = position[torch.tensor(starts[1:]) - 1] + 1
        batch = ForwardBatch(
            token_id_T=torch.randint(VOCAB, (len(position),)),
            position_T=position,
            kv_slot_T=slot,
            page_table_BP=table,
            seq_len_B=seq_len.int(),
            query_start_B1=torch.tensor(starts, dtype=torch.int32),
            num_decode=decodes,
            logits_idx=torch.arange(len(position)),
        )
        moved = {name: value.to(self.device) for name, value in vars(batch).items() if isinstance(value, Tensor)}
        split = Split.in_middle(starts) if overlap == "tbo" else None
        return replace(batch, **moved, mode=mode, overlap=overlap, split=split)

    def call(self, batch: ForwardBatch, lanes: Lanes | None = None) -> Callable[[], Tensor]:
        """lanes: default the model's."""
        generator = torch.Generator(self.device).manual_seed(self.group.rank)
        x_TH = torch.randn(batch.num_tokens, self.model.config.hidden_size, device=self.device, generator=generator).to(
            self.model.config.dtype
        )

        return lambda: run_layers(self.layers, x_TH, batch, self.cache_L, lanes or self.model.lanes)

    def times(self, calls: dict[str, Callable[[], Any]], samples: int, as_graphs: bool) -> dict[str, list[float]]:
        """Seconds of one layer, for each sample that of the slowest rank."""
        for call in calls.values():
            call()
        if not self.on_gpu:
            mine = _wall_times(calls, samples, self.group)
        elif as_graphs:
            chains = self.timer.chains({name: [call] for name, call in calls.items()}, 1, samples)
            mine = {name: [us / 1e6 for us in row] for name, row in chains.items()}
        else:
            mine = _event_times(calls, samples, self.timer)
        everyone = self.group.allgather(mine)
        layers = len(self.model.layers)
        return {name: [max(row) / layers for row in zip(*(ranks[name] for ranks in everyone))] for name in mine}

    def two_batch(self, calls: dict[str, Callable[[], Any]], size: int) -> dict[str, Any]:
        """Columns of what two-batch overlap of so many prompt tokens saves after a pause, could save at most, and
        draws. calls: with "none" and "tbo"."""
        one_lane, layers = Lanes(), len(self.model.layers)
        halves = self.call(self.prompts(size, "tbo"), one_lane)
        rested = rested_times(self.group, calls, min(self.arguments.samples, 8), self._begin if self.on_gpu else None)
        plain, cut = (
            [self.timeline(call, lanes) for _ in range(3)]
            for call, lanes in ((calls["none"], self.model.lanes), (halves, one_lane))
        )
        bound = TwoBatchBound(
            none_us=statistics.median(map(period_us, plain)),
            halves_us=statistics.median(map(period_us, cut)),
            exposed_us=statistics.median(map(exposed_us, cut)),
            sms_share=self.model.exchange["normal"].num_sms / device_sms() if self.on_gpu else 0.0,
        )
        us = {f"{name}_rested_us": statistics.median(row) * 1e6 / layers for name, row in rested.items()}
        row = {name: round(value, 1) for name, value in us.items()} | bound.columns()
        drawn = {name: calls[name] for name in ("none", "tbo")}
        return row | (power_columns(self.group, drawn, layers) if self.on_gpu else {})

    def timeline(self, call: Callable[[], Any], lanes: Lanes | None = None) -> list[Span]:
        """One pass with the host far ahead of the GPU, all ranks begun together. lanes: those of the call."""
        if self.on_gpu:
            self._begin()
        else:
            self.group.barrier()
        lanes = lanes or self.model.lanes
        lanes.trace = tracer = Tracer(self.on_gpu)
        call()
        lanes.trace = None
        return tracer.spans()

    def _begin(self) -> None:
        """All ranks' GPUs at the same point after a pause, the host far ahead of them."""
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        self.group.barrier()
        torch.cuda._sleep(60_000_000)
        self.timer.meet()

    def close(self) -> None:
        if self.on_gpu:
            self.timer.close()
        self.model.close()


def _shape(on_gpu: bool, arguments: argparse.Namespace, num_ranks: int) -> str:
    """A directory with the config.json of the layers."""
    config = json.loads(((DEEPSEEK_V3 if on_gpu else DEMO_MODEL) / "config.json").read_text())
    config |= {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0, "vocab_size": VOCAB}
    config |= {"n_routed_experts": arguments.experts_per_rank * num_ranks, "num_hidden_layers": arguments.layers}
    if not on_gpu:
        config |= {"max_position_embeddings": 1 << 16}
    folder = Path(tempfile.mkdtemp(prefix="eprt-layer-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


class MoEOnly:
    """A layer without attention: the MoE block's input is the layer's, normalised."""

    def __init__(self, layer: DecoderLayer):
        self.mlp, self._norm = layer.mlp, layer.mlp_norm

    def attend(self, microbatch: Microbatch, cache: LayerCache) -> tuple[Tensor, Tensor]:
        return self._norm(microbatch.x_TH), microbatch.x_TH

    def add_output(self, microbatch: Microbatch, y_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        return ops.add_rows(microbatch.x_TH, y_TH, shared_TH)


def _in_turns(calls: dict[str, Callable[[], Any]], samples: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every call once a sample, each time another one first."""
    named = list(calls.items())
    for turn in range(samples):
        yield from (named[(turn + i) % len(named)] for i in range(len(named)))


def _wall_times(calls: dict[str, Callable[[], Any]], samples: int, group: EPGroup) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in _in_turns(calls, samples):
        group.barrier()
        start = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - start)
    return seconds


def _event_times(calls: dict[str, Callable[[], Any]], samples: int, timer: Any) -> dict[str, list[float]]:
    spans: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for name, call in _in_turns(calls, samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timer.ready()
        begin.record()
        call()
        end.record()
        spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [b.elapsed_time(e) / 1e3 for b, e in row] for name, row in spans.items()}


def _row(what: str, size: int, times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """The median, and the ratios sample by sample, so that drift cancels."""
    row: dict[str, Any] = {what: size}
    for name, seconds in times.items():
        row |= Timing.from_samples(seconds).columns(name)
    for name in list(times)[1:]:
        row[f"{name}_saves"] = round(1 - statistics.median(a / b for a, b in zip(times[name], times["none"])), 4)
    if what == "tokens":
        for name, seconds in times.items():
            row[f"{name}_tokens_per_s"] = round(tokens / statistics.median(seconds))
    return row


def _exposure(panels: dict[str, list[Span]]) -> dict[str, Any]:
    """Columns of what the overlaps hide."""
    exposed = {name: exposed_us(spans) for name, spans in panels.items()}
    shared_us = stage_us(panels["none"], "shared")
    row: dict[str, Any] = {} if shared_us is None else {"none_shared_us": round(shared_us, 1)}
    row |= {f"{name}_exposed_us": round(us, 1) for name, us in exposed.items()}
    return row | {
        f"{name}_hidden": round(1 - us / exposed["none"], 3) for name, us in exposed.items() if name != "none"
    }


def _bench(
    bench: LayerBench, make: Callable[[int, str], ForwardBatch], what: str, sizes: list[int], overlaps: list[str]
):
    arguments, group = bench.arguments, bench.group
    where = f"{group.size}{'gpu' if bench.on_gpu else 'cpu'}" + ("_moe_only" if arguments.moe_only else "")
    name = "decode" if what == "requests" else "prefill"
    config = {**vars(arguments), "ranks": group.size, "device": _device_name(bench)}
    report = BenchmarkReport(f"layer_{name}_{where}", config)
    panels = {}
    for size in sizes:
        calls = {overlap: bench.call(make(size, overlap)) for overlap in overlaps}
        if bench.on_gpu:
            divided = "sbo" if what == "requests" else "tbo"
            calls |= {f"{divided}_{n}": bench.call(replace(make(size, divided), overlap_sms=n)) for n in arguments.sms}
        times = bench.times(calls, arguments.samples, as_graphs=what == "requests")
        bench.timeline(calls["none"])
        panels = {overlap: bench.timeline(calls[overlap]) for overlap in overlaps}
        bound = bench.two_batch(calls, size) if what == "tokens" else {}
        report.add_row(**_row(what, size, times, size), **_exposure(panels), **bound)
    if group.rank == 0:
        report.finish(RESULTS)
        title = f"one MoE layer, {sizes[-1]} {what} per rank, {group.size} ranks, {config['device']}: rank 0"
        path = RESULTS / f"layer_timeline_{name}_{where}.json"
        save(path, title, panels)
        try:
            print(draw(path))
        except ImportError:
            print(
                f"{path}: no picture without matplotlib (pip install 'eprt[plots]'); later, or elsewhere, "
                f"python -m benchmarks.serving.layer_timeline {path.name}"
            )


def _device_name(bench: LayerBench) -> str:
    return torch.cuda.get_device_name() if bench.on_gpu else "CPU"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eprt bench layer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-n", "--ranks", type=int, metavar="N", help="ranks to start with mpirun, default 2")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default %(default)s")
    add("--layers", type=int, default=3, metavar="N", help="of which each is timed, default %(default)s, the fewest")
    add("--experts-per-rank", type=int, default=32, metavar="N", help="default %(default)s")
    add(
        "--requests",
        type=int,
        nargs="*",
        default=[16, 32, 64],
        metavar="N",
        help="decodes per rank, default 16 32 64; empty: none",
    )
    add("--context", type=int, default=4096, metavar="N", help="tokens behind each decode, default %(default)s")
    add(
        "--prefill",
        type=int,
        nargs="*",
        default=[8192, 16384],
        metavar="N",
        help="prompt tokens per rank, default 8192 16384; empty or 0: none",
    )
    add("--prompt", type=int, default=1024, metavar="N", help="tokens of one prompt, default %(default)s")
    add("--payload", default="fp8", choices=("same", "fp8"), help="what dispatch sends, default %(default)s")
    add("--sms", type=int, nargs="*", default=[], metavar="N", help="also try sbo and tbo with so many SMs left")
    add("--moe-only", action="store_true", help="without attention: what overlap saves of gate to combine")
    add("--samples", type=int, default=20, metavar="N", help="of each time, default %(default)s")
    arguments = parser.parse_args(argv)
    arguments.prefill = [tokens for tokens in arguments.prefill if tokens != 0]
    if arguments.layers < 3:
        parser.error(f"--layers {arguments.layers}: at least 3, the timeline shows the second between its neighbours")
    least = {"ranks": 1, "experts_per_rank": 1, "requests": 1, "context": 1, "prefill": 0, "prompt": 1, "sms": 1}
    for name, bound in (*least.items(), ("samples", 1)):
        values = getattr(arguments, name)
        values = values if isinstance(values, list) else [] if values is None else [values]
        if min(values, default=bound) < bound:
            parser.error(f"--{name.replace('_', '-')} {' '.join(map(str, values))}: must be at least {bound}")
    if arguments.device != "cpu" and not torch.cuda.is_available() and (arguments.device == "cuda" or arguments.sms):
        parser.error(f"--device {arguments.device}: torch {torch.__version__} finds no GPU here; use --device cpu")
    if arguments.sms and arguments.device == "cpu":
        parser.error("--sms: divides a GPU; there is nothing to divide with --device cpu")
    return arguments


def main() -> None:
    arguments = parse()
    group = EPGroup.from_mpi()
    with torch.inference_mode():
        bench = LayerBench(group, arguments)
        if arguments.requests:
            _bench(bench, bench.decodes, "requests", arguments.requests, ["none", "sbo", "tbo"])
        if arguments.prefill:
            _bench(bench, bench.prompts, "tokens", arguments.prefill, ["none", "tbo"])
        bench.close()
    group.close()


if __name__ == "__main__":
    main()
