"""Membership: one rank's way from a view to the next: what it holds, then what it shall hold and who exchanges.

Between the two nothing of a step is under way. Knows nothing of requests, nor of who decides on views.
"""

from collections.abc import Sequence

import numpy as np

from eprt.engine.deferred_experts import DeferredExperts, ReadExpert
from eprt.engine.outputs import SuspendedState, TokenOutput
from eprt.engine.prompt_team import PromptTeam
from eprt.engine.step_headers import StepHeaders
from eprt.ep.errors import EPError, RankLostError, ViewChangedError
from eprt.ep.group.group import EPGroup
from eprt.ep.group.loss_watch import LossWatch
from eprt.ep.group.view import View
from eprt.ep.migration.migrator import Migrator
from eprt.ep.migration.round import held
from eprt.ep.placement.batch_router import BatchRouter
from eprt.ep.placement.slot_map import SlotMap
from eprt.gpu.driver import CudaError
from eprt.models.model import ExpertPlace, Model


class Membership:
    """Everything of an engine that depends on which ranks take part.

    Args:
        team: of the ranks that compute this one's prompts too; None: it has none.
        prefers_local: each rank prefers replicas of its own (EngineConfig.replica_routing).
    """

    def __init__(
        self,
        group: EPGroup,
        model: Model,
        headers: StepHeaders,
        router: BatchRouter | None,
        migrator: Migrator | None,
        team: PromptTeam | None,
        prefers_local: bool,
    ):
        self._group, self._model, self._headers, self._team = group, model, headers, team
        self._router, self._migrator = router, migrator
        self._node_of_rank = group.node_of_rank if prefers_local else None
        self._losses: LossWatch | None = None
        self.deferred = DeferredExperts(model, group.rank, group.size)
        self._read: list[ReadExpert] = []  # what it has read, for slots that are empty so far

    def require_changeable(self) -> None:
        """Raises ValueError, saying why, unless Engine.enter_view() is possible."""
        self._headers.require_restartable()
        self._model.require_restartable()

    def watch_losses(self) -> None:
        """From now on a thread ends what waits on this rank's GPU for a lost rank; then Engine.step() raises."""
        if self._losses is None and self._model.device.type == "cuda":
            self._losses = LossWatch(self._group, self._halt)

    def halt(self, nothing_under_way: bool) -> None:
        """Ends what waits on the GPU for other ranks; what is under way is to be thrown away."""
        if nothing_under_way:
            return
        error = ViewChangedError(f"[rank {self._group.rank}/{self._group.size}] other ranks are to take part")
        self._halt(error, self._group.view.number)

    def _halt(self, error: EPError, view_number: int) -> None:
        self._model.exchange.halt(error, view_number)
        if self._team is not None:
            self._team.halt(error, view_number)

    def check(self) -> None:
        """Raises what kernels that wait for other ranks have reported by now."""
        self._model.exchange.check()
        if self._team is not None:
            self._team.check()

    def state(self, outputs: list[TokenOutput]) -> SuspendedState:
        """Once nothing is under way. A migration is given up. Experts that were read beside the steps count as held."""
        if self._migrator is not None:
            self._migrator.abort("the ranks that take part change")
        epochs = [self._headers.epoch, self._model.exchange.epoch]
        if self._router is not None:
            epochs.append(self._router.epoch)
        if self._team is not None:
            epochs.append(self._team.epoch)
        self._read += self.deferred.finish()
        expert_of_slot = [list(layer.expert_of_slot) for layer in self._model.moe_layers()]
        for slot, place in self._read:
            expert_of_slot[place.row][slot] = place.expert
        return SuspendedState(
            expert_of_slot=expert_of_slot,
            epoch=max(epochs),
            placement_epoch=0 if self._migrator is None else self._migrator.epoch,
            outputs=outputs,
        )

    def enter(
        self, view: View, rows: Sequence[Sequence[int]], epoch: int, placement_epoch: int, lacks_experts: bool
    ) -> None:
        """See Engine.enter_view."""
        self._check(view, rows, epoch, lacks_experts)
        self._group.view = view
        self._place_experts(rows)
        try:
            self._restart(epoch, placement_epoch)
        except CudaError as error:
            if not (lost := self._group.lost_ranks()):
                raise
            group, what = self._group, "the change of the view, with memory that others were about to map"
            raise RankLostError(group.rank, group.size, lost[0], what, lost[1:]) from error

    def _restart(self, epoch: int, placement_epoch: int) -> None:
        self._model.exchange.restart(epoch)
        self._headers.restart(epoch)
        if self._router is not None:
            self._router.restart(epoch)
        if self._team is not None:
            self._team.restart(epoch)
        if self._migrator is not None:
            self._migrator.restart(placement_epoch)

    def close(self) -> None:
        self.deferred.close()
        if self._losses is not None:
            self._losses.close()

    def _check(self, view: View, rows: Sequence[Sequence[int]], epoch: int, lacks_experts: bool) -> None:
        """ValueError before anything changes."""
        self.require_changeable()
        group, layers = self._group, self._model.moe_layers()
        where = f"[rank {group.rank}/{group.size}] view {view.number}:"
        if len(view.alive) != group.size or not view.alive[group.rank]:
            raise ValueError(
                f"{where} ranks {view.ranks} take part, of {len(view.alive)}; this rank must, of its group's"
            )
        if len(rows) != len(layers):
            raise ValueError(f"{where} {len(rows)} rows of experts for {len(layers)} MoE layers")
        most = max(self._headers.epoch, self._model.exchange.epoch)
        if epoch <= most:
            raise ValueError(f"{where} epoch {epoch} was used already: it must be above {most}")
        for layer, row in zip(layers, rows):
            num_slots = layer.slot_map.num_slots
            if len(row) != num_slots:
                raise ValueError(f"{where} layer {layer.layer_idx}: {len(row)} slots, expected {num_slots}")
            per_rank = num_slots // group.size
            gone = [slot for slot, expert in enumerate(row) if expert >= 0 and not view.alive[slot // per_rank]]
            if gone:
                raise ValueError(
                    f"{where} layer {layer.layer_idx}: slot {gone[0]} holds expert {row[gone[0]]}, but rank "
                    f"{gone[0] // per_rank} takes no part"
                )
            missing = sorted(set(range(layer.slot_map.num_experts)) - set(row))
            if missing and not lacks_experts:
                raise ValueError(f"{where} layer {layer.layer_idx}: no slot holds expert {missing[0]}")

    def _place_experts(self, rows: Sequence[Sequence[int]]) -> None:
        """What is here stays where it lies; what is not is loaded into the buffers of what shall not be here any more,
        or spare ones."""
        group, layers = self._group, self._model.moe_layers()
        here = [held(layer, group) for layer in layers]
        for _, place in self._read:
            here[place.row][place.expert] = place.buffer
        self._read.clear()
        slot_maps = [
            SlotMap.from_row(
                np.array(row), layer.slot_map.num_experts, rank=group.rank, node_of_rank=self._node_of_rank
            )
            for layer, row in zip(layers, rows)
        ]
        wanted = [slot_map.experts_of_rank(group.rank, group.size) for slot_map in slot_maps]
        for layer, buffer_of, experts in zip(layers, here, wanted):
            kept = {buffer_of[expert] for expert in experts if expert in buffer_of}
            for buffer in {*layer.weight_buffers(), *buffer_of.values()} - kept - {-1}:
                layer.pool.return_buffer(buffer)
        places: list[ExpertPlace] = []
        for row, (layer, buffer_of, experts) in enumerate(zip(layers, here, wanted)):
            for expert in sorted(set(experts) - set(buffer_of) - {-1}):
                buffer_of[expert] = layer.pool.take_buffer()
                places.append(ExpertPlace(row, expert, buffer_of[expert]))
        if places:
            self._model.load_experts(places)
        for layer, slot_map, buffer_of, experts in zip(layers, slot_maps, here, wanted):
            layer.place(slot_map, [buffer_of[expert] if expert >= 0 else -1 for expert in experts])
