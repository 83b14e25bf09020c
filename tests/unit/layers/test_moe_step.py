"""One microbatch in one MoE layer: on how many SMs its experts compute."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eprt import EPGroup
from eprt.layers import moe_step
from eprt.layers.layer_step import Microbatch
from eprt.layers.moe_step import MoEStep
from eprt.layers.sm_split import ONE_PROGRAM_PER_TILE
from tests.unit.layers.cases import HIDDEN, IdleLayer, IdleMoE, batch_of
from tests.unit.layers.test_schedules import SLOTS, config_in, make_backend


class CountingMoE(IdleMoE):
    """Notes how many SMs the experts are given."""

    def compute(self, ep, handle, received, signal=None, num_sms=None):
        self.num_sms = num_sms
        return super().compute(ep, handle, received, signal, num_sms)


@pytest.mark.parametrize(
    "overlap, overlap_sms, signal, num_sms",
    [
        ("none", None, None, None),
        ("tbo", None, None, ONE_PROGRAM_PER_TILE),
        ("tbo", 24, None, 108),
        ("sbo", None, None, None),
        ("sbo", 8, SimpleNamespace(num_sms=8), 124),
    ],
)
def test_experts_leave_sms_to_the_exchange_beside_them(monkeypatch, overlap, overlap_sms, signal, num_sms):
    monkeypatch.setattr(moe_step, "device_sms", lambda: 132)
    group = EPGroup.single()
    moe = CountingMoE(group, {"normal": make_backend("cpu", config_in("normal", "cpu"), group)}, SLOTS)
    batch = replace(batch_of([3], [0], 0, overlap=overlap), overlap_sms=overlap_sms)
    step = MoEStep(IdleLayer(moe), moe, Microbatch(batch, torch.zeros(3, HIDDEN).bfloat16()), torch.empty(0), signal)
    step.attention()
    step.gate()
    step.dispatch()
    step.experts()
    assert moe.num_sms == num_sms
