"""The executor: microbatches take turns, and whatever overlaps, the same is computed."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from eprt.diagnostics.inject import FaultyBackend

from eprt import LLM, EPGroup, EPMoE, SamplingParams
from eprt.ep.exchange import Exchange
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.lanes import Lanes
from eprt.layers.layer_step import LayerStep, Microbatch
from eprt.layers.overlap import begin_step, run_layers
from eprt.layers.schedules import ALONE, DENSE, IN_TURN, PAUSE, PLAIN, SINGLE_BATCH, TWO_BATCH
from tests import tiny
from tests.fake_gpu import Group
from tests.paths import DEMO
from tests.unit.layers.cases import HIDDEN, NUM_EXPERTS, WIDTH, IdleLayer, IdleMoE, batch_of, filled
from tests.unit.layers.test_schedules import SLOTS, config_in, make_backend


class Log:
    """In place of Lanes.trace: which stage of which layer ran for which half."""

    def __init__(self):
        self.entries: list[str] = []
        self._layers = [-1, -1]

    def __call__(self, stage, index):
        self._layers[index] += stage.name == "attention"
        self.entries.append(f"{self._layers[index]}.{stage.name}.{'ab'[index]}")
        return torch.no_grad()  # any context


def add_one(x_TH: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x_TH)


def test_two_microbatches_take_turns_at_every_pause():
    group = EPGroup.single()
    moe = IdleMoE(group, {"normal": make_backend("cpu", config_in("normal", "cpu"), group)}, SLOTS)
    layers, lanes = [IdleLayer(add_one), IdleLayer(moe), IdleLayer(moe)], Lanes()
    lanes.trace = log = Log()
    x_TH = torch.arange(3.0 * HIDDEN).view(3, HIDDEN).bfloat16()
    run_layers(layers, x_TH, batch_of([1, 2], [4, 4], 1), [torch.empty(0)] * 3, lanes)

    parts: list[list[str]] = [[]]
    for stage in TWO_BATCH:
        if stage is PAUSE:
            parts.append([])
        else:
            parts[-1].append(stage.name)
    begin, experts, end = parts

    def of(part: list[str], layer: int, which: str) -> list[str]:
        return [f"{layer}.{name}.{which}" for name in part]

    want = []
    for which in "ab":
        want += [f"0.attention.{which}", f"0.mlp.{which}", *of(begin, 1, which)]
    for which in "ab":
        want += of(experts, 1, which)
    for which in "ab":
        want += of(end, 1, which) + of(begin, 2, which)
    for which in "ab":
        want += of(experts, 2, which)
    for which in "ab":
        want += of(end, 2, which)
    assert log.entries == want


def test_every_layer_changes_every_token_in_order():
    x_TH = torch.arange(12.0).view(3, 4)
    layers = [IdleLayer(add_one)] * 3
    for overlap in ("none", "tbo"):
        batch = replace(batch_of([1, 2], [4, 4], 1), overlap=overlap)
        assert torch.equal(run_layers(layers, x_TH, batch, [torch.empty(0)] * 3, Lanes()), x_TH + 3)


def test_which_schedule_a_layer_follows(gpu):
    """The backend says whether tokens travel while the layer computes."""
    group, pair = EPGroup.single(), Group(0, 2)
    moe = IdleMoE(group, {"low_latency": make_backend("cpu", config_in("low_latency", "cpu"), group)}, SLOTS)
    between_gpus = NvlinkLowLatencyBackend(config_in("low_latency", "cuda"), pair)
    on_nvlink = IdleMoE(pair, {"low_latency": between_gpus}, SLOTS)
    batch = batch_of([1] * 3, [4] * 3, 3, mode="low_latency")
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    for mlp, overlap, kv_pages, schedule in (
        (add_one, "tbo", torch.empty(0), DENSE),
        (moe, "none", torch.empty(0), PLAIN),
        (moe, "none", on_gpu, PLAIN),
        (on_nvlink, "none", torch.empty(0), IN_TURN),
        (moe, "tbo", torch.empty(0), TWO_BATCH),
        (moe, "tbo", on_gpu, TWO_BATCH),
        (moe, "sbo", torch.empty(0), SINGLE_BATCH),
    ):
        microbatch = Microbatch(replace(batch, overlap=overlap, overlap_sms=4), torch.zeros(3, HIDDEN))
        step, its_schedule = begin_step(IdleLayer(mlp), microbatch, kv_pages)
        assert its_schedule is schedule and isinstance(step, LayerStep)


def schedule_of(moe: EPMoE, num_decode: int = 3, backend: Any = None):
    if backend is not None:
        moe.ep.wrap(lambda _: backend)
    batch = batch_of([1] * 3, [4] * 3, num_decode, overlap="none")
    return begin_step(IdleLayer(moe), Microbatch(batch, torch.zeros(3, WIDTH)), torch.empty(0))[1]


def test_decodes_of_a_rank_alone_take_one_operator():
    """Not where the exchange changes rows on their way, experts have replicas, or faults are put between the calls."""
    assert schedule_of(filled()) is ALONE
    assert schedule_of(filled(), num_decode=2) is PLAIN
    config = replace(filled().ep["normal"].config, payload="fp8")
    assert schedule_of(filled(), backend=make_backend("cpu", config, EPGroup.single())) is PLAIN
    assert schedule_of(filled(), backend=make_backend("reference", config, EPGroup.single())) is PLAIN
    assert schedule_of(filled(), backend=FaultyBackend(filled().ep["normal"], [], None)) is PLAIN  # type: ignore
    replicated = SlotMap.from_row(np.array([0, 1, 2, 3, 4, 5, 0, -1]), NUM_EXPERTS)
    assert schedule_of(filled(slot_map=replicated)) is PLAIN


def test_one_rank_computes_the_same_with_every_overlap():
    texts = ["What is 12 + 30?", "Count from 3 to 20.", "a"]
    tokens = []
    for overlap in ("none", "tbo", "sbo"):
        with LLM(DEMO, EPGroup.single(), kv_cache_gb=0.02, chunk_size=24, overlap=overlap) as llm:
            outputs = llm.generate(texts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
            tokens.append([output.outputs[0].token_ids for output in outputs])
            sizes = llm.engine.recorder.tokens_PLE.sum(), sum(map(sum, llm.engine.model.expert_load()))
            assert sizes[0] == sizes[1] > 0, "choices counted twice or not at all"
    assert tokens[0] == tokens[1] == tokens[2]


class CallLog:
    """A backend that notes which of its calls are made."""

    def __init__(self, backend):
        self._backend, self.calls = backend, []

    def __getattr__(self, name):
        value = getattr(self._backend, name)
        return functools.partial(self._call, name) if callable(value) else value

    def _call(self, name, *arguments, **named):
        self.calls.append(name)
        return getattr(self._backend, name)(*arguments, **named)


@torch.no_grad()
def test_every_schedule_computes_what_forward_computes():
    """Bit for bit; and the plain schedule makes the same calls in the same order, for decodes of one rank none."""
    block = tiny.make_moe_block("v3")
    plain, staged = EPMoE.from_hf(block, EPGroup.single()), EPMoE.from_hf(block, EPGroup.single())
    assert plain.shared_experts is not None
    x_TH = torch.randn(5, 64)
    plain.ep.wrap(CallLog)
    staged.ep.wrap(CallLog)
    want_TH = x_TH + plain(x_TH)
    made, staged.ep["normal"].calls[:] = list(plain.ep["normal"].calls), []
    for overlap, num_decode in (("none", 4), ("none", 5), ("sbo", 5), ("tbo", 5)):
        batch = batch_of([1] * 5, [3] * 5, num_decode, overlap=overlap, split=None)
        y_TH = run_layers([IdleLayer(staged)], x_TH, batch, [torch.empty(0)], Lanes())
        assert torch.equal(y_TH, want_TH), overlap
        calls, staged.ep["normal"].calls[:] = [c for c in staged.ep["normal"].calls if c != "is_alone"], []
        if overlap == "none":
            assert calls == (made if num_decode < 5 else []) + ["count_alone"] * (num_decode == 5)
        if overlap == "sbo":
            assert not {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"} & set(calls)
    assert staged.expert_load() == [4 * count for count in plain.expert_load()]
    assert isinstance(plain.ep, Exchange)
