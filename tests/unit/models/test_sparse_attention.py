"""DeepSeek-V3.2 on one rank against transformers: chunks, decodes, shared pages, fp8; and each convention turned
around, which must show."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eprt import EngineConfig, EPGroup, ops
from eprt.layers import indexer as indexer_module
from eprt.layers.indexer import Indexer
from eprt.layers.mla import MLA
from eprt.layers.sparse_mla import SparseMLA
from eprt.models.loader import load_model
from eprt.ops import indexer as index_ops
from tests import reference_ops, tiny
from tests.paged import PagedRunner

TOP_K = 64
TOLERANCE = 1e-4
LENGTHS = (127, 128, 129, 255, 256, 257, 511, 512, 513)


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> tuple[Path, dict[int, tuple[list[int], Tensor]], Any]:
    """The checkpoint; length -> (prompt, logits); transformers' model.

    Keys are so small before their norm that its epsilon shows, which is not the model's. The prompts are such that no
    two scores at the edge of a choice differ by a rounding alone.
    """
    model = tiny.make_variant("v32", index_topk=TOP_K, max_position_embeddings=640, rms_norm_eps=1e-5)
    for layer in model.model.layers:
        layer.self_attn.indexer.wk.weight.data *= 2e-3
    prompts = tiny.prompts(lengths=LENGTHS, seed=12)
    logits = {len(prompt): (prompt, tiny.golden_logits(model, prompt)) for prompt in prompts}
    return tiny.save(model, tmp_path_factory.mktemp("v32")), logits, model


def load(golden, **options) -> Any:
    return load_model(EngineConfig(str(golden[0]), chunk_size=1024, **options), EPGroup.single())


def error_of(model, golden, length: int, chunk: int = 10**9) -> float:
    prompt, want = golden[1][length]
    runner = PagedRunner(model, num_pages=200)
    return (runner.prefill(runner.request(prompt), chunk) - want).abs().max().item()


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_at_once(golden, length):
    assert error_of(load(golden), golden, length) < TOLERANCE


@pytest.mark.parametrize("chunk, lengths", [(1, (129,)), (3, (257,)), (37, LENGTHS), (128, LENGTHS), (129, LENGTHS)])
def test_chunks_give_the_same_bits(golden, chunk, lengths):
    model = load(golden)
    for length in lengths:
        prompt, want = golden[1][length]
        runner = PagedRunner(model, num_pages=400)
        chunked = runner.prefill(runner.request(prompt), chunk)
        assert (chunked - want).abs().max() < TOLERANCE
        if chunk > 1:  # a chunk of one token is a decode, which orders the same sums differently
            rows = slice(None, (length - 1) // chunk * chunk) if length % chunk == 1 else slice(None)
            assert torch.equal(chunked[rows], runner.prefill(runner.request(prompt))[rows])


def test_greedy_tokens_and_decodes_beside_prompts(golden):
    _, logits, hf_model = golden
    runner = PagedRunner(load(golden), num_pages=400)
    prompt = logits[127][0][:60]
    want = tiny.golden_greedy(hf_model, prompt, 12)
    assert runner.greedy(runner.request(prompt), 12, chunk=37) == want, "across top_k"
    a, b, c = (runner.request(logits[length][0]) for length in (129, 255, 257))
    seen: dict[Any, list[Tensor]] = {a: [], b: [], c: []}
    for work in ([(a, 128), (b, 254)], [(c, 63), (a, 1), (b, 1)], [(c, 194)]):
        for (request, _), part in zip(work, runner.forward(work)):
            seen[request].append(part)
    for request, parts in seen.items():
        assert (torch.cat(parts) - logits[len(request.tokens)][1]).abs().max() < TOLERANCE


def test_a_row_does_not_depend_on_its_batch(golden):
    runner = PagedRunner(load(golden), num_pages=900)
    prompts = [golden[1][length][0] for length in (127, 257, 513)]
    alone = [runner.prefill(runner.request(prompt)) for prompt in prompts]
    together = [runner.request(prompt) for prompt in prompts]
    for logits, want in zip(runner.forward([(each, len(each.tokens)) for each in together]), alone):
        assert torch.equal(logits, want)
    for request in together:
        request.tokens.append(7)
    for prompt, logits in zip(prompts, runner.forward([(each, 1) for each in together])):
        request = runner.request([*prompt, 7])
        runner.forward([(request, len(prompt))])
        assert torch.equal(runner.forward([(request, 1)])[0], logits)


def test_two_batch_overlap_and_shared_pages_change_nothing(golden):
    runner = PagedRunner(load(golden), num_pages=400)
    prompt, want = golden[1][513]
    first = runner.request(prompt)
    whole = runner.forward([(first, 513)], overlap="tbo")[0]
    assert (whole - want).abs().max() < TOLERANCE
    again = runner.prefill(runner.request(prompt, prefix_of=first, num_shared=300))
    assert torch.equal(again, whole[300:])


# -- a context of at most top_k tokens --


def test_a_short_context_costs_what_it_costs_without_an_indexer(golden, monkeypatch):
    """No query is scored, and the attention is that of V3, to the bit; only keys are cached."""
    model = load(golden)
    prompt = golden[1][127][0][: TOP_K - 3]
    sparse = run_short(model, prompt)
    monkeypatch.setattr(ops, "index_topk", None)
    monkeypatch.setattr(Indexer, "choose", None)
    assert torch.equal(run_short(model, prompt), sparse)
    for layer in model.layers:
        layer.attention = MLA(model.config, layer.attention.weights, layer.attention.cos_sin_PR)
    assert torch.equal(run_short(model, prompt), sparse)


def run_short(model, prompt: list[int]) -> Tensor:
    runner = PagedRunner(model)
    request = runner.request(prompt)
    logits = [runner.prefill(request, 16)]
    for _ in range(3):
        request.tokens.append(5)
        logits += runner.forward([(request, 1)])
    return torch.cat(logits)


# -- fp8 keys --


def test_fp8_keys_choose_nearly_the_same_tokens(golden, monkeypatch):
    chosen: dict[str, list[Tensor]] = {}
    topk = ops.index_topk
    for name in ("auto", "fp8", "untransformed queries"):
        slots = chosen.setdefault(name, [])
        monkeypatch.setattr(ops, "index_topk", lambda *args, into=slots: into.append(topk(*args)) or into[-1])
        if name == "untransformed queries":
            plain = partial(lambda real, x, rotation, _: real(x, rotation, x.dtype), ops.index_queries)
            monkeypatch.setattr(ops, "index_queries", plain)
        runner = PagedRunner(load(golden), num_pages=200, kv_cache_dtype="auto" if name == "auto" else "fp8")
        runner.prefill(runner.request(golden[1][513][0]))
    recall = {name: recall_of(slots[0], chosen["auto"][0]) for name, slots in chosen.items()}
    assert recall["fp8"] > 0.95 > 0.8 > recall["untransformed queries"], recall


def recall_of(slots: Tensor, want: Tensor) -> float:
    return sum(len(set(a) & set(b)) for a, b in zip(slots.tolist(), want.tolist())) / want.numel()


# -- conventions --


def test_the_scores_are_scaled_by_both_sizes(golden):
    indexer = load(golden).layers[0].attention.indexer
    assert indexer.score_scale == pytest.approx(16**-0.5 * 64**-0.5)


def turned_indexer_pairs(model, patch) -> None:
    rotation = indexer_module.Rotation
    patch.setattr(indexer_module, "Rotation", lambda table, position, interleaved: rotation(table, position, True))


def turned_attention_pairs(model, patch) -> None:
    for layer in model.layers:
        layer.attention.config = replace(model.config, rope_interleave=False)


def rotated_last_values(model, patch) -> None:
    rotate = index_ops._rotated
    patch.setattr(index_ops, "_rotated", lambda x, rotation: rotate(x.flip(2), rotation).flip(2))


def no_rotation(model, patch) -> None:
    patch.setattr(index_ops, "_rotated", lambda x, rotation: x)


def signed_scores(model, patch) -> None:
    patch.setattr(ops, "index_topk", reference_ops.index_topk)
    patch.setattr(reference_ops.torch, "relu", lambda x: x)


def equal_heads(model, patch) -> None:
    each_indexer(model, lambda w: w.head_weights.weight.data.fill_(1.0))


def heads_in_another_order(model, patch) -> None:
    each_indexer(model, lambda w: w.head_weights.weight.data.copy_(w.head_weights.weight.data.flip(0)))


def queries_of_the_raw_latent(model, patch) -> None:
    choose = Indexer.choose

    def raw(self, h, q_latent, *rest):
        (weight,) = (
            each.attention.weights.q_a_norm.weight_H for each in model.layers if each.attention.indexer is self
        )
        return choose(self, h, q_latent / weight, *rest)

    patch.setattr(Indexer, "choose", raw)


def keys_of_the_raw_input(model, patch) -> None:
    insert = Indexer.insert

    def raw(self, h, *rest):
        (weight,) = (each.attention_norm.weight_H for each in model.layers if each.attention.indexer is self)
        return insert(self, h / weight, *rest)

    patch.setattr(Indexer, "insert", raw)


def no_bias_of_the_keys(model, patch) -> None:
    each_indexer(model, lambda w: w.key_norm_bias_D.zero_())


def no_weight_of_the_keys(model, patch) -> None:
    each_indexer(model, lambda w: w.key_norm_D.fill_(1.0))


def epsilon_of_the_model(model, patch) -> None:
    patch.setattr(indexer_module, "KEY_NORM_EPS", model.config.rms_norm_eps)


def keys_without_their_mean_subtracted(model, patch) -> None:
    def rms_norm(x, size, weight, bias, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight + bias

    patch.setattr(index_ops.F, "layer_norm", rms_norm)


def one_token_less(model, patch) -> None:
    for layer in model.layers:
        layer.attention.indexer.config = replace(layer.attention.indexer.config, top_k=TOP_K - 1)


def choice_among_later_tokens(model, patch) -> None:
    """Of a prompt at once: the query that sees 65 tokens chooses among all."""
    choose = Indexer.choose

    def of_all(self, h, q_latent, rows, *rest):
        length_X = rows.length_X.max().expand_as(rows.length_X)
        return choose(self, h, q_latent, replace(rows, length_X=length_X), *rest)

    patch.setattr(Indexer, "choose", of_all)


def no_choice(model, patch) -> None:
    patch.setattr(SparseMLA, "__call__", MLA.__call__)


def each_indexer(model, change: Callable[[Any], Any]) -> None:
    for layer in model.layers:
        change(layer.attention.indexer.weights)


TURNED = [
    turned_indexer_pairs,
    turned_attention_pairs,
    rotated_last_values,
    no_rotation,
    signed_scores,
    equal_heads,
    heads_in_another_order,
    queries_of_the_raw_latent,
    keys_of_the_raw_input,
    no_bias_of_the_keys,
    no_weight_of_the_keys,
    epsilon_of_the_model,
    keys_without_their_mean_subtracted,
    one_token_less,
    choice_among_later_tokens,
    no_choice,
]


@pytest.mark.parametrize("turn", TURNED, ids=lambda turn: turn.__name__)
def test_a_convention_turned_around_shows(golden, monkeypatch, turn):
    model = load(golden)
    turn(model, monkeypatch)
    assert error_of(model, golden, 257) > 100 * TOLERANCE
