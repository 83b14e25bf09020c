"""Batches, layers that compute nothing for the tests of schedules and lanes, and small layers that compute."""

import torch
from torch import Tensor, nn

from eprt import ops
from eprt.config import MoEConfig
from eprt.ep.api import Backend, DispatchHandle, Received
from eprt.ep.exchange import Exchange
from eprt.ep.group.group import EPGroup
from eprt.layers.batch import ForwardBatch, Split
from eprt.layers.gate import RoutedTokens
from eprt.layers.layer_step import Microbatch
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE

HIDDEN, TOP_K = 256, 4
# Of a layer that computes.
WIDTH, INNER, NUM_EXPERTS = 64, 48, 6


def batch_of(lengths: list[int], contexts: list[int], num_decode: int, **fields) -> ForwardBatch:
    """Requests with that many new tokens behind contexts that long; for two-batch overlap unless told otherwise."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = [context + i for length, context in zip(lengths, contexts) for i in range(length)]
    fields = {"overlap": "tbo", "split": Split.in_middle(starts), **fields}
    return ForwardBatch(
        token_id_T=torch.arange(starts[-1]),
        position_T=torch.tensor(positions, dtype=torch.int64),
        kv_slot_T=torch.arange(starts[-1]) + 1000,
        page_table_BP=torch.arange(len(lengths), dtype=torch.int32).view(-1, 1),
        seq_len_B=torch.tensor([a + b for a, b in zip(lengths, contexts)], dtype=torch.int32),
        query_start_B1=torch.tensor(starts, dtype=torch.int32),
        num_decode=num_decode,
        logits_idx=torch.arange(starts[-1]),
        num_context=sum(lengths[num_decode:]) + sum(contexts[num_decode:]),
        **fields,
    )


class IdleMoE(EPMoE):
    """Experts that return what lies in their outputs' memory, behind a real exchange."""

    def __init__(self, group: EPGroup, backends: dict[str, Backend], num_slots: int):
        nn.Module.__init__(self)
        self.config, self.group, self.ep = MoEConfig(HIDDEN, 64, num_slots, TOP_K), group, Exchange(backends)
        self.expert_of_slot = list(range(num_slots // group.size))
        self.mode = "normal"

    def router_logits(self, x_TH: Tensor) -> Tensor:
        return x_TH[:, :1]

    def route(self, logits_TE: Tensor, token_id_T: Tensor | None = None) -> RoutedTokens:
        shape = (logits_TE.shape[0], TOP_K)
        expert_idx_TK = torch.arange(TOP_K).expand(shape)
        return RoutedTokens(torch.ones(shape), expert_idx_TK, expert_idx_TK)

    def for_decodes(self, num_tokens: int) -> None:
        """The calls are what is looked at."""

    def count(self, expert_idx_TK: Tensor, first_row: int = 0) -> None:
        pass

    def count_received(self, received: Received) -> None:
        pass

    def share(self, x_TH: Tensor) -> None:
        return None

    def compute(self, ep: Backend, handle: DispatchHandle, received: Received, signal=None, num_sms=None) -> Tensor:
        return ep.combine_buffer(handle, received)


class IdleLayer:
    """A layer whose attention passes its input on."""

    def __init__(self, mlp):
        self.mlp = mlp

    def attend(self, microbatch: Microbatch, kv_pages: Tensor) -> tuple[Tensor, Tensor]:
        return microbatch.x_TH, microbatch.x_TH

    def add_output(self, microbatch: Microbatch, y_TH: Tensor, shared_TH: Tensor | None) -> Tensor:
        return ops.add_rows(microbatch.x_TH, y_TH, shared_TH)


def filled(group: EPGroup | None = None, seed: int = 0, weight_format: str = "same", **options) -> EPMoE:
    """A layer whose weights depend on the logical expert alone."""
    generator = torch.Generator().manual_seed(seed)
    config = MoEConfig(WIDTH, INNER, NUM_EXPERTS, 2, INNER, weight_format=weight_format, dtype=torch.float32)
    options = options if group is None else {"ep": Exchange({"normal": None}), **options}  # type: ignore[dict-item]
    moe = EPMoE(config, group or EPGroup.single(), **options).eval()
    moe.load_gate(torch.randn(NUM_EXPERTS, WIDTH, generator=generator), torch.randn(NUM_EXPERTS, generator=generator))
    shapes = (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    experts = [[torch.randn(shape, generator=generator) / 8 for shape in shapes] for _ in range(NUM_EXPERTS + 1)]
    for slot, expert in enumerate(moe.expert_of_slot):
        if expert >= 0:
            moe.load_expert(slot, *experts[expert])
    gate, up, down = experts[NUM_EXPERTS]
    moe.load_shared(MLP(gate, up, down, weight_format, torch.float32))
    return moe
