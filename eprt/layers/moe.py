"""EPMoE: a mixture-of-experts layer whose experts are spread over the ranks of a group.

T tokens of this rank, H hidden size, K experts per token, E logical experts, I intermediate size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eprt.config import MoEConfig
from eprt.ep.api import EPBackend, EPConfig, make_backend
from eprt.ep.group.group import EPGroup
from eprt.ep.placement.batch_router import BatchRouter
from eprt.ep.placement.load import LoadRecorder
from eprt.ep.placement.slot_map import SlotMap, SlotTable
from eprt.layers.batch import ForwardBatch
from eprt.layers.experts import ExpertPool, Experts
from eprt.layers.gate import Gate
from eprt.layers.mlp import MLP
from eprt.layers.overlap import (
    EXCHANGE,
    PLAIN,
    SINGLE_BATCH,
    SINGLE_BATCH_TILES,
    TWO_BATCH,
    Microbatch,
    Stage,
    stages_of,
)
from eprt.layers.sm_split import ONE_PROGRAM_PER_TILE, device_sms, send_sms, tile_rows
from eprt.ops.weight import Weight

MODES = ("normal", "low_latency")


class EPMoE(nn.Module):
    """Gate, shared expert and this rank's routed experts. Every rank calls forward equally often, also without tokens.

    config, group, backend, mode: as the names say; mode "auto" is "normal" unless forward is told otherwise.
    layer_idx: the layer's row in expert-load reports. ep: backends made by make_ep, to be shared by all layers of a
    model (one communication window instead of one per layer); they then belong to the caller. slot_map: where the
    experts live; default evenly, in order. pool: the memory they lie in, where layers share one; default its own.
    device: where tokens and weights are, "cpu" or "cuda" (the current GPU). load_S: int64 there, tokens routed to each
    local slot since the layer was built.

    Weights come in by load_gate, load_expert and load_shared, or all at once by EPMoE.from_hf. Inference only: forward
    computes no gradients.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: EPGroup,
        *,
        layer_idx: int = 0,
        backend: str = "auto",
        mode: str = "auto",
        ep: Mapping[str, EPBackend] | None = None,
        slot_map: SlotMap | None = None,
        pool: ExpertPool | None = None,
        device: str = "cpu",
    ):
        super().__init__()
        if mode not in ("auto", *MODES):
            raise ValueError(f"mode={mode!r}: must be auto, {' or '.join(MODES)}")
        self.config, self.group, self.layer_idx = config, group, layer_idx
        self.slot_map = slot_map or SlotMap.contiguous(config.num_experts, group.size)
        self._slot_table = SlotTable(self.slot_map, device)
        self.mode = "normal" if mode == "auto" else mode
        self._owns_ep = ep is None
        self.ep = (
            make_ep(config, group, self.slot_map.num_slots, backend, {self.mode: None}, device) if ep is None else ep
        )
        if self.mode not in self.ep:
            raise ValueError(f"mode={mode!r}: the given backends are for {', '.join(self.ep)} only")

        # expert_of_slot[s]: the logical expert that local slot s holds, -1 for none.
        self.expert_of_slot = self.slot_map.experts_of_rank(group.rank, group.size)
        num_slots = len(self.expert_of_slot)
        self.experts = Experts(num_slots, pool or make_pool(config, num_slots, device=device))
        self.gate: Gate | None = None
        self.shared_expert: MLP | None = None
        self.returns_router_logits = False
        self._slots_to_load = {slot for slot, expert in enumerate(self.expert_of_slot) if expert >= 0}
        self.load_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._recorder: LoadRecorder | None = None
        self._router: BatchRouter | None = None
        self._row = 0
        self.overlap_sms: int | None = None  # for combine send beside the experts; None: sm_split.py says
        self.stages = stages_of(
            self._gate,
            self._rounds,
            self._dispatch,
            self._dispatch_send,
            self._dispatch_start,
            self._receive,
            self._experts,
            self._shared,
            self._signals,
            self._combine,
            self._combine_send,
            self._combine_start,
            self._combine_recv,
        )

    @staticmethod
    def from_hf(hf_moe_module: nn.Module, group: EPGroup, **options: Any) -> "EPMoE":
        """The expert-parallel twin of a transformers MoE block; see eprt.compat.hf.convert_moe."""
        from eprt.compat.hf import convert_moe

        return convert_moe(hf_moe_module, group, **options)

    # -- weights --

    def load_gate(self, weight_EH: Tensor, bias_E: Tensor | None = None) -> None:
        """bias_E: the correction bias of sigmoid scoring, on the choice only."""
        want = (self.config.num_experts, self.config.hidden_size)
        if tuple(weight_EH.shape) != want:
            raise ValueError(f"gate weight has shape {tuple(weight_EH.shape)}, expected {want}")
        self.gate = Gate(self.config, weight_EH, bias_E)

    def load_expert(
        self, slot: int, gate_IH: Tensor | Weight, up_IH: Tensor | Weight, down_HI: Tensor | Weight
    ) -> None:
        """Fills local slot `slot` with the weights of logical expert expert_of_slot[slot]."""
        self.experts.load_expert(slot, gate_IH, up_IH, down_HI)
        self._slots_to_load.discard(slot)

    def load_shared(self, shared_expert: MLP) -> None:
        self.shared_expert = shared_expert

    # -- forward --

    @torch.no_grad()
    def forward(self, hidden_TH: Tensor, input_ids: Tensor | None = None, *, mode: str | None = None) -> Any:
        """hidden_TH: [.., H] of any leading shape, also empty; returns the same shape and dtype.

        input_ids: token ids of the same leading shape. Where one is negative the row is padding: it goes to no expert.
        mode: "normal" or "low_latency" for this call, the same on all ranks.
        Returns (hidden_TH, router_logits) when the transformers block this layer replaces did so.
        """
        self._check_input(hidden_TH)
        microbatch = Microbatch(None, hidden_TH.reshape(-1, hidden_TH.shape[-1]))  # type: ignore[arg-type]
        self._choose(microbatch, microbatch.x_TH, input_ids, mode, 0)
        self._rounds(microbatch)
        y_TH, shared_TH = microbatch.y_TH, microbatch.shared_TH
        y = (y_TH if shared_TH is None else y_TH + shared_TH).view(hidden_TH.shape)
        return (y, microbatch.logits_TE.to(hidden_TH.dtype)) if self.returns_router_logits else y

    # -- the stages of overlap.py --

    def schedule(self, batch: ForwardBatch) -> tuple[Stage, ...]:
        if batch.overlap == "tbo":
            return TWO_BATCH
        if batch.overlap == "none" or not self.ep[batch.mode].takes_signals:
            return PLAIN
        return SINGLE_BATCH_TILES if self._sms_to_send(batch.num_tokens) else SINGLE_BATCH

    def _sms_to_send(self, num_tokens: int) -> int:
        if self.overlap_sms is not None:
            return self.overlap_sms
        return send_sms(self.config, num_tokens, self.group.size, len(self.expert_of_slot), device_sms())

    def _gate(self, microbatch: Microbatch) -> None:
        batch = microbatch.batch
        self._choose(microbatch, microbatch.h_TH, batch.token_id_T, batch.mode, batch.first_row)

    def _choose(
        self, microbatch: Microbatch, h_TH: Tensor, input_ids: Tensor | None, mode: str | None, first_row: int
    ) -> None:
        """The slots of each token, and the exchange that takes it there."""
        assert self.gate is not None
        microbatch.h_TH, microbatch.ep, microbatch.num_rounds = h_TH, self.ep[mode or self.mode], 1
        microbatch.logits_TE = self.gate.logits(h_TH)
        token_id_T = None if input_ids is None else input_ids.reshape(-1)
        microbatch.weights_TK, expert_idx_TK = self.gate.choose(microbatch.logits_TE, token_id_T)
        if self._recorder is not None:
            self._recorder.record(self._row, expert_idx_TK, first_row)
        if self._router is None:
            microbatch.slot_idx_TK = self._slot_table.slot_idx(expert_idx_TK)
        else:
            microbatch.slot_idx_TK = self._router.slot_idx(self._row, self.slot_map, expert_idx_TK)

    def _rounds(self, microbatch: Microbatch) -> None:
        """In rounds of at most num_max_tokens_per_rank tokens, as many as the rank with the most tokens needs."""
        limit = microbatch.ep.config.num_max_tokens_per_rank
        own_rounds = max(1, -(-microbatch.h_TH.shape[0] // limit))
        all_rounds, done, parts = own_rounds, 0, []
        while done < all_rounds:
            part = microbatch.of_rows(slice(done * limit, (done + 1) * limit))
            part.num_rounds = max(1, own_rounds - done)
            for stage in EXCHANGE:
                part.lanes.run(stage, part, self.stages[stage.name])
            parts.append(part)
            all_rounds = max(all_rounds, done + part.received.num_rounds)
            done += 1
        microbatch.y_TH, microbatch.shared_TH = parts[0].y_TH, parts[0].shared_TH
        if len(parts) > 1:
            microbatch.y_TH = torch.cat([part.y_TH for part in parts])
            if microbatch.shared_TH is not None:
                microbatch.shared_TH = torch.cat([part.shared_TH for part in parts])

    def _dispatch(self, m: Microbatch) -> None:
        m.handle, m.received = m.ep.dispatch(m.h_TH, m.slot_idx_TK, m.weights_TK)
        m.y_RH = m.ep.combine_buffer(m.handle)

    def _dispatch_send(self, m: Microbatch) -> None:
        m.handle = m.ep.dispatch_send(m.h_TH, m.slot_idx_TK, m.weights_TK, m.num_rounds)

    def _dispatch_start(self, m: Microbatch) -> None:
        if m.ep.launches:
            m.ep.dispatch_start(m.handle)

    def _receive(self, m: Microbatch) -> None:
        m.received = m.ep.dispatch_recv(m.handle)
        m.y_RH = m.ep.combine_buffer(m.handle)

    def _signals(self, m: Microbatch) -> None:
        T, ranks, slots = m.handle.num_tokens, self.group.size, len(self.expert_of_slot)
        m.signal = m.ep.new_signal(tile_rows(self.config, T, ranks, slots * ranks), self._sms_to_send(T))

    def _experts(self, m: Microbatch) -> None:
        self.load_S += m.received.recv_count_E
        # With static shapes x_RH has room for more rows than come; as a rule a rank gets as many as it sends.
        expected_rows = None if m.ep.config.mode == "normal" else max(1, m.handle.num_tokens) * self.config.top_k
        num_sms = None
        if m.signal is not None:
            num_sms = device_sms() - m.signal.num_sms
        elif m.ep.launches and m.batch is not None and m.batch.overlap == "tbo":
            num_sms = ONE_PROGRAM_PER_TILE
        self.experts(m.received, m.y_RH, expected_rows, m.signal, num_sms)

    def _shared(self, m: Microbatch) -> None:
        m.shared_TH = None if self.shared_expert is None else self.shared_expert(m.h_TH)

    def _combine(self, m: Microbatch) -> None:
        m.y_TH = m.ep.combine(m.y_RH, m.handle)

    def _combine_send(self, m: Microbatch) -> None:
        m.ep.combine_send(m.y_RH, m.handle, m.signal)

    def _combine_start(self, m: Microbatch) -> None:
        if m.ep.launches:
            m.ep.combine_start(m.handle)

    def _combine_recv(self, m: Microbatch) -> None:
        m.y_TH = m.ep.combine_recv(m.handle)

    def _check_input(self, hidden: Tensor) -> None:
        where = f"[rank {self.group.rank}/{self.group.size}] EPMoE layer {self.layer_idx}"
        if hidden.shape[-1] != self.config.hidden_size or hidden.dtype != self.config.dtype:
            raise ValueError(
                f"{where}: got {hidden.dtype} {tuple(hidden.shape)}, expected {self.config.dtype} "
                f"[.., {self.config.hidden_size}]"
            )
        if self.gate is None or self._slots_to_load:
            missing = [f"expert {self.expert_of_slot[slot]} (slot {slot})" for slot in sorted(self._slots_to_load)]
            raise RuntimeError(
                f"{where} has no weights for {', '.join(['gate'] * (self.gate is None) + missing)}; "
                "call load_gate and load_expert first"
            )
        if self.training and hidden.requires_grad:
            raise RuntimeError(f"{where} computes no gradients; call model.eval() before inference")

    # -- moving experts: see ep/migration.py --

    @property
    def pool(self) -> ExpertPool:
        return self.experts.pool

    def storages(self) -> list[int]:
        """Where in the pool each local slot's expert lies, -1 for none."""
        return self.experts.storages

    def place(self, slot_map: SlotMap, storages: Sequence[int]) -> None:
        """From now on the slots hold what slot_map says, in these storages. On all ranks before the same forward, also
        one that replays a CUDA graph."""
        self.slot_map = slot_map
        self._slot_table.set(slot_map)
        self.expert_of_slot = slot_map.experts_of_rank(self.group.rank, self.group.size)
        self.experts.place(storages)

    # -- the rest --

    def record_load(self, recorder: LoadRecorder, row: int) -> None:
        """Counts every choice of this layer as row `row` of the recorder."""
        self._recorder, self._row = recorder, row

    def reset_load(self) -> None:
        """Forgets the tokens of a warm-up."""
        self.load_S.zero_()

    def route_by(self, router: BatchRouter, row: int) -> None:
        """From now on each step's tokens are split over replicas by what all ranks have. row: this layer's only."""
        self._router, self._row = router, row

    def expert_load(self) -> Sequence[int]:
        """Tokens routed to each local slot since the layer was built."""
        return self.load_S.tolist()

    def close(self) -> None:
        """Frees the communication windows, unless they were given by the caller. Collective."""
        if self._owns_ep:
            for backend in self.ep.values():
                backend.close()


def make_pool(
    config: MoEConfig, num_storages: int, weight_format: str | None = None, device: torch.device | str = "cpu"
) -> ExpertPool:
    """Memory for num_storages experts of such a layer. weight_format: default the config's."""
    weight_format = weight_format or config.weight_format
    return ExpertPool(num_storages, config.hidden_size, config.intermediate_size, weight_format, config.dtype, device)


def make_ep(
    config: MoEConfig,
    group: EPGroup,
    num_slots: int,
    backend: str = "auto",
    modes: Mapping[str, int | None] = {"normal": None},
    device: str = "cpu",
    exact_combine: bool = False,
) -> dict[str, EPBackend]:
    """One communication backend per mode, to be shared by layers of the same shape. Collective over the group.

    modes: mode -> largest number of tokens of one dispatch (None: config.num_max_tokens_per_rank).
    """
    return {
        mode: make_backend(
            backend,
            EPConfig(
                hidden_size=config.hidden_size,
                num_slots=num_slots,
                top_k=config.top_k,
                num_max_tokens_per_rank=max_tokens or config.num_max_tokens_per_rank,
                dtype=config.dtype,
                payload=config.payload,
                mode=mode,
                device=device,
                exact_combine=exact_combine,
            ),
            group,
        )
        for mode, max_tokens in modes.items()
    }
