"""What torch's module interface shows of a layer: names, memory, loading, and experts that move."""

import numpy as np
import pytest
import torch
from eprt.balancer import Placement

from eprt import MoEConfig
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.experts import ExpertPool
from eprt.layers.linear import split_swiglu, swiglu_weights
from tests.fake_gpu import Group
from tests.unit.layers.cases import INNER, NUM_EXPERTS, WIDTH, filled


def names(experts: list[int], suffixes: tuple[str, ...] = ("weight",)) -> set[str]:
    swiglus = ["shared_experts", *(f"experts.{expert}" for expert in experts)]
    projections = ("gate_proj", "up_proj", "down_proj")
    held = {f"{swiglu}.{each}.{suffix}" for swiglu in swiglus for each in projections for suffix in suffixes}
    return {"gate.weight", "gate.e_score_correction_bias", *held}


@pytest.mark.parametrize(
    "weight_format, suffixes",
    [("same", ("weight",)), ("fp8", ("weight", "weight_scale_inv")), ("int8", ("weight", "weight_scale"))],
)
def test_names_are_those_of_checkpoints_and_of_this_ranks_experts(weight_format, suffixes):
    for rank, experts in ((0, [0, 1]), (2, [4, 5])):
        moe = filled(Group(rank, 3), weight_format=weight_format)
        assert set(moe.state_dict()) == names(experts, suffixes)
        assert dict(moe.named_parameters()).keys() == names(experts, suffixes) - {"gate.e_score_correction_bias"}
        assert not any(parameter.requires_grad for parameter in moe.parameters())


@pytest.mark.parametrize("weight_format", ["same", "fp8", "int8"])
def test_parameters_are_the_memory_that_is_computed_with(weight_format):
    moe, x_TH = filled(weight_format=weight_format), torch.randn(9, WIDTH)
    assert moe(x_TH).abs().max() > 0
    for name, parameter in moe.named_parameters():
        if "down_proj.weight" in name:
            parameter.zero_()
    assert torch.equal(moe(x_TH), torch.zeros(9, WIDTH))


@pytest.mark.parametrize("weight_format", ["same", "fp8", "int8"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_loads_what_another_one_saved(weight_format, assign):
    first, second = (filled(seed=seed, weight_format=weight_format) for seed in (1, 2))
    x_TH = torch.randn(9, WIDTH)
    assert not torch.equal(first(x_TH), second(x_TH))
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    second.load_state_dict(state, assign=assign)
    assert torch.equal(first(x_TH), second(x_TH))


def test_the_states_of_all_ranks_together_load_on_any_rank():
    whole = filled(seed=3)
    merged = {}
    for rank in range(3):
        merged |= filled(Group(rank, 3), seed=3).state_dict()
    assert merged.keys() == whole.state_dict().keys()
    part = filled(Group(1, 3), seed=4)
    part.load_state_dict(merged)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in part.state_dict().items())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "experts.6.up_proj.weight"'):
        part.load_state_dict({**merged, "experts.6.up_proj.weight": torch.zeros(INNER, WIDTH)})
    del merged["experts.2.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "experts.2.up_proj.weight"'):
        part.load_state_dict(merged)


def test_quantised_weights_do_not_load_from_another_format():
    plain, fp8 = filled(), filled(weight_format="fp8")
    before = fp8.state_dict()["experts.0.up_proj.weight"].clone()
    with pytest.raises(
        RuntimeError, match=r"experts.0.up_proj.weight is torch.float32, this layer holds torch.float8_e4m"
    ):
        fp8.load_state_dict(plain.state_dict(), strict=False)
    with pytest.raises(
        RuntimeError, match=r"experts.0.up_proj.weight is torch.float8_e4m3fn, this layer holds torch.flo"
    ):
        plain.load_state_dict(fp8.state_dict(), strict=False)
    assert torch.equal(fp8.state_dict()["experts.0.up_proj.weight"].view(torch.uint8), before.view(torch.uint8))


def test_an_expert_with_two_slots_on_a_rank_is_shown_once_and_loaded_twice():
    placement = Placement(np.array([[0, 1, 2, 3, 4, 5, 2]]), num_gpus=1)
    moe, other = filled(slot_map=SlotMap.from_placement(placement, 0)), filled(seed=5)
    assert moe.state_dict().keys() == other.state_dict().keys()
    moe.load_state_dict(other.state_dict())
    x_TH = torch.randn(40, WIDTH)
    assert torch.equal(moe(x_TH), other(x_TH))
    assert moe.expert_load()[2] > 0 and moe.expert_load()[6] > 0


def test_names_follow_experts_that_move():
    config = MoEConfig(WIDTH, INNER, NUM_EXPERTS, 2, INNER, dtype=torch.float32)
    pool = ExpertPool(config, 5)
    moe = filled(Group(0, 3), pool=pool)
    kept = moe.experts.get_submodule("1")
    moved = [tensor.clone() for tensor in moe.experts.get_submodule("0").state_dict().values()]
    row = np.array([5, 1, 2, 3, 4, 0])
    for part in pool.parts:  # expert 5 has come into a spare buffer
        part[4] = part[moe.weight_buffers()[0]]
    moe.place(SlotMap.from_row(row, NUM_EXPERTS), [4, moe.weight_buffers()[1]])
    assert set(moe.state_dict()) == names([1, 5]) and moe.experts.get_submodule("1") is kept
    assert all(
        torch.equal(a, b) for a, b in zip(moe.experts.get_submodule("5").state_dict().values(), moved, strict=True)
    )


def test_a_part_does_not_move_by_itself():
    moe = filled()
    for part in (moe.gate, moe.shared_experts, moe.experts.get_submodule("3")):
        with pytest.raises(
            RuntimeError, match=r"is part of an EPMoE and cannot become torch.bfloat16 on cpu by itself"
        ):
            part.bfloat16()
        part.float().cpu()


@pytest.mark.parametrize("weight_format", ["same", "fp8", "int8"])
def test_a_swiglu_is_split_into_what_it_was_made_of(weight_format):
    made = [torch.randn(shape) for shape in ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))]
    parts = split_swiglu(*swiglu_weights(*made, weight_format, torch.float32), INNER)
    for part, want in zip(parts, made):
        assert part.shape == want.shape
        assert (part.dequantize() - want).abs().max() <= {"same": 0, "int8": 0.03, "fp8": 0.25}[weight_format]
