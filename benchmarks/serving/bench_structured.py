"""What structured outputs cost: time per token of 32 streams per rank, held to a form and free, with the same texts.

    python -m benchmarks.serving.bench_structured
    mpirun -n 2 python -m benchmarks.serving.bench_structured --device cuda --drafts 1

The texts of a form are drawn once. Then two engines generate them again, one held to the form and one free: each token
gets a logit that nothing else reaches, in both. So the forward passes have the same rows and the same tokens, and what
is left is what the form costs. The engines take turns step by step, so that both meet whatever else the machine does;
on GPUs and with drafts text by text. Only steps count in which every stream decodes. What the benchmark itself does in
a step is taken off.

step: median over such steps of the wall time, per token; cpu: likewise of processor time of all threads. more: how much
longer a held step takes, as a share of the free one: the median over all pairs of steps that stand beside each other,
the interval that contains the true median in 19 of 20 runs (low, high), and the quartiles of the pairs. masks: how long
the step itself makes masks, waits for them and applies them; as a share of the free step.
Takes one to two minutes.
"""

import argparse
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt import LLM, SamplingParams, StructuredOutputs
from eprt.engine.engine import Engine
from eprt.engine.masks import MaskMaker, Masks
from eprt.gpu.upload import upload

NUM_RANKS = 0

NUM_STREAMS = 32
_ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "regex": StructuredOutputs(regex="([a-z ]*;){999}"),
    "json_schema": StructuredOutputs(json={"type": "array", "items": _ITEM, "minItems": 1000}),
    "json_objects": StructuredOutputs(json={"type": "array", "items": {"type": "object"}, "minItems": 1000}),
    "grammar": StructuredOutputs(grammar='start: line{999}\nline: /[a-z]+/ "=" /[0-9]+/ ";"'),
}
_PROMPT = "Tell me about it."
_ABOVE_ALL = 1e4
_WAYS = ("free", "held")


class MaskClock:
    """How long masks take, in all engines of this process."""

    def __init__(self):
        self.total_s = 0.0
        for owner, name in ((MaskMaker, "begin"), (MaskMaker, "finish"), (Masks, "apply")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function):
        def call(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            self.total_s += time.perf_counter() - start
            return result

        return call


@dataclass
class Times:
    """Of single steps, seconds per token."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)

    def as_array(self, num_steps: int, as_pairs: bool) -> np.ndarray:
        """[wall, cpu, masks; steps]. as_pairs: else one column, of medians."""
        times = np.array([self.wall[:num_steps], self.cpu[:num_steps], self.masks[:num_steps]])
        return times if as_pairs else np.median(times, axis=1, keepdims=True)


class Speaker:
    """An engine that generates texts, and what its steps take."""

    def __init__(self, llm: LLM, clock: MaskClock):
        self.engine: Engine = llm.engine
        self.times = Times()
        self.said_NT: list[list[int]] = []
        self._clock, self._tokenizer = clock, llm.tokenizer
        self._texts_NT: np.ndarray | None = None  # int64: what it is made to say; None: anything
        self._forward, self.engine.runner.forward = self.engine.runner.forward, self.forward
        self._own_s = 0.0

    def begin(self, form: StructuredOutputs | None, num_tokens: int, texts_NT: np.ndarray | None) -> None:
        self._texts_NT, self.times, self.said_NT = texts_NT, Times(), [[] for _ in range(NUM_STREAMS)]
        assert self._tokenizer is not None
        prompt, first = self._tokenizer.encode(_PROMPT), self.engine.group.rank * NUM_STREAMS
        for i in range(NUM_STREAMS):
            ends = {"ignore_eos": form is None, "structured_outputs": form}
            params = SamplingParams(max_tokens=num_tokens, temperature=1, seed=first + i, **ends)
            self.engine.add_request(str(i), prompt, params)

    @property
    def is_decoding(self) -> bool:
        scheduler = self.engine.scheduler
        return len(scheduler.running) == NUM_STREAMS and all(self.said_NT)

    def step(self) -> bool:
        """False once nothing is left to do, on any rank."""
        counts, self._own_s, self._clock.total_s = self.is_decoding, 0.0, 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        result = self.engine.step()
        wall, cpu = time.perf_counter() - wall - self._own_s, time.process_time() - cpu - self._own_s
        if counts and result.num_tokens >= NUM_STREAMS:
            self.times.wall.append(wall / NUM_STREAMS)
            self.times.cpu.append(cpu / NUM_STREAMS)
            self.times.masks.append(self._clock.total_s / NUM_STREAMS)
        for output in result.outputs:
            assert output.token_id >= 0, output
            self.said_NT[int(output.request_id)].append(output.token_id)
        return not result.all_idle

    def finish(self) -> None:
        while self.step():
            pass

    def forward(self, batch, wants_hidden: bool):
        logits_XV, *rest = self._forward(batch, wants_hidden)
        start = time.perf_counter()
        schedule, rows = self.engine._schedule, self.engine._rows
        assert schedule is not None
        if self._texts_NT is not None and len(schedule.row_X):
            position_X = (rows.length_M - rows.num_prompt_M)[schedule.row_X]
            if schedule.drafts is not None:
                position_X += schedule.drafts.offset_X
            seed_X = rows.sampling_M["seed"][schedule.row_X].astype(np.int64) % NUM_STREAMS
            token_X = self._texts_NT[seed_X, position_X.clip(max=self._texts_NT.shape[1] - 1)]
            (token_X,) = upload([token_X], logits_XV.device)
            at_X = torch.arange(len(token_X), device=logits_XV.device)
            logits_XV[at_X, token_X] = _ABOVE_ALL
        self._own_s = time.perf_counter() - start
        return logits_XV, *rest


def measure_form(
    speakers: dict[str, Speaker], form: StructuredOutputs, rounds: int, num_tokens: int, in_turns: bool
) -> dict[str, float]:
    """in_turns: step by step, not text by text."""
    speakers["held"].begin(form, num_tokens, None)
    speakers["held"].finish()
    texts_NT = np.array(speakers["held"].said_NT, dtype=np.int64)
    assert texts_NT.shape == (NUM_STREAMS, num_tokens)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in _WAYS}
    for turn in range(rounds):
        order = _WAYS[:: 1 if turn % 2 else -1]
        for name in order:
            speakers[name].begin(form if name == "held" else None, num_tokens, texts_NT)
            while not speakers[name].is_decoding:
                speakers[name].step()
            if not in_turns:
                speakers[name].finish()
        for _ in range(num_tokens - 1 if in_turns else 0):
            for name in order:
                speakers[name].step()
        num_steps = min(len(speakers[name].times.wall) for name in _WAYS)
        for name in order:
            speakers[name].finish()
            assert (np.array(speakers[name].said_NT) == texts_NT).all(), name
            rows[name].append(speakers[name].times.as_array(num_steps, in_turns))
    return summary(*(np.concatenate(rows[name], axis=1) for name in _WAYS))


def summary(free: np.ndarray, held: np.ndarray) -> dict[str, float]:
    """free, held: [wall, cpu, masks; pairs], seconds per token."""
    free_s, held_s = np.median(free, axis=1), np.median(held, axis=1)
    columns = {"pairs": free.shape[1]}
    for row, what in ((0, "step"), (1, "cpu")):
        columns |= {f"free_{what}_us": free_s[row] * 1e6, f"held_{what}_us": held_s[row] * 1e6}
    columns |= {"masks_us": held_s[2] * 1e6, "masks_percent": 100 * held_s[2] / free_s[0]}
    for row, what in ((0, "step"), (1, "cpu")):
        more = 100 * (held[row] - free[row]) / free_s[row]
        names = ("percent", "low_percent", "high_percent", "p25_percent", "p75_percent")
        values = (np.median(more), *median_interval(more), *np.quantile(more, (0.25, 0.75)))
        columns |= {f"{what}_more_{name}": float(value) for name, value in zip(names, values)}
    return columns


def median_interval(values: np.ndarray) -> tuple[float, float]:
    """Contains the median of what the values were drawn from in 95 % of all cases."""
    ordered, half = np.sort(values), 0.98 * np.sqrt(len(values))
    at = np.clip([np.floor(len(values) / 2 - half), np.ceil(len(values) / 2 + half)], 0, len(values) - 1).astype(int)
    return float(ordered[at[0]]), float(ordered[at[1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    options = {"kv_cache_gb": 0.05, "device": args.device, "num_speculative_tokens": args.drafts}
    with ExitStack() as stack:
        first = stack.enter_context(LLM(DEMO_MODEL, **options))
        llms = [first, *(stack.enter_context(LLM(DEMO_MODEL, first.group, **options)) for _ in _WAYS[1:])]
        clock = MaskClock()
        speakers = {name: Speaker(llm, clock) for name, llm in zip(_WAYS, llms)}
        in_turns = args.device == "cpu" and not args.drafts
        rows = {name: measure_form(speakers, FORMS[name], args.rounds, args.tokens, in_turns) for name in args.forms}
        if first.group.rank == 0:
            config = {"model": "demo", "ranks": first.group.size, "streams_per_rank": NUM_STREAMS, **vars(args)}
            del config["forms"]
            where = "" if args.device == "cpu" else f"_gpu_{first.group.size}" + ("_drafts" if args.drafts else "")
            report = BenchmarkReport(f"structured_outputs{where}", config)
            for name, columns in rows.items():
                report.add_row(form=name, **columns)
            report.finish()


if __name__ == "__main__":
    main()
