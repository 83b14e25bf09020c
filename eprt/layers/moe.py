"""EPMoE: a mixture-of-experts layer whose experts are spread over the ranks of a group.

T tokens and S slots of this rank, H hidden size, K experts per token, E logical experts, I intermediate size, R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from eprt.config import MoEConfig
from eprt.ep.api import Backend, DispatchHandle, Received
from eprt.ep.exchange import Exchange, share_exchange
from eprt.ep.group.group import EPGroup
from eprt.ep.placement.batch_router import BatchRouter
from eprt.ep.placement.load import LoadRecorder
from eprt.ep.placement.slot_map import SlotMap, SlotTable
from eprt.layers.decode_experts import DecodeParts
from eprt.layers.experts import ExpertPool, Experts
from eprt.layers.gate import Gate, RoutedTokens
from eprt.layers.held import HeldExperts, HeldGate, HeldSwiglu, lasting
from eprt.layers.linear import Matrix
from eprt.layers.lost_ranks import LostRanks
from eprt.layers.mlp import MLP
from eprt.layers.moe_operator import moe, moe_with_logits, number_layer
from eprt.layers.rounds import exchange_in_rounds
from eprt.ops.decode_layer import DecodeExperts
from eprt.ops.weight import Weight

MODES = ("normal", "low_latency")


class EPMoE(nn.Module):
    """Gate, shared expert and this rank's routed experts. Every rank calls forward equally often, also without tokens.
    Weights come in by load_gate, load_expert and load_shared, or all at once by EPMoE.from_hf. Inference only: forward
    computes no gradients. As an nn.Module it has what this rank holds: gate.weight, shared_experts.*, and experts.N.*
    for each logical expert N that lives here (held.py). It moves to another device or dtype like any module, on all
    ranks alike; it cannot be copied or pickled, since it belongs to the ranks of a group.

    backend: of eprt.ep.registry, or "auto".
    mode: "normal" or "low_latency"; "auto" is "normal". forward may be told otherwise.
    layer_idx: the layer's row in expert-load reports.
    ep: the communication, from make_exchange; it then belongs to the caller. By default layers of the group whose
        dispatches have one shape share one, which the last one's close() frees.
    slot_map: where the experts live; default evenly, in order.
    pool: the memory that weights lie in, where layers share it; default its own.
    device: where tokens and weights are, "cpu" or "cuda" (the current GPU).
    mask_lost_ranks: a call in which a rank of this host dies starts anew without it, on all others: its experts' tokens
        go to their replicas; EPError names experts that have none. CPU ranks of one host; on all ranks alike.
    """

    load_S: Tensor

    @torch.inference_mode(False)  # tensors that a later call may change, in whatever mode the caller is now
    def __init__(
        self,
        config: MoEConfig,
        group: EPGroup,
        *,
        layer_idx: int = 0,
        backend: str = "auto",
        mode: str = "auto",
        ep: Exchange | None = None,
        slot_map: SlotMap | None = None,
        pool: ExpertPool | None = None,
        device: str = "cpu",
        mask_lost_ranks: bool = False,
    ):
        super().__init__()
        if mode not in ("auto", *MODES):
            raise ValueError(f"mode={mode!r}: must be auto, {' or '.join(MODES)}")
        self.config, self.group, self.layer_idx = config, group, layer_idx
        self.slot_map = slot_map or SlotMap.contiguous(config.num_experts, group.size)
        self._slot_table = SlotTable(self.slot_map, device)
        self.mode = "normal" if mode == "auto" else mode
        self._owns_ep = ep is None
        if ep is None:
            ep = share_exchange(config, group, self.slot_map.num_slots, backend, self.mode, device)
        self.ep = ep
        if self.mode not in self.ep:
            raise ValueError(f"mode={mode!r} needs ep[{self.mode!r}], but ep has only {', '.join(self.ep)}")
        self._lost = LostRanks(self, ep, group, layer_idx) if mask_lost_ranks else None

        self.expert_of_slot = self.slot_map.experts_of_rank(group.rank, group.size)  # by local slot, -1 for none
        self._shares_pool, num_slots = pool is not None, len(self.expert_of_slot)
        self._experts = Experts(num_slots, pool or ExpertPool(config, num_slots, device=device))
        self._gate: Gate | None = None
        self._shared: MLP | None = None
        # The same weights by name, for torch: forward reads the objects above.
        self.gate: HeldGate | None = None
        self.shared_experts: HeldSwiglu | None = None
        self.experts = HeldExperts(self._experts.pool, config.num_experts)
        self.returns_router_logits = False
        self._decode_parts = DecodeParts()
        self._slots_to_load = {slot for slot, expert in enumerate(self.expert_of_slot) if expert >= 0}
        # int64, tokens routed to each local slot since the layer was built or reset_load() was called.
        self.register_buffer("load_S", torch.zeros(num_slots, dtype=torch.int64, device=device), persistent=False)
        self._number = number_layer(self)
        self._recorder: LoadRecorder | None = None
        self._router: BatchRouter | None = None
        self._row = 0  # this layer's row in both the recorder and the router

    @staticmethod
    def from_hf(hf_moe_module: nn.Module, group: EPGroup, **options: Any) -> "EPMoE":
        """The expert-parallel twin of a transformers MoE block; see eprt.compat.hf.convert_moe."""
        return resolve_name("eprt.compat.hf:convert_moe")(hf_moe_module, group, **options)

    # -- weights --

    @torch.inference_mode(False)
    def load_gate(self, weight_EH: Tensor, bias_E: Tensor | None = None, table_VK: Tensor | None = None) -> None:
        """bias_E: the correction bias; it affects which experts are chosen, not their weights. table_VK: the experts of
        each token id, where that alone chooses them (hash routing): forward needs input_ids then."""
        kept = [None if each is None else lasting(each) for each in (bias_E, table_VK)]
        self._gate = gate = Gate(self.config, lasting(weight_EH), *kept)
        self.gate = HeldGate(gate.linear.weight.data, gate.bias_E, gate.table_VK)

    def load_expert(self, slot: int, gate_IH: Matrix, up_IH: Matrix, down_HI: Matrix) -> None:
        """Fills local slot `slot` with the weights of logical expert expert_of_slot[slot]."""
        self._experts.load_expert(slot, gate_IH, up_IH, down_HI)
        self._slots_to_load.discard(slot)
        if not self._slots_to_load:
            self._show_experts()

    @torch.inference_mode(False)
    def load_shared(self, shared_expert: MLP) -> None:
        self._shared = shared_expert
        for linear in (shared_expert.gate_up, shared_expert.down):
            weight = linear.weight
            linear.weight = Weight(lasting(weight.data), None if weight.scale is None else lasting(weight.scale))
        width = self.config.shared_intermediate_size
        self.shared_experts = HeldSwiglu(shared_expert.gate_up.weight, shared_expert.down.weight, width)

    @torch.inference_mode(False)
    def _show_experts(self) -> None:
        """Gives torch the experts that are here, under their names."""
        buffers: dict[int, list[int]] = {}
        for expert, buffer in zip(self.expert_of_slot, self._experts.buffers):
            if expert >= 0 and buffer >= 0:
                buffers.setdefault(expert, []).append(buffer)
        self.experts.show(buffers)

    # -- forward --

    @torch.no_grad()
    def forward(self, hidden_TH: Tensor, input_ids: Tensor | None = None, *, mode: str | None = None) -> Any:
        """hidden_TH: [.., H] of any leading shape, also empty; returns the same shape and dtype.

        input_ids: token ids of the same leading shape. Where one is negative the row is padding: it goes to no expert.
        mode: "normal" or "low_latency" for this call, the same on all ranks.

        Returns (hidden_TH, router_logits) when the transformers block that this layer replaces did so.
        """
        if torch.compiler.is_compiling():
            return self._forward_compiled(hidden_TH, input_ids, mode)
        return self.forward_now(hidden_TH, input_ids, mode)

    def forward_now(self, hidden_TH: Tensor, input_ids: Tensor | None, mode: str | None) -> Any:
        """As forward, computed at once."""
        mode = mode or self.mode
        self._check_input(hidden_TH, input_ids, mode)
        x_TH = hidden_TH.reshape(-1, hidden_TH.shape[-1]).contiguous()
        logits_TE = self.router_logits(x_TH)

        def route_and_exchange() -> Tensor:
            routed = self.route(logits_TE, None if input_ids is None else input_ids.reshape(-1))
            self.count(routed.expert_idx_TK)
            exchange, limit = partial(self._exchange, ep := self.ep[mode]), ep.config.num_max_tokens_per_rank
            return exchange_in_rounds(exchange, limit, x_TH, routed.slot_idx_TK, routed.weights_TK)

        y = (route_and_exchange() if self._lost is None else self._lost.run(route_and_exchange)).view(hidden_TH.shape)
        return (y, logits_TE.to(hidden_TH.dtype)) if self.returns_router_logits else y

    def _forward_compiled(self, hidden_TH: Tensor, input_ids: Tensor | None, mode: str | None) -> Any:
        """As forward, for a compiler: one operator that it does not look into."""
        self._check_training(hidden_TH)
        inputs = hidden_TH, input_ids, self._number, mode
        return moe_with_logits(*inputs, self.config.num_experts) if self.returns_router_logits else moe(*inputs)

    def _exchange(
        self, ep: Backend, x_TH: Tensor, slot_idx_TK: Tensor, weights_TK: Tensor, num_rounds: int
    ) -> tuple[Tensor, int]:
        """The layer's output, and how many rounds the rank with the most tokens announced."""
        routed = x_TH, slot_idx_TK, weights_TK, num_rounds
        if ep.sends_in_background():
            handle = ep.dispatch_send(*routed)
            shared_TH = self.share(x_TH)
            received = ep.dispatch_recv(handle)
        else:
            handle, received = ep.dispatch(*routed)
            shared_TH = self.share(x_TH)
        self.count_received(received)
        y_TH = ep.combine(self.compute(ep, handle, received), handle)
        return y_TH if shared_TH is None else y_TH + shared_TH, received.num_rounds

    # -- the parts of a forward pass; moe_step.py puts them in other orders --

    def router_logits(self, x_TH: Tensor) -> Tensor:
        """fp32 [T, E]."""
        assert self._gate is not None
        return self._gate.logits(x_TH)

    def route(self, logits_TE: Tensor, token_id_T: Tensor | None = None) -> RoutedTokens:
        """Where each token goes. token_id_T: where one is negative the row is padding and goes to no expert."""
        assert self._gate is not None
        only_slot_L = self._slot_table.only_slot_L if self._router is None else None
        if only_slot_L is not None:
            return RoutedTokens(*self._gate.choose_slots(logits_TE, token_id_T, only_slot_L))
        weights_TK, expert_idx_TK = self._gate.choose(logits_TE, token_id_T)
        if self._router is None:
            return RoutedTokens(weights_TK, expert_idx_TK, self._slot_table.slot_idx(expert_idx_TK))
        slot_idx_TK = self._router.slot_idx(self._row, self.slot_map, expert_idx_TK)
        return RoutedTokens(weights_TK, expert_idx_TK, slot_idx_TK)

    def for_decodes(self, num_tokens: int) -> DecodeExperts | None:
        """What computes so many decodes in one operator; None where that takes the parts here, one by one."""
        if self._router is not None or self._gate is None:
            return None
        parts = self._gate, self._slot_table.only_slot_L, self._experts, self._shared, self.load_S
        return self._decode_parts.for_tokens(num_tokens, *parts)

    def count(self, expert_idx_TK: Tensor, first_row: int = 0) -> None:
        """Counts the choices of these tokens. Nothing of a forward pass waits for it.

        first_row: where these tokens begin among the step's rows.
        """
        if self._recorder is not None:
            self._recorder.record(self._row, expert_idx_TK, first_row)

    def count_received(self, received: Received) -> None:
        """Adds to load_S. Nothing of a forward pass waits for it."""
        self.load_S.add_(received.recv_count_E)

    def share(self, x_TH: Tensor) -> Tensor | None:
        """The shared expert's output, where the layer has one."""
        return None if self._shared is None else self._shared(x_TH)

    def compute(
        self, ep: Backend, handle: DispatchHandle, received: Received, signal: Any = None, num_sms: int | None = None
    ) -> Tensor:
        """y_RH, the routed experts' outputs, in memory that combine_send need not copy. For the rest see Experts."""
        # With static shapes x_RH has room for more rows than come; as a rule a rank gets as many as it sends.
        expected_rows = None if ep.config.mode == "normal" else max(1, handle.num_tokens) * self.config.top_k
        return self._experts(received, ep.combine_buffer(handle, received), expected_rows, signal, num_sms)

    # -- checks --

    def _fail(self, problem: str, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"[rank {self.group.rank}/{self.group.size}] EPMoE layer {self.layer_idx}: {problem}")

    def _check_input(self, hidden: Tensor, input_ids: Tensor | None, mode: str) -> None:
        device = self.load_S.device
        if hidden.shape[-1:] != (self.config.hidden_size,) or hidden.dtype != self.config.dtype:
            self._fail(
                f"hidden_TH: got {hidden.dtype} {tuple(hidden.shape)}, expected {self.config.dtype} "
                f"[.., {self.config.hidden_size}]"
            )
        if hidden.device != device:
            self._fail(f"hidden_TH is on {hidden.device}, the layer on {device}; move one to the other with .to()")
        if input_ids is not None and (
            input_ids.shape != hidden.shape[:-1] or input_ids.is_floating_point() or input_ids.device != device
        ):
            self._fail(
                f"input_ids: got {input_ids.dtype} {tuple(input_ids.shape)} on {input_ids.device}, expected integers "
                f"{tuple(hidden.shape[:-1])} on {device}"
            )
        if mode not in self.ep:
            self._fail(f"mode={mode!r}: this layer was built for {', '.join(self.ep)}")
        if self._gate is None or self._slots_to_load:
            missing = [f"expert {self.expert_of_slot[slot]} (slot {slot})" for slot in sorted(self._slots_to_load)]
            self._fail(
                f"no weights for {', '.join(['gate'] * (self._gate is None) + missing)}; call load_gate and "
                "load_expert first",
                RuntimeError,
            )
        self._check_training(hidden)
        if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
            self._check_recordable(mode)

    def _check_training(self, hidden: Tensor) -> None:
        if self.training and hidden.requires_grad:
            self._fail("computes no gradients; call model.eval() before inference", RuntimeError)

    def _check_recordable(self, mode: str) -> None:
        try:
            self.ep[mode].require_recordable()
        except ValueError as error:
            self._fail(
                f"mode {mode!r} cannot be captured in a CUDA graph ({error}); build the layer in bfloat16 with "
                'mode="low_latency" and num_max_tokens_per_rank of the largest batch'
            )

    # -- torch's module interface --

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EPMoE":
        """What .to(), .cuda(), .cpu(), .bfloat16() and .float() come down to."""
        kind = self.config.dtype, self.load_S.device
        moved = fn(torch.empty(0, dtype=kind[0], device=kind[1]))
        if (moved.dtype, moved.device) != kind:
            self._move_to(moved.dtype, moved.device)
        return self

    @torch.inference_mode(False)
    @torch.no_grad()
    def _move_to(self, dtype: torch.dtype, device: torch.device) -> None:
        """Collective. Checks everything before anything changes."""
        self._check_move(dtype, device)
        ep = self.ep.moved_to(dtype, device.type)
        config = replace(self.config, dtype=dtype)
        pool = self.pool.moved_to(config, torch.device(device.type))
        experts = Experts(len(self.expert_of_slot), pool)
        experts.place(self._experts.buffers)
        old_dtype = self.config.dtype
        self.ep, self.config, self._experts = ep, config, experts
        self._slot_table = SlotTable(self.slot_map, device)
        self.load_S = self.load_S.to(device)
        self.experts = HeldExperts(pool, config.num_experts)
        self._show_experts()
        if self._gate is not None:
            gate_EH, rest = self._gate.linear.weight.data, (self._gate.bias_E, self._gate.table_VK)
            gate_EH = gate_EH.to(device, gate_EH.dtype if dtype == old_dtype else dtype)
            self.load_gate(gate_EH, *(None if each is None else each.to(device) for each in rest))
        if self._shared is not None:
            self.load_shared(self._shared.moved_to(dtype, device))

    def _check_move(self, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            self._fail(f"cannot become {dtype}: an EPMoE computes in torch.bfloat16 or torch.float32")
        if device.type not in ("cpu", "cuda"):
            self._fail(f"cannot go to {device}: an EPMoE computes on cpu or cuda")
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            self._fail(
                f"cannot go to {device}: this rank's GPU is cuda:{torch.cuda.current_device()}; call "
                f"torch.cuda.set_device({device.index}) before the group is used"
            )
        if self._lost is not None:
            self._fail("cannot move: it masks lost ranks, whose memory would be needed; build it there instead")
        if self._shares_pool:
            self._fail("cannot move: its weights lie in a pool that layers share; build the model there instead")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._fail("cannot be copied: it belongs to the ranks of a group; build another with EPMoE.from_hf", TypeError)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._fail("cannot be pickled: it belongs to the ranks of a group; save its state_dict() instead", TypeError)

    def extra_repr(self) -> str:
        held = sum(expert >= 0 for expert in self.expert_of_slot)
        return (
            f"rank {self.group.rank} of {self.group.size}, {held} of {self.config.num_experts} experts, "
            f"{self.config.dtype}, {self.load_S.device}, mode={self.mode!r}"
        )

    # -- moving experts: see ep/migration --

    @property
    def pool(self) -> ExpertPool:
        return self._experts.pool

    def weight_buffers(self) -> list[int]:
        """Which buffer of the pool holds each local slot's expert, -1 for none."""
        return self._experts.buffers

    def place(self, slot_map: SlotMap, buffers: Sequence[int]) -> None:
        """From now on the slots hold what slot_map says, in these buffers. On all ranks before the same forward, also
        one that replays a CUDA graph."""
        self.slot_map = slot_map
        self._slot_table.set(slot_map)
        self.expert_of_slot = slot_map.experts_of_rank(self.group.rank, self.group.size)
        self._experts.place(buffers)
        self._show_experts()

    # -- load --

    def record_load(self, recorder: LoadRecorder, row: int) -> None:
        """Counts every choice of this layer as row `row` of the recorder."""
        self._recorder, self._row = recorder, row

    def route_by(self, router: BatchRouter, row: int) -> None:
        """From now on the router splits each step's tokens over replicas by all ranks' counts. row: of record_load."""
        self._router, self._row = router, row

    def reset_load(self) -> None:
        """Forgets the tokens of a warm-up."""
        self.load_S.zero_()

    def expert_load(self) -> Sequence[int]:
        """Tokens routed to each local slot since the layer was built or reset_load() was called."""
        return self.load_S.tolist()

    def close(self) -> None:
        """Frees the windows that no other layer shares, unless they were given by the caller. Collective."""
        if self._owns_ep:
            self._owns_ep = False
            self.ep.release()
