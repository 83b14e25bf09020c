"""Overlap: where a step is cut, in which order stages run on which lanes, who chooses, what is refused."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from eprt import EngineConfig, EPGroup, EPMoE, ops
from eprt.config import MoEConfig
from eprt.engine.overlap_policy import AUTO_LEAST_TOKENS, OverlapPolicy
from eprt.layers.batch import ForwardBatch, Split
from eprt.layers.lanes import StreamLanes
from eprt.layers.overlap import (
    DENSE,
    PAUSE,
    PLAIN,
    SINGLE_BATCH,
    SINGLE_BATCH_TILES,
    TWO_BATCH,
    Lanes,
    Microbatch,
    Stage,
    run_layers,
)
from eprt.layers.sm_split import MOST_SMS, send_sms, tile_rows
from eprt.serve.options import OptionError, parse
from tests import tiny
from tests.unit.engine.test_gpu_engine import DEMO


def batch_of(lengths: list[int], contexts: list[int], num_decode: int, **fields) -> ForwardBatch:
    """Requests with that many new tokens behind contexts that long."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = [context + i for length, context in zip(lengths, contexts) for i in range(length)]
    return ForwardBatch(
        token_id_T=torch.arange(starts[-1]),
        position_T=torch.tensor(positions, dtype=torch.int64),
        kv_slot_T=torch.arange(starts[-1]) + 1000,
        page_table_BP=torch.arange(len(lengths), dtype=torch.int32).view(-1, 1),
        seq_len_B=torch.tensor([a + b for a, b in zip(lengths, contexts)], dtype=torch.int32),
        query_start_B1=torch.tensor(starts, dtype=torch.int32),
        num_decode=num_decode,
        logits_idx=torch.arange(starts[-1]),
        overlap="tbo",
        split=Split.of(starts),
        num_context=sum(lengths[num_decode:]) + sum(contexts[num_decode:]),
        **fields,
    )


def tokens_of(batch: ForwardBatch) -> list[tuple[int, int, int, int, int]]:
    """(token, position, cache slot, page of its request, end of its context) of each token, by its request's fields."""
    result = []
    starts = batch.query_start_B1.tolist()
    assert starts[0] == 0 and starts[-1] == batch.num_tokens and len(starts) == len(batch.seq_len_B) + 1
    for b, (begin, end) in enumerate(pairwise(starts)):
        for t in range(begin, end):
            position = int(batch.seq_len_B[b]) - (end - t)
            assert position == batch.position_T[t], "a token does not stand where its request's length says"
            page = int(batch.page_table_BP[b, 0])
            result.append((int(batch.token_id_T[t]), position, int(batch.kv_slot_T[t]), page, position + 1))
    assert all(starts[b + 1] - starts[b] == 1 for b in range(batch.num_decode))
    return result


def test_halves_are_the_batch_cut_in_the_middle():
    rng = random.Random(0)
    cases = [([], [], 0), ([1], [5], 1), ([1], [0], 0), ([7], [0], 0), ([1, 1], [3, 3], 2), ([1, 6], [3, 2], 1)]
    for _ in range(200):
        num_decode, num_chunks = rng.randrange(6), rng.randrange(4)
        lengths = [1] * num_decode + [rng.randrange(1, 9) for _ in range(num_chunks)]
        cases.append((lengths, [rng.randrange(1, 20) for _ in lengths], num_decode))
    for lengths, contexts, num_decode in cases:
        whole = batch_of(lengths, contexts, num_decode)
        first, second = whole.halves()
        assert first.num_tokens == -(-whole.num_tokens // 2), "the halves are as equal as can be"
        assert tokens_of(first) + tokens_of(second) == tokens_of(whole)
        assert first.num_decode + second.num_decode == num_decode
        assert (first.first_row, second.first_row) == (0, first.num_tokens)
        assert all(half.seq_len_B[half.num_decode :].sum() <= half.num_context for half in (first, second))
        assert len(first.seq_len_B) + len(second.seq_len_B) - len(lengths) in (0, 1), "at most one request is cut"


def test_only_decodes_may_be_cut_without_being_told_where():
    decodes = batch_of([1, 1, 1], [4, 5, 6], 3)
    told = decodes.halves()
    object.__setattr__(decodes, "split", None)
    assert [tokens_of(half) for half in decodes.halves()] == [tokens_of(half) for half in told]
    prompt = batch_of([3, 4], [0, 0], 0)
    object.__setattr__(prompt, "split", None)
    with pytest.raises(ValueError, match="7 tokens, 0 of them decodes, lacks its split"):
        prompt.halves()


class Recorder:
    """A layer that notes what it is asked to do."""

    def __init__(self, name: str, schedule: tuple[Stage, ...], log: list[str]):
        self._schedule, self._name, self._log = schedule, name, log
        names = {stage.name for stage in schedule}
        self.stages = {stage: lambda m, stage=stage: self._note(stage, m) for stage in names}

    def schedule(self, batch):
        return self._schedule

    def _note(self, stage, m):
        self._log.append(f"{self._name}.{stage}.{'ab'[m.index]}")
        if stage in ("add", "mlp"):
            m.x_TH = m.x_TH + 1


def test_two_microbatches_take_turns_at_every_pause():
    log: list[str] = []
    layers = [Recorder("0", DENSE, log), Recorder("1", TWO_BATCH, log), Recorder("2", TWO_BATCH, log)]
    x_TH = torch.arange(12.0).view(3, 4)
    y_TH = run_layers(layers, x_TH, batch_of([1, 2], [4, 4], 1), [torch.empty(0)] * 3, Lanes())
    assert torch.equal(y_TH, x_TH + 3), "every layer, every token, in order"

    parts: list[list[str]] = [[]]
    for stage in TWO_BATCH:
        if stage is PAUSE:
            parts.append([])
        else:
            parts[-1].append(stage.name)
    begin, experts, end = ([f"{{}}.{name}.{{}}" for name in part] for part in parts)

    def of(part: list[str], layer: int, which: str) -> list[str]:
        return [text.format(layer, which) for text in part]

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
    assert log == want


@pytest.mark.parametrize("schedule", [TWO_BATCH, SINGLE_BATCH, SINGLE_BATCH_TILES, PLAIN])
def test_schedules_wait_for_all_that_other_lanes_do(schedule):
    """Each stage on another lane is followed, before the layer ends, by one on the compute lane that needs it or what
    comes behind it on its lane: no lane runs on into the next layer."""
    names = [stage.name for stage in schedule if stage is not PAUSE]
    assert len(names) == len(set(names))
    for i, stage in enumerate(schedule):
        assert not stage.marks or stage.lane == "compute"
        if stage.lane == "compute":
            assert set(stage.needs) <= {earlier.name for earlier in schedule[:i] if earlier.lane != "compute"}
            continue
        behind = [later.name for later in schedule[i:] if later.lane == stage.lane]
        assert any(set(later.needs) & set(behind) for later in schedule[i + 1 :]), stage


class FakeStreams:
    """torch.cuda's streams and events as far as lanes use them: notes who waits for whom."""

    def __init__(self, monkeypatch):
        self.log: list[tuple] = []
        self.current = self.Stream("compute", self.log)
        names = iter(("comm", "side"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda priority=0: self.Stream(next(names), self.log))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)

    def _enter(self, stream):
        import contextlib

        @contextlib.contextmanager
        def entered():
            before, self.current = self.current, stream
            yield
            self.current = before

        return entered()

    class Stream:
        def __init__(self, name, log):
            self.name, self.log = name, log

        def wait_stream(self, other):
            self.log.append((self.name, "joins", other.name))

        def wait_event(self, event):
            self.log.append((self.name, "awaits", event))

        def record_event(self):
            self.log.append((self.name, "records"))
            return f"event {sum(entry[1] == 'records' for entry in self.log)}"


def test_lanes_are_streams_that_fork_and_meet(monkeypatch):
    streams = FakeStreams(monkeypatch)
    names: list[str] = []
    layer = Recorder("0", SINGLE_BATCH_TILES, names)
    batch = replace(batch_of([1, 1], [3, 3], 2), overlap="sbo", split=None)
    seen = []
    for name, call in list(layer.stages.items()):
        layer.stages[name] = lambda m, name=name, call=call: (seen.append((name, streams.current.name)), call(m))
    run_layers([layer], torch.zeros(2, 4), batch, [torch.empty(0)], StreamLanes())
    assert dict(seen) == {stage.name: stage.lane for stage in SINGLE_BATCH_TILES}
    assert streams.log == [
        ("side", "joins", "compute"),
        ("side", "records"),
        ("compute", "records"),  # before the experts are launched
        ("comm", "awaits", "event 2"),  # which must not wait for them
        ("comm", "records"),
        ("compute", "awaits", "event 3"),
        ("compute", "awaits", "event 1"),
    ]
    order = [stage.name for stage in SINGLE_BATCH_TILES]
    assert order.index("signals") < order.index("experts") < order.index("combine_send"), "or the host may hang"


class FakeModel:
    def __init__(self, launches: bool, moe: MoEConfig | None = None):
        self.ep = {"normal": self, "low_latency": self}
        self.launches, self.config = launches, SimpleNamespace(moe=moe or MoEConfig(64, 64, 32, 8))


def policy(overlap: str, model, num_ranks: int = 2) -> OverlapPolicy:
    return OverlapPolicy.of(EngineConfig("somewhere", overlap=overlap), model, num_ranks)


def test_every_rank_chooses_by_what_all_have_seen():
    gpu, cpu = FakeModel(launches=True), FakeModel(launches=False)
    few, many = [0, 1, 5], [0, 1, AUTO_LEAST_TOKENS]
    assert [policy("none", gpu).of_step(many, mode) for mode in ("normal", "low_latency")] == ["none", "none"]
    assert [policy("tbo", cpu).of_step(few, mode) for mode in ("normal", "low_latency")] == ["tbo", "tbo"]
    assert policy("tbo", cpu).of_step([0, 1], "normal") == "none", "one token is no two halves"
    assert policy("tbo", cpu).of_step([0, 1], "low_latency") == "tbo", "steps of graphs are all alike"
    assert [policy("sbo", gpu).of_step(many, mode) for mode in ("normal", "low_latency")] == ["none", "sbo"]
    auto, of_two = policy("auto", gpu, 4), policy("auto", gpu, 2)
    assert of_two.of_step(many, "normal") == "none" and of_two.of_step(few, "low_latency") == "sbo"
    assert [auto.of_step(few, "normal"), auto.of_step(many, "normal"), auto.of_step(few, "low_latency")] == [
        "none",
        "tbo",
        "sbo",
    ]
    assert policy("auto", FakeModel(True, MoEConfig(64, 64, 160, 6)), 4).least_tokens == 10240, "768 rows in a half"
    assert policy("auto", FakeModel(True, MoEConfig(64, 64, 256, 8)), 8).least_tokens == AUTO_LEAST_TOKENS
    assert policy("auto", cpu).of_step(many, "normal") == policy("auto", cpu).of_step(few, "low_latency") == "none"


def test_what_cannot_be_is_refused_by_name():
    class Dense:
        ep: ClassVar[dict] = {}

    assert policy("auto", Dense()).of_step([9999], "normal") == "none"
    for overlap in ("tbo", "sbo"):
        with pytest.raises(ValueError, match=f"--overlap {overlap}: the model has no MoE layer"):
            policy(overlap, Dense())
    for flags, message in (
        (["--overlap", "both"], "--overlap both: must be none, tbo, sbo or auto"),
        (["--overlap-sms", "8", "--device", "cpu"], "--overlap-sms 8: divides a GPU for single-batch overlap"),
        (
            ["--overlap-sms", "8", "--device", "cuda", "--overlap", "none"],
            "--overlap-sms 8: divides a GPU for single-batch overlap",
        ),
        (["--overlap-sms", "8", "--device", "cuda", "--overlap", "tbo"], "it needs --overlap sbo or auto"),
        (["--overlap-sms", "0", "--device", "cuda"], r"--overlap-sms 0: must be in 1..64"),
    ):
        with pytest.raises(OptionError, match=message):
            parse(["--model", DEMO, *flags])
    engine = parse(["--model", DEMO, "--overlap", "sbo", "--device", "cuda", "--overlap-sms", "6"]).engine
    assert (engine.overlap, engine.overlap_sms) == ("sbo", 6)


def test_sms_send_beside_the_experts_only_where_that_pays():
    config = MoEConfig(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, weight_format="fp8")
    for tokens in (1, 16, 64, 128, 512):
        assert send_sms(config, tokens, 8, 32, sms=132) == 0, "on one NVLink host sending is short"
        assert send_sms(config, tokens, 8, 32, sms=132, link_gb_s=1e9) == 0
    slow = [send_sms(config, tokens, 8, 32, sms=132, link_gb_s=25.0) for tokens in (16, 64, 128, 512)]
    assert 0 < slow[1] <= slow[2] <= slow[3] <= MOST_SMS, "over a network of 200 Gb/s it is not"
    assert [tile_rows(config, tokens, 8, 256) for tokens in (1, 64, 80, 128, 4096)] == [16, 16, 32, 32, 64]


def test_one_rank_computes_the_same_with_every_overlap():
    from eprt import LLM, SamplingParams

    texts = ["What is 12 + 30?", "Count from 3 to 20.", "a"]
    tokens = []
    for overlap in ("none", "tbo", "sbo"):
        with LLM(DEMO, EPGroup.single(), kv_cache_gb=0.02, chunk_size=24, overlap=overlap) as llm:
            outputs = llm.generate(texts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
            tokens.append([output.outputs[0].token_ids for output in outputs])
            sizes = llm.engine.recorder.tokens_PLE.sum(), sum(map(sum, llm.engine.model.expert_load()))
            assert sizes[0] == sizes[1] > 0, "choices counted twice or not at all"
    assert tokens[0] == tokens[1] == tokens[2]


class OneLaunch:
    """A CPU backend whose verbs go two by two, as those between GPUs can."""

    takes_signals = True

    def __init__(self, backend):
        self._backend, self.calls = backend, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self._backend, name)

    def dispatch(self, x_TH, slot_idx_TK, weights_TK):
        handle = self._backend.dispatch_send(x_TH, slot_idx_TK, weights_TK)
        return handle, self._backend.dispatch_recv(handle)

    def combine(self, y_RH, handle):
        self._backend.combine_send(y_RH, handle)
        return self._backend.combine_recv(handle)


@torch.no_grad()
def test_verbs_in_one_launch_compute_the_same():
    block = tiny.make_moe_block("v3")
    plain, single = EPMoE.from_hf(block, EPGroup.single()), EPMoE.from_hf(block, EPGroup.single())
    assert plain.shared_expert is not None
    single.ep, single.overlap_sms = {mode: OneLaunch(backend) for mode, backend in single.ep.items()}, 0
    batch, x_TH = replace(batch_of([1] * 5, [3] * 5, 5), overlap="sbo", split=None), torch.randn(5, 64)
    assert single.schedule(batch) is SINGLE_BATCH and plain.schedule(batch) is PLAIN
    m = Microbatch(batch, x_TH, h_TH=x_TH)
    for stage in SINGLE_BATCH:
        if stage.name not in ("attention", "add"):
            m.lanes.run(stage, m, single.stages[stage.name])
    assert torch.equal(ops.add_rows(x_TH, m.y_TH, m.shared_TH), x_TH + plain(x_TH))
    assert single.expert_load() == plain.expert_load()
    assert not {"dispatch_send", "dispatch_recv", "combine_send", "combine_recv"} & set(m.ep.calls)


def test_halves_are_tried_before_the_first_request(monkeypatch):
    from eprt.engine.batch_rows import BatchRows
    from eprt.engine.runner import Runner
    from eprt.engine.warm_up import warm_up
    from eprt.models.loader import load_model

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = load_model(EngineConfig(DEMO, overlap="tbo"), EPGroup.single())
    cache = torch.zeros(model.config.num_hidden_layers, 3, 16, model.config.kv_dim, dtype=model.config.dtype)
    seen = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda b, kv: (seen.append((b.num_tokens, b.overlap)), forward(b, kv)))
    runner = Runner(model, cache, BatchRows(1, 40, 16, model.config.vocab_size), 40)
    warm_up(runner, None, 40, lambda num_tokens: "tbo" if num_tokens >= 32 else "none")
    tried = [(length, "none") for length in (1, 16, 32, 40, 40)]
    assert sorted(seen) == sorted([*tried, (32, "tbo"), (40, "tbo"), (40, "tbo")])
    assert model.config.moe is not None
    for rows_S in model.expert_load():
        assert sum(rows > 0 for rows in rows_S) > 2 * model.config.moe.top_k, "or few ranks' experts would be tried"
        assert max(rows_S) >= 2 * 40, "as many as one can get"
    seen.clear()
    warm_up(runner, None, 300)
    assert sorted(seen) == [(length, "none") for length in (1, 16, 32, 64, 128, 256, 300, 300)]
    model.close()
