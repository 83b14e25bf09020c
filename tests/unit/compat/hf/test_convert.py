"""EPMoE.from_hf and replace_moe_blocks: what the blocks of transformers compute, from wherever their weights are."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from eprt import EPGroup, EPMoE
from eprt.compat.hf import replace_moe_blocks
from eprt.ep.exchange import Exchange
from eprt.models.checkpoint import Checkpoint
from tests import tiny
from tests.fake_gpu import Group
from tests.unit.compat.hf.cases import fp8_block, median_error, names_in_checkpoint, relative_error


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("shape", [(1, 64), (37, 64), (2, 5, 64), (0, 64), (3, 0, 64)], ids=str)
@torch.no_grad()
def test_from_hf_equals_the_block(family, shape):
    block = tiny.make_moe_block(family)
    moe = EPMoE.from_hf(block, EPGroup.single())
    x = torch.randn(shape)
    y = moe(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    want = block(x.view(1, -1, 64)).view(shape)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4 if family == "v2_groups" else 1e-5)  # scaled by 16


@pytest.mark.parametrize("family", tiny.FAMILIES)
@torch.no_grad()
def test_from_hf_in_bf16(family):
    block = tiny.make_moe_block(family, dtype=torch.bfloat16)
    exact = tiny.make_moe_block(family, dtype=torch.bfloat16).float()
    moe = EPMoE.from_hf(block, EPGroup.single())
    x = torch.randn(50, 64).bfloat16()
    y = moe(x)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, exact(x.float()[None])[0]) < 0.01


@pytest.mark.parametrize("family, names", [("qwen3", None), ("mixtral", ("w1", "w3", "w2"))])
@torch.no_grad()
def test_from_hf_of_the_old_style_returns_logits_too(family, names):
    block = tiny.make_moe_block(family)
    old = tiny.OldStyleBlock(block, names)
    old.__class__ = type(type(block).__name__, (tiny.OldStyleBlock,), {})
    moe = EPMoE.from_hf(old, EPGroup.single())
    x = torch.randn(2, 7, 64)
    y, logits = moe(x)
    want, want_logits = old(x)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, want_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_patched_model_gives_the_same_logits(family):
    model = tiny.make_family(family)
    (prompt,) = tiny.prompts(lengths=(25,))
    want = tiny.golden_logits(model, prompt)
    layers = replace_moe_blocks(model, EPGroup.single())
    assert len(layers) == 2 and layers[0].ep is layers[1].ep
    assert (tiny.golden_logits(model, prompt) - want).abs().max() < 1e-4
    assert all(sum(layer.expert_load()) > 0 for layer in layers)


@torch.no_grad()
def test_fp8_blocks_stay_fp8_bit_for_bit():
    block, exact = fp8_block("v3")
    moe = EPMoE.from_hf(block, EPGroup.single())
    assert (moe.config.weight_format, moe.config.dtype) == ("fp8", torch.bfloat16)
    held, experts = moe.state_dict(), block.experts
    for name, weight, scale in (
        ("experts.5.gate_proj", experts.gate_up_proj[5, :128], experts.gate_up_proj_scale_inv[5, :1]),
        ("experts.5.up_proj", experts.gate_up_proj[5, 128:], experts.gate_up_proj_scale_inv[5, 1:]),
        ("experts.5.down_proj", experts.down_proj[5], experts.down_proj_scale_inv[5]),
        ("shared_experts.up_proj", block.shared_experts.up_proj.weight, block.shared_experts.up_proj.weight_scale_inv),
    ):
        assert torch.equal(held[f"{name}.weight"].view(torch.uint8), weight.view(torch.uint8)), name
        assert torch.equal(held[f"{name}.weight_scale_inv"], scale), name
    x_TH = torch.randn(40, 256)
    assert median_error(moe(x_TH.bfloat16()), exact(x_TH[None])[0]) < 0.06


@torch.no_grad()
def test_fp8_blocks_in_another_format():
    block, exact = fp8_block("glm4")
    x_TH = torch.randn(40, 256)
    want_TH = exact(x_TH[None])[0]
    plain = EPMoE.from_hf(block, EPGroup.single(), weight_format="same", dtype=torch.float32)
    assert relative_error(plain(x_TH), want_TH) < 0.01  # the gate was loaded in bfloat16
    assert {tensor.dtype for tensor in plain.state_dict().values()} == {torch.float32, torch.bfloat16}  # the gate's
    int8 = EPMoE.from_hf(block, EPGroup.single(), weight_format="int8")
    assert median_error(int8(x_TH.bfloat16()), want_TH) < 0.06


# -- blocks on the meta device --


@pytest.mark.parametrize("family", ["v3", "mixtral", "qwen3"])
@torch.no_grad()
def test_a_block_on_meta_reads_this_ranks_experts_only(family):
    block = tiny.make_moe_block(family)
    prefix = "model.layers.1.mlp."
    tensors, asked = names_in_checkpoint(block, prefix), []
    options = {"loader": lambda name: asked.append(name) or tensors[name], "prefix": prefix}
    other = EPMoE.from_hf(tiny.make_moe_block(family).to("meta"), Group(1, 3), ep=Exchange({"normal": None}), **options)
    experts = [int(name.split(".experts.")[1].split(".")[0]) for name in asked if ".experts." in name]
    assert sorted(set(experts)) == other.expert_of_slot[: len(set(experts))]
    assert len(experts) == 3 * len(set(experts)) and len(asked) == len(set(asked))
    alone = EPMoE.from_hf(tiny.make_moe_block(family).to("meta"), EPGroup.single(), **options)
    x_TH = torch.randn(20, 64)
    assert torch.equal(alone(x_TH), EPMoE.from_hf(block, EPGroup.single())(x_TH))


@pytest.mark.parametrize("family", ["v3", "mixtral"])
def test_a_model_on_meta_reads_a_checkpoint(family, tmp_path):
    """One that transformers wrote: it has the names of the published ones."""
    model, (prompt,) = tiny.make_family(family), tiny.prompts(lengths=(25,))
    tiny.save(model, tmp_path)
    want_TV = tiny.golden_logits(model, prompt)
    for layer in model.model.layers:
        if "experts" in dict(layer.mlp.named_children()):
            layer.mlp.to("meta")
    replace_moe_blocks(model, EPGroup.single(), loader=str(tmp_path))
    assert (tiny.golden_logits(model, prompt) - want_TV).abs().max() < 1e-4


def test_an_fp8_checkpoint_fills_a_model_on_meta(tmp_path):
    model = tiny.make_variant("v3")
    tiny.save(model, tmp_path)
    tiny.quantize_checkpoint(tmp_path)
    tiny.round_to_fp8_blocks(model)
    block, x_TH = model.model.layers[-1].mlp, torch.randn(30, 64)
    with torch.no_grad():
        want_TH = block(x_TH[None])[0]
    moe = EPMoE.from_hf(block.to("meta"), EPGroup.single(), loader=tmp_path, prefix="model.layers.2.mlp.")
    assert moe.config.weight_format == "fp8" and relative_error(moe(x_TH), want_TH) < 0.06


def test_loaded_tensors_that_do_not_fit_are_named():
    block = tiny.make_moe_block("v3").to("meta")
    tensors = names_in_checkpoint(tiny.make_moe_block("v3"), "b.")

    def convert(**changed):
        changed = {name.replace("__", "."): tensor for name, tensor in changed.items()}
        EPMoE.from_hf(block, EPGroup.single(), loader={**tensors, **changed}.__getitem__, prefix="b.")

    with pytest.raises(ValueError, match=r"\[rank 0/1\] DeepseekV3MoE is on the meta device and has no weights; pass"):
        EPMoE.from_hf(block, EPGroup.single())
    with pytest.raises(ValueError, match=r"tensor b.gate.weight is torch.float32 \(3,\), expected \(16, 64\)"):
        convert(b__gate__weight=torch.zeros(3))
    with pytest.raises(ValueError, match=r"tensor b.experts.4.up_proj.weight is NoneType, expected \(48, 64\)"):
        convert(b__experts__4__up_proj__weight=None)
    with pytest.raises(ValueError, match=r"tensor b.experts.0.down_proj.weight is on the meta device, too"):
        convert(b__experts__0__down_proj__weight=torch.zeros(64, 48, device="meta"))
    del tensors["b.shared_experts.gate_proj.weight"]
    with pytest.raises(ValueError, match=r"tensor b.shared_experts.gate_proj.weight is not there"):
        convert()


# -- where it goes, and what is refused --


def test_devices_that_are_not_there_are_named():
    block = tiny.make_moe_block("v3")
    with pytest.raises(ValueError, match=r"\[rank 0/1\] device=cuda: torch .* sees no GPU here"):
        EPMoE.from_hf(block, EPGroup.single(), device="cuda")
    with pytest.raises(ValueError, match=r"\[rank 0/1\] device=meta: must be cpu or cuda"):
        EPMoE.from_hf(block, EPGroup.single(), device="meta")


def test_a_gpu_that_is_not_this_ranks_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(
        ValueError, match=r"to be on cuda:1, but this rank's current GPU is cuda:0; call torch.cuda.set_"
    ):
        EPMoE.from_hf(tiny.make_moe_block("v3"), EPGroup.single(), device="cuda:1")


def test_blocks_that_cannot_be_converted_are_named():
    group = EPGroup.single()
    with pytest.raises(TypeError, match=r"\[rank 0/1\] Linear is not a block of the kinds deepseekv2moe, "):
        EPMoE.from_hf(nn.Linear(2, 2), group)
    with pytest.raises(TypeError, match="Linear has no block"):
        replace_moe_blocks(nn.Linear(2, 2), group)


def test_a_model_is_replaced_whole_or_not_at_all():
    model = tiny.make_family("v3")
    last = model.model.layers[-1].mlp
    handle = last.gate.register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match=r"\[rank 0/1\] model.layers.2.mlp: DeepseekV3MoE.gate has a hook"):
        replace_moe_blocks(model, EPGroup.single())
    assert not any(isinstance(module, EPMoE) for module in model.modules())
    handle.remove()
    assert len(replace_moe_blocks(model, EPGroup.single())) == 2


def test_the_mode_of_training_is_kept():
    block = tiny.make_moe_block("v3")
    assert not EPMoE.from_hf(block, EPGroup.single()).training
    assert EPMoE.from_hf(block.train(), EPGroup.single()).training and block.training


def test_a_block_whose_weights_are_strided_is_copied():
    block = tiny.make_moe_block("qwen3")
    x_TH, group = torch.randn(20, 64), EPGroup.single()
    want_TH = EPMoE.from_hf(block, group)(x_TH)
    strided = block.experts.down_proj.detach().transpose(1, 2).contiguous().transpose(1, 2)
    block.experts.down_proj = nn.Parameter(strided)
    block.gate.weight = nn.Parameter(block.gate.weight.detach().T.contiguous().T)
    assert not block.experts.down_proj.is_contiguous()
    moe = EPMoE.from_hf(block, group)
    assert torch.equal(moe(x_TH), want_TH)
    block.experts.down_proj.data.zero_()  # a copy: the old block is free to go
    assert torch.equal(moe(x_TH), want_TH)


@pytest.mark.parametrize("family", ["v3", "glm4", "mixtral"])
def test_the_recipe_for_checkpoints_that_no_rank_can_hold(family, tmp_path):
    """As docs/transformers.md has it: parameters without memory, experts by the loader, the rest by name."""
    accelerate = pytest.importorskip("accelerate")
    model, (prompt,) = tiny.make_family(family), tiny.prompts(lengths=(25,))
    tiny.save(model, tmp_path)
    want_TV = tiny.golden_logits(model, prompt)

    config = AutoConfig.from_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    replace_moe_blocks(empty, EPGroup.single(), loader=tmp_path)
    checkpoint = Checkpoint(tmp_path)
    names = [name for name in empty.state_dict() if name in checkpoint.tensors and ".experts." not in name]
    empty.load_state_dict({name: checkpoint.read(name) for name in names}, strict=False, assign=True)
    assert not any(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert (tiny.golden_logits(empty, prompt) - want_TV).abs().max() < 1e-4
