"""What every rank does in test_v4_experts.py: EPMoE with DeepSeek V4's gates, cut activations and fp4 experts."""

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt import EPGroup, EPMoE
from eprt.config import MoEConfig
from eprt.ep.placement.slot_map import SlotMap
from eprt.gpu.device import take_device
from eprt.layers.mlp import MLP
from eprt.ops.gate import GateRule
from eprt.ops.weight import Weight, quantize_fp4
from tests import reference_ops as reference

EXPERTS, HIDDEN, WIDTH, VOCAB, MOST_TOKENS, LIMIT = 8, 256, 96, 40, 64, 0.8
CONFIG = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_experts=EXPERTS,
    top_k=3,
    shared_intermediate_size=WIDTH,
    scoring="sqrtsoftplus",
    routed_scaling_factor=1.5,
    num_max_tokens_per_rank=MOST_TOKENS,
    weight_format="fp4",
    swiglu_limit=LIMIT,
)


class Weights:
    """Of one layer, the same on every rank. Kept on the CPU, for the oracle."""

    def __init__(self, seed: int):
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw) * 2 * shape[-1] ** -0.5

        self.gate_EH, self.bias_E = normal(EXPERTS, HIDDEN), 0.3 * torch.randn(EXPERTS, generator=draw)
        self.table_VK = torch.rand(VOCAB, EXPERTS, generator=draw).argsort(dim=1)[:, : CONFIG.top_k].contiguous()
        shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
        self.experts = [[quantize_fp4(normal(*shape)) for shape in shapes] for _ in range(EXPERTS)]
        self.shared = [normal(*shape).bfloat16() for shape in shapes]

    def layer(self, group: EPGroup, config: MoEConfig, hashed: bool, **options: object) -> EPMoE:
        slot_map = SlotMap.contiguous(EXPERTS, group.size, group.size)  # one of the experts has a replica, or more do
        moe = EPMoE(config, group, slot_map=slot_map, device="cuda", **options)  # type: ignore[arg-type]
        moe.load_gate(self.gate_EH.cuda(), *((None, self.table_VK.cuda()) if hashed else (self.bias_E.cuda(),)))
        for slot, expert in enumerate(moe.expert_of_slot):
            if expert >= 0:
                moe.load_expert(slot, *(Weight(w.data.cuda(), on_gpu(w.scale)) for w in self.experts[expert]))
        assert moe.pool.w13.is_fp4 and moe.pool.w13.data.is_cuda
        moe.load_shared(MLP(*(w.cuda() for w in self.shared), "same", config.dtype, config.swiglu_limit))
        return moe

    def oracle(self, x_TH: Tensor, token_T: Tensor, hashed: bool) -> Tensor:
        """In fp32 on the CPU."""
        rule = GateRule("sqrtsoftplus", CONFIG.top_k, 1, 1, True, CONFIG.routed_scaling_factor)
        x_TH = x_TH.float()
        given = self.table_VK[token_T.clamp(min=0)] if hashed else None
        weight_TK, chosen_TK = reference.gate_topk(x_TH @ self.gate_EH.T, None if hashed else self.bias_E, rule, given)
        weight_TE = torch.zeros(len(x_TH), EXPERTS).scatter_(1, chosen_TK, weight_TK) * (token_T >= 0)[:, None]
        y_TH = _swiglu(x_TH, *(w.float() for w in self.shared))
        for e, matrices in enumerate(self.experts):
            y_TH += weight_TE[:, e : e + 1] * _swiglu(x_TH, *(w.dequantize() for w in matrices))
        return y_TH


def on_gpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cuda()


def _swiglu(x_TH: Tensor, gate_IH: Tensor, up_IH: Tensor, down_HI: Tensor) -> Tensor:
    gate, up = (x_TH @ gate_IH.T).clamp(max=LIMIT), (x_TH @ up_IH.T).clamp(-LIMIT, LIMIT)
    return (F.silu(gate) * up) @ down_HI.T


def tokens(group: EPGroup, num: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's own rows and token ids; every fifth is padding."""
    draw = torch.Generator().manual_seed(100 * num + group.rank)
    token_T = torch.randint(0, VOCAB, (num,), generator=draw)
    token_T[4::5] = -1
    return torch.randn(num, HIDDEN, generator=draw).to(dtype), token_T


def near(got: Tensor, want: Tensor, limit: float, what: str) -> None:
    """Of the median token: in bfloat16 another rounding may give a token other experts."""
    error = ((got.cpu().float() - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
    assert error < limit, f"{what}: relative error {error:.2e}"


def layers(group: EPGroup, wide: bool) -> None:
    """With learned gates and with tables, in both modes, with rows as they are and as e4m3. wide: in float32."""
    take_device("cuda", group)
    dtype, limit = (torch.float32, 1e-5) if wide else (torch.bfloat16, 1.5e-2)
    weights = Weights(seed=1)
    for hashed, mode, payload in itertools.product((True, False), ("normal", "low_latency"), ("same", "fp8")):
        if payload == "fp8" and (wide or group.size == 1):
            continue
        config = replace(CONFIG, dtype=dtype, payload=payload)
        moe = weights.layer(group, config, hashed, mode=mode)
        for num in (1, 17, MOST_TOKENS, 100 + 3 * group.rank):
            x_TH, token_T = tokens(group, num, dtype)
            got = moe(x_TH.cuda(), token_T.cuda())
            what = f"{hashed=}, {mode}, payload {payload}, {num} tokens, {group.size} ranks"
            near(got, weights.oracle(x_TH, token_T, hashed), 5e-2 if payload == "fp8" else limit, what)
        if mode == "low_latency" and not wide:
            _replays(group, moe, weights, hashed, payload)
        moe.close()


def _replays(group: EPGroup, moe: EPMoE, weights: Weights, hashed: bool, payload: str) -> None:
    """A recorded call sees other rows and token ids than those with which it was recorded."""
    x_TH, token_T = (part.cuda() for part in tokens(group, 24, torch.bfloat16))
    moe(x_TH, token_T)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TH = moe(x_TH, token_T)
    for seed in range(3):
        other, ids = tokens(group, 24 + seed, torch.bfloat16)
        x_TH.copy_(other[:24])
        token_T.copy_(ids[:24])
        graph.replay()
        limit = 5e-2 if payload == "fp8" else 1.5e-2
        near(y_TH, weights.oracle(other[:24], ids[:24], hashed), limit, f"replayed, {hashed=}, payload {payload}")
