"""MoEStep: one microbatch in one MoE layer. Its methods are the stages that schedules.py puts in order."""

from typing import Any

from torch import Tensor

from eprt import ops
from eprt.ep.api import DispatchHandle, Received
from eprt.layers.gate import RoutedTokens
from eprt.layers.layer_step import Layer, LayerStep, Microbatch
from eprt.layers.moe import EPMoE
from eprt.layers.sm_split import ONE_PROGRAM_PER_TILE, device_sms
from eprt.ops.decode_layer import DecodeExperts


class MoEStep(LayerStep):
    """Every stage reads what earlier ones have left here.

    Tensors made on one lane and read on another stay here until the layer ends: by then the lanes have met, so that
    their memory may be used again (lanes.py).

    signal: for combine_send tile by tile, from the backend; None: outputs leave when all are there.
    decode_experts: for mix(), which takes the place of all from gate to combine.
    """

    routed: RoutedTokens  # the gate's choice
    handle: DispatchHandle  # of the dispatch under way
    received: Received  # tokens for this rank's experts
    y_RH: Tensor  # the experts' outputs
    y_TH: Tensor  # their sums, token by token
    shared_TH: Tensor | None  # of the shared expert, where the layer has one

    def __init__(
        self,
        layer: Layer,
        moe: EPMoE,
        microbatch: Microbatch,
        cache: Any,
        signal: Any = None,
        decode_experts: DecodeExperts | None = None,
    ):
        super().__init__(layer, microbatch, cache)
        self.moe, self.ep, self.signal = moe, moe.ep[microbatch.batch.mode], signal
        self.decode_experts = decode_experts

    def gate(self) -> None:
        batch, logits_TE = self.microbatch.batch, self.moe.router_logits(self.h_TH)
        self.routed = self.moe.route(logits_TE, batch.token_id_T)

    def dispatch(self) -> None:
        self.handle, self.received = self.ep.dispatch(self.h_TH, self.routed.slot_idx_TK, self.routed.weights_TK)

    def dispatch_send(self) -> None:
        self.handle = self.ep.dispatch_send(self.h_TH, self.routed.slot_idx_TK, self.routed.weights_TK)

    def dispatch_start(self) -> None:
        self.ep.dispatch_start(self.handle)

    def dispatch_recv(self) -> None:
        self.received = self.ep.dispatch_recv(self.handle)

    def shared(self) -> None:
        self.shared_TH = self.moe.share(self.h_TH)

    def count(self) -> None:
        self.moe.count(self.routed.expert_idx_TK, self.microbatch.batch.first_row)
        self.moe.count_received(self.received)

    def experts(self) -> None:
        num_sms = None
        if self.signal is not None:
            num_sms = device_sms() - self.signal.num_sms
        elif self.microbatch.batch.overlap == "tbo":
            left = self.microbatch.batch.overlap_sms
            num_sms = ONE_PROGRAM_PER_TILE if left is None else device_sms() - left
        self.y_RH = self.moe.compute(self.ep, self.handle, self.received, self.signal, num_sms)

    def combine(self) -> None:
        self.y_TH = self.ep.combine(self.y_RH, self.handle)

    def combine_send(self) -> None:
        self.ep.combine_send(self.y_RH, self.handle, self.signal)

    def combine_start(self) -> None:
        self.ep.combine_start(self.handle)

    def combine_recv(self) -> None:
        self.y_TH = self.ep.combine_recv(self.handle)

    def mix(self) -> None:
        assert self.decode_experts is not None
        batch = self.microbatch.batch
        mixed = ops.mix_decodes(self.h_TH, batch.token_id_T, self.decode_experts)
        self.moe.count(mixed.expert_idx_TK, batch.first_row)
        self.ep.count_alone(mixed.num_tokens, mixed.compute_ns)
        self.y_TH, self.shared_TH = mixed.y_TH, None

    def add(self) -> None:
        self.microbatch.x_TH = self.layer.add_output(self.microbatch, self.y_TH, self.shared_TH)
