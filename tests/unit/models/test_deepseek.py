"""The model on one rank against transformers: every variant, chunked, decoding, mixed, with shared pages, quantised."""

import json

import numpy as np
import pytest
import torch

from eprt import EngineConfig, EPGroup, EPMoE, ops
from eprt.layers.decode_attention import AttendDecodes
from eprt.models.loader import load_model
from eprt.ops import decode_layer
from tests import tiny
from tests.paged import PagedRunner, fp8_cache_is_a_cache_of_rounded_entries

FP32_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """variant -> (transformers model, checkpoint directory), each made once."""
    made = {}

    def get(variant):
        if variant not in made:
            model = tiny.make_variant(variant)
            old_spelling = variant in ("v2_lite", "v2_groups")
            made[variant] = (
                model,
                tiny.save(model, tmp_path_factory.mktemp(variant), old_rope_spelling=old_spelling),
            )
        return made[variant]

    return get


def load(directory, **options):
    return load_model(EngineConfig(str(directory), **options), EPGroup.single())


def assert_close(logits, want, tolerance=FP32_TOLERANCE):
    assert logits.dtype == torch.float32 and logits.shape == want.shape
    assert (logits - want).abs().max().item() < tolerance


variants = pytest.mark.parametrize("variant", tiny.VARIANTS)


@variants
@pytest.mark.parametrize("chunk", [1000, 16, 3])
def test_prefill_equals_transformers(golden, variant, chunk):
    hf_model, directory = golden(variant)
    runner = PagedRunner(load(directory))
    for prompt in tiny.prompts():
        assert_close(runner.prefill(runner.request(prompt), chunk), tiny.golden_logits(hf_model, prompt))


@variants
def test_greedy_tokens_equal_transformers(golden, variant):
    hf_model, directory = golden(variant)
    runner = PagedRunner(load(directory))
    for prompt in tiny.prompts(lengths=(1, 13)):
        assert runner.greedy(runner.request(prompt), 12, chunk=8) == tiny.golden_greedy(hf_model, prompt, 12)


@variants
def test_decode_and_prefill_share_a_step(golden, variant):
    hf_model, directory = golden(variant)
    runner = PagedRunner(load(directory))
    a, b, c = (runner.request(p) for p in tiny.prompts(lengths=(20, 9, 31)))
    seen = {a: [], b: [], c: []}
    for work in ([(a, 19), (b, 8)], [(c, 10), (a, 1), (b, 1)], [(c, 21)]):
        for (request, _), logits in zip(work, runner.forward(work)):
            seen[request].append(logits)
    for request, parts in seen.items():
        assert_close(torch.cat(parts), tiny.golden_logits(hf_model, request.tokens))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
@variants
def test_a_decodes_operators_give_the_bits_of_those_one_by_one(golden, variant, options, monkeypatch):
    """A step of decodes takes two operators a layer; V3.2's attention, and every other step, all of them."""
    model = load(golden(variant)[1], **options)
    prompts, results, mixed = tiny.prompts(lengths=(20, 9, 31)), [], []
    monkeypatch.setattr(ops, "mix_decodes", lambda *given: mixed.append(given) or decode_layer.mix_decodes(*given))
    for joined in (True, False):
        if not joined:
            monkeypatch.setattr(AttendDecodes, "__call__", lambda *_: None)
            monkeypatch.setattr(EPMoE, "for_decodes", lambda *_: None)
        runner, load_before = PagedRunner(model), np.array(model.expert_load())
        requests = [runner.request(prompt) for prompt in prompts]
        runner.forward([(request, len(request.tokens)) for request in requests])
        seen = []
        for token in (7, 3):
            for request in requests:
                request.tokens.append(token)
            seen += runner.forward([(request, 1) for request in requests])
        results.append((seen, np.array(model.expert_load()) - load_before))
        assert len(mixed) == 2 * len(model.moe_layers())
    (one, one_load), (other, other_load) = results
    assert all(map(torch.equal, one, other)) and (one_load == other_load).all()


def test_shared_prefix_pages_give_the_same_logits(golden):
    hf_model, directory = golden("v3")
    runner = PagedRunner(load(directory))
    (prompt,) = tiny.prompts(lengths=(30,))
    first = runner.request(prompt)
    whole = runner.prefill(first)
    again = runner.prefill(runner.request(prompt, prefix_of=first, num_shared=24))
    assert torch.equal(again, whole[24:])
    other = prompt[:16] + tiny.prompts(lengths=(9,), seed=8)[0]
    logits = runner.prefill(runner.request(other, prefix_of=first, num_shared=16))
    assert_close(logits, tiny.golden_logits(hf_model, other)[16:])


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_an_fp8_cache(golden, variant):
    fp8_cache_is_a_cache_of_rounded_entries(load(golden(variant)[1]), tiny.prompts()[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["v2_lite", "v3"])
def test_a_row_does_not_depend_on_its_batch(golden, variant, dtype):
    _, directory = golden(variant)
    runner = PagedRunner(load(directory, dtype=dtype), num_pages=200)
    prompts = tiny.prompts(lengths=(1, 5, 17, 33, 40), seed=4)
    alone = [runner.prefill(runner.request(p)) for p in prompts]
    together = [runner.request(p) for p in prompts]
    for logits, want in zip(runner.forward([(r, len(r.tokens)) for r in together]), alone):
        assert torch.equal(logits, want)
    for request in together:
        request.tokens.append(7)
    batched = runner.forward([(r, 1) for r in together])
    for prompt, logits in zip(prompts, batched):
        request = runner.request([*prompt, 7])
        runner.forward([(request, len(prompt))])
        assert torch.equal(runner.forward([(request, 1)])[0], logits)


def test_an_empty_batch_still_runs(golden):
    _, directory = golden("v3")
    model = load(directory)
    runner = PagedRunner(model)
    runner.idle_step()
    runner.idle_step("low_latency")
    assert sum(map(sum, model.expert_load())) == 0


def test_expert_load_counts_every_choice(golden):
    _, directory = golden("v2_groups")
    model = load(directory)
    runner = PagedRunner(model)
    runner.prefill(runner.request(tiny.prompts(lengths=(21,))[0]), chunk=8)
    assert [len(row) for row in model.expert_load()] == [16, 16]
    assert [sum(row) for row in model.expert_load()] == [21 * 4, 21 * 4]
    assert sum(backend.stats().num_calls for backend in model.exchange.values()) > 0
    model.reset_counters()  # as after a warm-up
    assert sum(map(sum, model.expert_load())) == 0
    assert sum(backend.stats().num_calls for backend in model.exchange.values()) == 0


def test_low_latency_mode_gives_the_same_logits(golden):
    _, directory = golden("v3")
    runner = PagedRunner(load(directory))
    (prompt,) = tiny.prompts(lengths=(14,))
    normal = runner.prefill(runner.request(prompt))
    request = runner.request(prompt)
    assert torch.equal(runner.forward([(request, 14)], mode="low_latency")[0], normal)


def test_bf16_is_as_near_to_fp32_as_transformers_bf16_is(golden):
    hf_model, directory = golden("v3")
    (prompt,) = tiny.prompts(lengths=(40,))
    want = tiny.golden_logits(hf_model, prompt)
    hf_bf16 = tiny.make_variant("v3", dtype=torch.bfloat16)
    hf_error = (tiny.golden_logits(hf_bf16, prompt) - want).pow(2).mean().sqrt()
    runner = PagedRunner(load(directory, dtype="bfloat16"))
    error = (runner.prefill(runner.request(prompt)) - want).pow(2).mean().sqrt()
    assert error < 1.5 * hf_error, (error, hf_error)


@variants
def test_fp8_checkpoint_equals_its_dequantised_twin(tmp_path, variant):
    hf_model = tiny.make_variant(variant, hidden_size=160, moe_intermediate_size=136, intermediate_size=200)
    tiny.save(hf_model, tmp_path)
    tiny.quantize_checkpoint(tmp_path)
    tiny.round_to_fp8_blocks(hf_model)
    model = load(tmp_path)
    moe = model.moe_layers()[-1]
    assert moe.pool.w13.data.dtype == moe.pool.w2.data.dtype == torch.float8_e4m3fn
    assert model.layers[0].attention.weights.o.weight.data.dtype == torch.float8_e4m3fn
    runner = PagedRunner(model)
    for prompt in tiny.prompts(lengths=(1, 30)):
        assert_close(runner.prefill(runner.request(prompt)), tiny.golden_logits(hf_model, prompt))


def test_int8_weights_stay_near(golden):
    hf_model, directory = golden("v3")
    model = load(directory, quantization="int8")
    assert model.moe_layers()[0].pool.w13.data.dtype == torch.int8
    assert model.layers[0].mlp.down.weight.data.dtype == torch.int8
    (prompt,) = tiny.prompts(lengths=(40,))
    runner = PagedRunner(model)
    logits, want = runner.prefill(runner.request(prompt)), tiny.golden_logits(hf_model, prompt)
    assert 1e-5 < (logits - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt() < 0.1


def test_norm_topk_prob_of_v2_follows_deepseeks_own_code(tmp_path):
    """It normalises instead of scaling; transformers ignores the field.."""
    hf_model = tiny.make_model("v2", n_routed_experts=4, num_experts_per_tok=4, routed_scaling_factor=16.0)
    directory = tiny.save(hf_model, tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "norm_topk_prob": True}))
    moe = load(directory).config.moe
    assert moe.norm_topk_prob and moe.routed_scaling_factor == 1.0


def test_position_limit(golden):
    _, directory = golden("v3")
    with pytest.raises(ValueError, match=r"--max-model-len 257.*up to 256"):
        load(directory, max_model_len=257)
