"""EPMoE on one rank: its rounds, formats, moves and errors. tests/unit/compat/hf compares it with transformers."""

import copy
import pickle
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from eprt.balancer import Placement
from torch import nn

from eprt import EngineConfig, EPGroup, EPMoE, MoEConfig
from eprt.ep.api import Received
from eprt.ep.placement.slot_map import SlotMap, SlotTable
from eprt.layers.experts import ExpertPool, Experts
from eprt.models.loader import load_model
from eprt.ops.known_rows import KnownRows
from eprt.ops.weight import GPU_FP4_SCALES, quantize_fp4, require_gpu_scales
from tests import tiny
from tests.fake_gpu import Group
from tests.paths import DEMO
from tests.unit.layers.cases import NUM_EXPERTS, WIDTH, filled


def relative_error(y, want):
    return ((y - want).float().pow(2).mean().sqrt() / want.float().pow(2).mean().sqrt()).item()


@torch.no_grad()
def test_more_tokens_than_one_round_takes():
    block = tiny.make_moe_block("v3")
    whole = EPMoE.from_hf(block, EPGroup.single())
    rounds = EPMoE.from_hf(block, EPGroup.single(), num_max_tokens_per_rank=7)
    x = torch.randn(50, 64)
    assert torch.equal(rounds(x), whole(x))
    assert rounds.expert_load() == whole.expert_load() and sum(whole.expert_load()) == 50 * 4


@pytest.mark.parametrize("weight_format, limit", [("int8", 0.03), ("fp8", 0.08)])
@torch.no_grad()
def test_quantised_weights(weight_format, limit):
    block = tiny.make_moe_block("v3")
    moe = EPMoE.from_hf(block, EPGroup.single(), weight_format=weight_format)
    x = torch.randn(60, 64)
    assert 1e-4 < relative_error(moe(x), block(x[None])[0]) < limit


def test_replicas_share_an_experts_tokens():
    slots = SlotMap.from_placement(Placement(np.array([[0, 1, 0, -1]]), num_gpus=2), 0)
    assert slots.slot_idx(torch.tensor([[0, 1], [0, 1], [-1, 0]])).tolist() == [[0, 1], [2, 1], [-1, 0]]
    assert [slots.experts_of_rank(r, 2) for r in range(2)] == [[0, 1], [0, -1]]


@pytest.mark.parametrize("num_ranks, want", [(1, [16]), (3, [6, 5, 5]), (4, [4] * 4), (7, [3, 3, 2, 2, 2, 2, 2])])
def test_contiguous_slots_are_even(num_ranks, want):
    slots = SlotMap.contiguous(16, num_ranks)
    held = [slots.experts_of_rank(r, num_ranks) for r in range(num_ranks)]
    assert [sum(e >= 0 for e in experts) for experts in held] == want
    assert sorted(e for experts in held for e in experts if e >= 0) == list(range(16))
    assert slots.expert_of_slot_S[slots.slot_idx(torch.arange(16)[None])[0]].tolist() == list(range(16))


# -- errors --


def config(**fields):
    return MoEConfig(**{"hidden_size": 64, "intermediate_size": 48, "num_experts": 8, "top_k": 2, **fields})


def test_forward_without_weights_names_them():
    moe = EPMoE(config(dtype=torch.float32), EPGroup.single(), layer_idx=5)
    weights = torch.zeros(48, 64), torch.zeros(48, 64), torch.zeros(64, 48)
    for slot in range(7):
        moe.load_expert(slot, *weights)
    with pytest.raises(RuntimeError, match=r"layer 5: no weights for gate, expert 7 \(slot 7\)"):
        moe(torch.zeros(1, 64))
    moe.load_gate(torch.zeros(8, 64))
    moe.load_expert(7, *weights)
    assert torch.equal(moe.eval()(torch.ones(1, 64)), torch.zeros(1, 64))


def test_wrong_input_is_named():
    moe = EPMoE.from_hf(tiny.make_moe_block("v3"), EPGroup.single())
    with pytest.raises(ValueError, match=r"got torch.bfloat16 \(3, 64\), expected torch.float32 \[.., 64\]"):
        moe(torch.zeros(3, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"\(3, 63\)"):
        moe(torch.zeros(3, 63))
    with pytest.raises(RuntimeError, match="no gradients"):
        moe.train()(torch.zeros(3, 64, requires_grad=True))
    with pytest.raises(ValueError, match="mode='fast'"):
        EPMoE(config(), EPGroup.single(), mode="fast")


def test_wrong_weights_are_named():
    moe = EPMoE(config(), EPGroup.single())
    with pytest.raises(ValueError, match=r"down of the expert for slot 3 has shape \(48, 64\), expected \(64, 48\)"):
        moe.load_expert(3, *[torch.zeros(48, 64)] * 3)
    with pytest.raises(ValueError, match=r"gate weight has shape \(8, 63\)"):
        moe.load_gate(torch.zeros(8, 63))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_slot_table_follows_every_placement(in_place):
    """Its answers are those of the slot map, whose count of tokens goes on; in place its tensors stay where they are,
    also under a placement that needs less of them."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.concatenate([np.arange(6), rng.integers(-1, 6, 4)])) for _ in range(6)]
    rows.insert(3, np.array([*range(6), -1, -1, -1, -1]))  # no replicas at all
    rows.insert(4, np.array([0, 0, 0, 0, 0, *range(1, 6)]))  # as many of one as there can be
    table = SlotTable(SlotMap.from_row(rows[0], 6), "cpu", in_place)
    addresses = [t.data_ptr() for t in (table._slot_LX, table._bound_LX, table._sent_L)]
    sent_L = np.zeros(7, dtype=np.int64)
    for row in rows:
        slot_map = SlotMap.from_row(row, 6, weight_S=rng.random(10))
        table.set(slot_map)
        expert_TK = torch.from_numpy(rng.integers(-1, 6, (20, 3)))
        assert torch.equal(table.slot_idx(expert_TK), slot_map.slot_idx(expert_TK, sent_L))
        if in_place and not slot_map.has_replicas:  # a recorded graph cannot tell, and counts all the same
            sent_L += np.bincount(expert_TK.reshape(-1).numpy() % 7, minlength=7)
    if in_place:
        assert addresses == [t.data_ptr() for t in (table._slot_LX, table._bound_LX, table._sent_L)]


def test_experts_tell_the_products_what_the_host_knows(monkeypatch):
    """Counts that the exchange knew, and where the slots' matrices lie now; nothing where it did not. And the limit,
    also where the products are two calls."""
    pool = ExpertPool(MoEConfig(8, 4, num_experts=5, top_k=1, swiglu_limit=7.0, dtype=torch.float32), 5)
    told, experts = [], Experts(2, pool)
    monkeypatch.setattr("eprt.ops.grouped_experts", lambda *inputs: told.append(inputs[-4:]) or inputs[4])
    monkeypatch.setattr("eprt.ops.experts_up", lambda *inputs: told.append(inputs[-3:]))
    monkeypatch.setattr("eprt.ops.experts_down", lambda inner, w2, out_RH, *rest: out_RH)
    experts.place([3, 1])
    x_RH, count_E = torch.zeros(7, 8), torch.tensor([5, 2], dtype=torch.int32)
    experts(Received(x_RH, count_E, counts=(5, 2)), x_RH, 7)
    experts(Received(x_RH, count_E), x_RH, num_sms=3)
    experts(Received(x_RH, count_E), x_RH, 7, signal=Mock(), num_sms=3)
    assert told == [(7, None, KnownRows((5, 2), [3, 1]), 7.0), (None, 3, None, 7.0), (7, 3, 7.0)]
    assert KnownRows((5, 0, 2), [0, 1, 2]).mean_rows == 3.5 and KnownRows((0,), [0]).mean_rows == 0


def test_scales_of_fp4_that_gpus_cannot_hold_are_refused_there_alone():
    """Before anything of the expert is copied."""
    weights = [quantize_fp4(torch.ones(32, 32)) for _ in range(3)]
    config = MoEConfig(32, 32, num_experts=1, top_k=1, weight_format="fp4", dtype=torch.float32)
    pool = ExpertPool(config, 1)
    scale = weights[2].scale
    assert scale is not None
    scale[5, 0] = GPU_FP4_SCALES[-1]
    pool.fill_buffer(0, *weights)
    require_gpu_scales(pool.w2)
    scale[5, 0] += 1
    pool.fill_buffer(0, *weights)
    with pytest.raises(ValueError, match=r"scales up to 2\^34, GPUs compute with at most 2\^33; use CPU ranks"):
        require_gpu_scales(pool.w2)
    pool.device = torch.device("cuda")
    with pytest.raises(ValueError, match="use CPU ranks"):
        pool.fill_buffer(0, *weights)


def test_padding_goes_to_no_expert():
    """A row of token id -1 changes nothing for the others, and its experts are not counted."""
    model = load_model(EngineConfig(DEMO), EPGroup.single())
    (moe, *_) = model.moe_layers()
    x_TH = torch.randn(5, 256).bfloat16()
    want_TH = moe(x_TH[:3], torch.zeros(3, dtype=torch.int64))
    counted = sum(moe.expert_load())
    got_TH = moe(x_TH, torch.tensor([0, 0, 0, -1, -1]))
    assert torch.equal(got_TH[:3], want_TH) and sum(moe.expert_load()) == 2 * counted
    moe.reset_load()
    assert sum(moe.expert_load()) == 0
    model.close()


# -- as a module of torch --


def test_a_layer_moves_to_another_dtype_and_back():
    moe, x_TH = filled(), torch.randn(7, WIDTH)
    want_TH = moe(x_TH)
    first = moe.ep
    assert moe.to(torch.bfloat16) is moe and moe.ep is not first
    assert moe.config.dtype == torch.bfloat16
    assert {p.dtype for p in moe.parameters()} == {torch.bfloat16}
    assert moe.state_dict()["gate.e_score_correction_bias"].dtype == torch.float32
    assert relative_error(moe(x_TH.bfloat16()), want_TH) < 0.05
    moe.float().cpu()
    assert moe.ep is first and moe(x_TH).dtype == torch.float32
    moe.close()


@pytest.mark.parametrize("weight_format", ["fp8", "int8"])
def test_quantised_weights_move_bit_for_bit(weight_format):
    moe = filled(weight_format=weight_format)
    before = {name: tensor.clone() for name, tensor in moe.state_dict().items() if "experts" in name}
    moe.bfloat16()
    assert all(torch.equal(moe.state_dict()[n].view(torch.uint8), t.view(torch.uint8)) for n, t in before.items())


def test_layers_that_share_an_exchange_share_it_after_a_move_too():
    model = nn.ModuleList([filled(), filled(seed=1)])
    model[1].ep = model[0].ep
    model.bfloat16()
    assert model[0].ep is model[1].ep and model[0].ep["normal"].config.dtype == torch.bfloat16


def test_moves_that_cannot_be_are_refused_before_anything_moves():
    moe, x_TH = filled(), torch.randn(2, WIDTH)
    want_TH, ep = moe(x_TH), moe.ep
    for move, words in (
        (
            lambda: moe.half(),
            r"\[rank 0/1\] EPMoE layer 0: cannot become torch.float16: an EPMoE computes in",
        ),
        (lambda: moe.double(), "cannot become torch.float64"),
        (lambda: moe.to("meta"), "cannot go to meta: an EPMoE computes on cpu or cuda"),
    ):
        with pytest.raises(ValueError, match=words):
            move()
        assert moe.ep is ep and torch.equal(moe(x_TH), want_TH)
    shared = filled(pool=ExpertPool(moe.config, NUM_EXPERTS))
    with pytest.raises(ValueError, match="cannot move: its weights lie in a pool that layers share; build the model"):
        shared.bfloat16()
    given = filled(Group(0, 2))
    with pytest.raises(ValueError, match="was not made by make_exchange"):
        given.bfloat16()
    assert given.config.dtype == torch.float32


def test_copies_and_pickles_are_refused():
    moe = filled()
    with pytest.raises(TypeError, match=r"EPMoE layer 0: cannot be copied: .* build another with EPMoE.from_hf"):
        copy.deepcopy(nn.Sequential(moe))
    with pytest.raises(TypeError, match=r"cannot be pickled: .* save its state_dict\(\) instead"):
        pickle.dumps(moe)
    assert "rank 0 of 1, 6 of 6 experts, torch.float32, cpu, mode='normal'" in repr(moe)


def test_built_in_inference_mode_used_outside_of_it():
    with torch.inference_mode():
        moe = filled()
        inside_TH = moe(torch.ones(2, WIDTH))
    assert torch.equal(moe(torch.ones(2, WIDTH)), inside_TH)
    moe.load_state_dict(filled().state_dict())
    assert torch.equal(moe(torch.ones(2, WIDTH)), inside_TH)


def test_strided_rows_are_copied():
    moe, x_TH = filled(), torch.randn(5, WIDTH)
    assert torch.equal(moe(x_TH.T.contiguous().T), moe(x_TH))
    assert torch.equal(moe(torch.cat((x_TH, x_TH), 1)[:, :WIDTH]), moe(x_TH))


def test_token_ids_that_do_not_fit_are_named():
    moe, x_TH = filled(), torch.randn(2, 3, WIDTH)
    for wrong in (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"\[rank 0/1\] EPMoE layer 0: input_ids: got .*, expected integers"):
            moe(x_TH, wrong)
    assert moe(x_TH, torch.zeros(2, 3, dtype=torch.int32)).shape == x_TH.shape


def test_a_tensor_of_another_device_is_named():
    moe = filled()
    with pytest.raises(ValueError, match=r"hidden_TH is on meta, the layer on cpu; move one to the other with .to\(\)"):
        moe(torch.zeros(2, WIDTH, device="meta"))
