"""What structured outputs cost: time per token of 32 streams per rank, held to a form and free, with the same texts.

    python -m benchmarks.serving.bench_structured
    mpirun -n 2 python -m benchmarks.serving.bench_structured --device cuda --drafts 1

The texts of a form are drawn once. Then they are generated again and again, held to the form and free, in turn: each
token gets a logit that nothing else reaches, in both. So the forward passes have the same rows and the same tokens, and
what is left is what the form costs. Only steps count in which every stream decodes.

step: median over such steps of the wall time, per token; cpu: likewise of processor time of all threads. more: median
over the rounds, each of which compares two runs beside each other. masks: how long the step itself makes masks, waits
for them and applies them, which a loaded machine blurs least; as a share of the free step.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt import LLM, SamplingParams, StructuredOutputs
from eprt.engine.masks import Masks
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
_ABOVE_ALL = 1e4


@dataclass
class Times:
    """Of the steps of one run in which every stream decodes, in seconds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)

    def per_token(self) -> dict[str, float]:
        """Microseconds."""
        samples = {"step": self.wall, "cpu": self.cpu, "masks": self.masks}
        return {name: statistics.median(values) / NUM_STREAMS * 1e6 for name, values in samples.items()}


class Prompter:
    """Measures an LLM's steps, and makes it say the texts that it is given."""

    def __init__(self, llm: LLM):
        self.times, self._texts_NT = Times(), None
        self._llm, self._masks_s = llm, 0.0
        engine, masks = llm.engine, llm.engine._masks
        self._step, self._forward = engine._step, engine.runner.forward
        engine._step, engine.runner.forward = self.step, self.forward
        for owner, name in ((masks, "begin"), (masks, "finish"), (Masks, "apply")):
            setattr(owner, name, self.timed(getattr(owner, name)))

    @contextmanager
    def saying(self, texts_NT: np.ndarray | None) -> Iterator[Times]:
        """texts_NT: int64, the tokens of each seed; None: anything."""
        self._texts_NT, self.times = texts_NT, Times()
        yield self.times

    def step(self, seen_seq: int):
        scheduler, self._masks_s = self._llm.engine.scheduler, 0.0
        everyone = len(scheduler.running) == NUM_STREAMS and not scheduler.waiting
        wall, cpu = time.perf_counter(), time.process_time()
        result = self._step(seen_seq)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if everyone and self._is_decoding:
            self.times.wall.append(wall)
            self.times.cpu.append(cpu)
            self.times.masks.append(self._masks_s)
        return result

    def forward(self, batch, wants_hidden: bool):
        logits_XV, *rest = self._forward(batch, wants_hidden)
        schedule, rows = self._llm.engine._schedule, self._llm.engine._rows
        assert schedule is not None
        self._is_decoding = len(schedule.decodes) == NUM_STREAMS
        if self._texts_NT is not None and len(schedule.row_X):
            position_X = (rows.length_M - rows.num_prompt_M)[schedule.row_X]
            if schedule.drafts is not None:
                position_X += schedule.drafts.offset_X
            seed_X = rows.sampling_M["seed"][schedule.row_X].astype(np.int64)
            token_X = self._texts_NT[seed_X, position_X.clip(max=self._texts_NT.shape[1] - 1)]
            (token_X,) = upload([token_X], logits_XV.device)
            at_X = torch.arange(len(token_X), device=logits_XV.device)
            logits_XV[at_X, token_X] = _ABOVE_ALL
        return logits_XV, *rest

    def timed(self, function):
        def call(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            self._masks_s += time.perf_counter() - start
            return result

        return call


def generate(llm: LLM, form: StructuredOutputs | None, num_tokens: int) -> np.ndarray:
    """int64 [streams of all ranks, tokens]."""
    params = [
        SamplingParams(max_tokens=num_tokens, temperature=1, seed=i, ignore_eos=form is None, structured_outputs=form)
        for i in range(NUM_STREAMS * llm.group.size)
    ]
    outputs = llm.generate(["Tell me about it."] * len(params), params)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == num_tokens, output.outputs[0]
    return np.array([output.outputs[0].token_ids for output in outputs], dtype=np.int64)


def measure_form(
    llm: LLM, prompter: Prompter, form: StructuredOutputs, rounds: int, num_tokens: int
) -> dict[str, float]:
    with prompter.saying(None):
        texts_NT = generate(llm, form, num_tokens)
    pairs: list[dict[str, dict[str, float]]] = []
    for turn in range(rounds):
        pairs.append({})
        for name in ("free", "held") if turn % 2 else ("held", "free"):
            with prompter.saying(texts_NT) as times:
                said_NT = generate(llm, form if name == "held" else None, num_tokens)
            assert (said_NT == texts_NT).all()
            pairs[-1][name] = times.per_token()
    columns = {
        f"{name}_{what}_us": statistics.median(pair[name][what] for pair in pairs)
        for what in ("step", "cpu")
        for name in ("free", "held")
    }
    columns["masks_us"] = statistics.median(pair["held"]["masks"] for pair in pairs)
    columns["masks_percent"] = statistics.median(100 * pair["held"]["masks"] / pair["free"]["step"] for pair in pairs)
    for what in ("step", "cpu"):
        more = [100 * (pair["held"][what] / pair["free"][what] - 1) for pair in pairs]
        columns[f"{what}_more_percent"] = statistics.median(more)
        columns |= {
            f"{what}_more_p10_percent": np.quantile(more, 0.1),
            f"{what}_more_p90_percent": np.quantile(more, 0.9),
        }
    return columns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    args = parser.parse_args()
    options = {"kv_cache_gb": 0.1, "device": args.device, "num_speculative_tokens": args.drafts}
    with LLM(DEMO_MODEL, **options) as llm:
        prompter = Prompter(llm)
        rows = {name: measure_form(llm, prompter, FORMS[name], args.rounds, args.tokens) for name in args.forms}
        if llm.group.rank == 0:
            config = {"model": "demo", "ranks": llm.group.size, "streams_per_rank": NUM_STREAMS, **vars(args)}
            del config["forms"]
            where = "" if args.device == "cpu" else f"_gpu_{llm.group.size}" + ("_drafts" if args.drafts else "")
            report = BenchmarkReport(f"structured_outputs{where}", config)
            for name, columns in rows.items():
                report.add_row(form=name, **columns)
            report.finish()


if __name__ == "__main__":
    main()
