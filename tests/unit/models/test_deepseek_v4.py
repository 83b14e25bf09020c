"""DeepSeek V4 on one rank against transformers: whole and in chunks, after prefix hits, quantised; every convention
turned around must show."""

import dataclasses
import functools
import sys
from typing import Any

import pytest
import torch

from eprt import EngineConfig, EPGroup, SamplingParams, ops
from eprt.engine.engine import Engine
from eprt.layers import compressed_attention, compressor, entry_indexer
from eprt.layers.compressed_attention import CompressedAttention
from eprt.layers.compressor import Compressor
from eprt.layers.entry_indexer import EntryIndexer
from eprt.layers.hyper_connections import StreamMix
from eprt.layers.kept_tails import KeptTails
from eprt.layers.rope import cos_sin_table
from eprt.models.loader import load_model
from tests import reference_v4, tiny_v4
from tests.paged_v4 import HybridRunner

attention_ops = sys.modules["eprt.ops.shared_attention"]  # the module: ops has the function under this name
TOLERANCE, VISIBLE = 1e-4, 1e-2  # of log-probabilities: rounding; what the whole model may be off by
NUM_TOKENS = 522


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """(transformers' model, directory, tokens, its log-probabilities behind each of them)."""
    model = tiny_v4.make_model()
    directory = tiny_v4.save(model, tmp_path_factory.mktemp("v4"))
    tokens = torch.randint(2, 128, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    return model, directory, tokens, log_probs_of(model, tokens)


@torch.no_grad()
def log_probs_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[None], use_cache=False).logits[0].float().log_softmax(-1)


def load(directory: Any, **options: Any) -> Any:
    return load_model(EngineConfig(str(directory), chunk_size=1024, **options), EPGroup.single())


def difference(model: Any, golden: Any, chunk: int = 10**9, num: int = NUM_TOKENS) -> float:
    _, _, tokens, want = golden
    return (HybridRunner(model).log_probs(tokens[:num], chunk) - want[:num]).abs().max().item()


@pytest.mark.parametrize(
    ("chunk", "num"), [(10**9, NUM_TOKENS), (129, NUM_TOKENS), (128, 520), (37, 300), (3, 141), (1, 135)]
)
def test_log_probabilities_equal_transformers_in_one_piece_and_by_chunks(golden, chunk, num):
    assert difference(load(golden[1]), golden, chunk, num) < TOLERANCE


def test_not_a_bit_depends_on_the_chunk(golden):
    model = load(golden[1])
    whole = HybridRunner(model).log_probs(golden[2][:300])
    for chunk in (1, 37, 129):
        num = 140 if chunk == 1 else 300
        assert torch.equal(HybridRunner(model).log_probs(golden[2][:num], chunk), whole[:num])


@pytest.mark.parametrize("lost", [1, 50, 200])
def test_not_a_bit_depends_on_chunks_that_were_thrown_away(golden, lost):
    """Where ranks may be lost, tails go back to what they were; else the first 127 tokens read other windows."""
    model = load(golden[1])
    whole = HybridRunner(model).log_probs(golden[2])
    if lost > 1:
        assert not torch.equal(HybridRunner(model).log_probs(golden[2], 90, lost), whole)
    model.kept_tails = KeptTails(0)
    for chunk in (90, 37):
        assert torch.equal(HybridRunner(model).log_probs(golden[2], chunk, lost), whole)


def run_engine(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Any]:
    """All outputs of each prompt, computed together."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, ignore_eos=True, **params))
    outputs: list[Any] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[int(output.request_id)].append(output)
        engine.check_integrity()
    return outputs


@pytest.mark.parametrize("lengths", [(127, 128, 129), (255, 256, 257), (511, 512, 513)])
def test_prompts_around_the_ends_of_windows_and_pages(golden, lengths):
    """Log-probabilities of every prompt token, and greedy tokens, of requests that share steps and pages."""
    _, directory, tokens, want = golden
    engine = Engine(EngineConfig(str(directory), chunk_size=200, kv_cache_gb=0.01, max_num_seqs=4))
    prompts = [tokens[:n].tolist() for n in lengths]
    for prompt, outputs in zip(prompts, run_engine(engine, prompts, max_tokens=1, prompt_logprobs=0)):
        assert outputs[0].token_id == want[len(prompt) - 1].argmax()
        got = torch.tensor([value for value, _, _ in outputs[0].prompt_logprobs])
        target = torch.tensor(prompt[1:])
        assert (got - want[: len(prompt) - 1].gather(1, target[:, None])[:, 0]).abs().max() < TOLERANCE
    engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_a_bit_depends_on_other_requests(golden, dtype):
    """Alone, and among others that come before and behind it."""
    _, directory, tokens, _ = golden
    prompts = [tokens[first : first + num].tolist() for first, num in ((0, 300), (50, 131), (7, 20), (90, 260))]
    options = {"dtype": dtype, "chunk_size": 100, "kv_cache_gb": 0.01, "max_num_seqs": 4, "enable_prefix_cache": False}
    engine = Engine(EngineConfig(str(directory), **options))
    together = run_engine(engine, prompts, max_tokens=5, prompt_logprobs=0, logprobs=0)
    for prompt, outputs in zip(prompts, together):
        alone = run_engine(engine, [prompt], max_tokens=5, prompt_logprobs=0, logprobs=0)[0]
        assert [output.token_id for output in alone] == [output.token_id for output in outputs]
        assert [output.logprob for output in alone] == [output.logprob for output in outputs]
        assert alone[0].prompt_logprobs == outputs[0].prompt_logprobs
    engine.close()


def greedy(model: Any, prompt: list[int], num: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(int(log_probs_of(model, torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def test_a_prefix_hit_goes_on_at_a_multiple_of_256_and_changes_nothing(golden):
    model, directory, tokens, _ = golden
    engine = Engine(EngineConfig(str(directory), chunk_size=150, kv_cache_gb=0.01, max_num_seqs=4))
    first = tokens[:290].tolist()
    run_engine(engine, [first], max_tokens=1)
    other = [[*tokens[:n].tolist(), 7, 8, 9] for n in (280, 300, 383)]
    for prompt, outputs in zip(other, run_engine(engine, other, max_tokens=3)):
        assert outputs[0].num_cached_tokens == 256
        assert [output.token_id for output in outputs] == greedy(model, prompt, 3)
    engine.close()


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_drafts_change_no_token(golden, tmp_path, num_drafts):
    model, _, tokens, _ = golden
    directory = tiny_v4.save(model, tmp_path, more=tiny_v4.mtp_tensors(model), num_nextn_predict_layers=1)
    options = {"num_speculative_tokens": num_drafts, "chunk_size": 200, "kv_cache_gb": 0.01, "max_num_seqs": 4}
    engine = Engine(EngineConfig(str(directory), **options))
    prompts = [tokens[:250].tolist(), tokens[10:138].tolist()]
    for prompt, outputs in zip(prompts, run_engine(engine, prompts, max_tokens=9)):
        assert [output.token_id for output in outputs] == greedy(model, prompt, 9)
    stats = engine.stats()
    assert stats.num_drafted_tokens >= 13 and stats.num_accepted_tokens <= stats.num_drafted_tokens
    engine.close()


# -- conventions: each turned around by itself --


def _sink_left_out(monkeypatch, model):
    for layer in model.layers:
        layer.attention.weights.sink_N.fill_(-1e9)


def _output_not_turned_back(monkeypatch, model):
    def turned(*args, backwards=False, **options):
        return turn(*args, **options)

    turn = attention_ops.turn_rows
    monkeypatch.setattr(attention_ops, "turn_rows", turned)


def _window_of_127(monkeypatch, model):
    for layer in model.layers:
        layer.attention.window = 127


def _queries_not_normalised(monkeypatch, model):
    for layer in model.layers:
        layer.attention.query_norm = None


def _rotation_by_halves(monkeypatch, model):
    def turned(x, rotation, norm=None, **options):
        num, at_zero = rotation.cos_sin_PR.shape[1], torch.zeros_like(rotation.position_T)
        if norm is not None:
            x = turn(x, dataclasses.replace(rotation, position_T=at_zero), norm)
        still, halves = x[..., :-num], x[..., -num:].unflatten(-1, (2, -1))
        out = turn(torch.cat((still, halves.transpose(-1, -2).flatten(-2)), dim=-1), rotation, **options)
        pairs = out[..., -num:].unflatten(-1, (-1, 2))
        return torch.cat((out[..., :-num], pairs.transpose(-1, -2).flatten(-2)), dim=-1)

    turn = compressed_attention.turn_rows
    for module in (compressed_attention, ops, attention_ops):  # queries, keys, output
        monkeypatch.setattr(module, "turn_rows", turned)


def _one_table_of_rotations(monkeypatch, model):
    compress = model.layers[1].attention.cos_sin_PR
    model.layers[0].attention.cos_sin_PR = compress


def _rotations_scaled_by_yarn(monkeypatch, model):
    rope = dataclasses.replace(model.config.rope, attention_factor=None)
    table = cos_sin_table(rope, 8, 1024)
    for layer in model.layers[1:]:
        layer.attention.cos_sin_PR = table


def _groups_of_heads_interleaved(monkeypatch, model):
    def turned(self, out_TND):
        groups = self.weights.o_a.shape[0]
        return project(self, out_TND.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2))

    project = CompressedAttention._project_out
    monkeypatch.setattr(CompressedAttention, "_project_out", turned)


def _entries_seen_one_token_late(monkeypatch, model):
    monkeypatch.setattr(compressed_attention, "entries_seen", lambda position, ratio: position // ratio)


def _first_window_with_a_zero_before(monkeypatch, model):
    def turned(states, index, *args):
        zero = torch.zeros_like(states[:1])
        return pool(torch.cat((states, zero)), index.masked_fill(index < 0, len(states)), *args)

    pool = compressor.pool_entries
    monkeypatch.setattr(compressor, "pool_entries", turned)


def _halves_of_channels_exchanged(monkeypatch, model):
    states_of = Compressor.states

    def turned(self, product, position):
        states = states_of(self, product, position)
        return states.roll(self.entry_size, dims=2) if self.ratio == 4 else states

    monkeypatch.setattr(Compressor, "states", turned)


def _entries_rotated_by_their_last_token(monkeypatch, model):
    rotation = Compressor.rotation

    def turned(self, first):
        return dataclasses.replace(rotation(self, first), position_T=first + 3)

    monkeypatch.setattr(Compressor, "rotation", turned)


def _places_in_windows_left_out(monkeypatch, model):
    for layer in model.layers[1:]:
        layer.attention.weights.compressor.weights.place_RC.zero_()


def _index_rotated_by_halves(monkeypatch, model):
    def turned(x, rotation, dtype):
        still, turning = x.tensor_split([-rotation.cos_sin_PR.shape[1]], dim=-1)
        return torch.cat((still, ops.rope(turning, dataclasses.replace(rotation, interleaved=False))), dim=-1)

    monkeypatch.setattr(entry_indexer, "turned_queries", turned)


def _worst_entries_chosen(monkeypatch, model):
    project = EntryIndexer.project

    def turned(self, *args):
        queries = project(self, *args)
        return dataclasses.replace(queries, weight_TJ=-queries.weight_TJ)

    monkeypatch.setattr(EntryIndexer, "project", turned)


def _streams_mixed_the_other_way(monkeypatch, model):
    turned = functools.partial(reference_v4.mix_streams, turned=True)
    monkeypatch.setattr(ops, "mix_streams", turned)


def _a_single_sinkhorn_step(monkeypatch, model):
    for layer in model.layers:
        for mix in (layer.attention_mix, layer.mlp_mix):
            mix.projection = dataclasses.replace(mix.projection, num_iterations=1)


def _outputs_not_doubled(monkeypatch, model):
    expand = StreamMix.expand
    monkeypatch.setattr(StreamMix, "expand", lambda self, out: expand(self, out / 2))


def _streams_not_normalised(monkeypatch, model):
    turned = functools.partial(reference_v4.mix_streams, normalised=False)
    monkeypatch.setattr(ops, "mix_streams", turned)


def _gate_of_sigmoids(monkeypatch, model):
    for layer in model.layers:
        layer.mlp._gate.rule = dataclasses.replace(layer.mlp._gate.rule, scoring="sigmoid")


def _tables_of_experts_ignored(monkeypatch, model):
    for layer in model.layers:
        layer.mlp._gate.table_VK = None


def _gate_bias_ignored(monkeypatch, model):
    for layer in model.layers:
        layer.mlp._gate.bias_E = None


def _shared_expert_not_cut(monkeypatch, model):
    for layer in model.layers:
        layer.mlp._shared.limit = None


def _experts_not_cut(monkeypatch, model):
    for layer in model.layers:
        layer.mlp.pool.swiglu_limit = None


TURNED = [
    _sink_left_out,
    _output_not_turned_back,
    _window_of_127,
    _queries_not_normalised,
    _rotation_by_halves,
    _one_table_of_rotations,
    _rotations_scaled_by_yarn,
    _groups_of_heads_interleaved,
    _entries_seen_one_token_late,
    _first_window_with_a_zero_before,
    _halves_of_channels_exchanged,
    _entries_rotated_by_their_last_token,
    _places_in_windows_left_out,
    _index_rotated_by_halves,
    _worst_entries_chosen,
    _streams_mixed_the_other_way,
    _a_single_sinkhorn_step,
    _outputs_not_doubled,
    _streams_not_normalised,
    _gate_of_sigmoids,
    _tables_of_experts_ignored,
    _gate_bias_ignored,
    _shared_expert_not_cut,
    _experts_not_cut,
]


@pytest.mark.parametrize("turn", TURNED, ids=lambda turn: turn.__name__.strip("_"))
def test_a_convention_turned_around_shows(golden, monkeypatch, turn):
    model = load(golden[1])
    turn(monkeypatch, model)
    assert difference(model, golden) > VISIBLE
