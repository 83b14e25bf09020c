"""StepHeaders: what all ranks agree on before each step, from a header of integers that each of them shows the others.

engine.py says what they mean. Knows nothing of requests or tokens.
"""

import bisect
from dataclasses import dataclass
from typing import Any

from eprt.engine import step_waits
from eprt.engine.outputs import STEP_TOKENS
from eprt.engine.overlap_policy import OverlapPolicy
from eprt.engine.prompt_split import ChunkOffer, ChunkPiece, load_change
from eprt.engine.prompt_team import PromptTeam
from eprt.engine.step_waits import StepWaits
from eprt.ep.group.group import EPGroup
from eprt.ep.group.int_all_gather import IntAllGather
from eprt.ep.migration.migrator import MigrationHeader, Migrator

# Tokens, offer of a chunk (prompt_team.py), low latency, has work, seen_seq, leaving, times; offered, progress, room.
_NUM_VALUES = 8 + len(ChunkOffer._fields) + step_waits.NUM_VALUES


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """Equal on all ranks."""

    computes: bool  # whether any rank has a token
    mode: str = "low_latency"  # or "normal"
    overlap: str = "none"
    all_idle: bool = False
    leaves: bool = False  # all stop before this step, for another view
    offers_N: tuple[ChunkOffer, ...] = ()  # what each rank lets others compute
    pieces: tuple[ChunkPiece, ...] = ()  # of the prompts that are split in this step


class StepHeaders:
    """One rank's end. Construction, agree() and close() are collective.

    migrator: its header travels along, and it advances with every step.
    team: splits prompts; None: nobody does.
    """

    def __init__(self, group: EPGroup, overlap: OverlapPolicy, migrator: Migrator | None, team: PromptTeam | None):
        self._group, self._overlap, self._migrator, self._team = group, overlap, migrator, team
        self._gather = IntAllGather(group, num_values=_NUM_VALUES)
        self.waits = StepWaits(group.node_of_rank, group.rank)
        self.overlap_steps = {"none": 0, "tbo": 0, "sbo": 0}
        # Steps by this rank's tokens in them (outputs.STEP_TOKENS), and the sum of these tokens.
        self.step_token_counts = [0] * (len(STEP_TOKENS) + 1)
        self.num_step_tokens = 0

    def agree(
        self,
        num_tokens: int,
        offer: ChunkOffer | None,
        low_latency: bool,
        has_work: bool,
        seen_seq: int,
        leaves_for: int,
    ) -> AgreedStep:
        """Waits for all ranks.

        offer: which of this rank's tokens others may compute; None: none.
        low_latency: whether this rank's part of the step fits that mode.
        leaves_for: number of the view for which this rank shall stop, 0 for none.
        """
        migrator, group = self._migrator, self._group
        migration = MigrationHeader() if migrator is None else migrator.header()
        has_work = has_work or leaves_for > 0 or (migrator is not None and migrator.active)
        times = self.waits.begin_exchange()
        header = (num_tokens, *(offer or ChunkOffer()), low_latency, has_work, seen_seq, leaves_for, *times, *migration)
        # Plain integers: for a few ranks they are faster than numpy.
        rows = self._gather.all_gather(header).tolist()
        if not group.view.is_full:  # who takes no part agrees with this rank
            rows = [row if alive else header for row, alive in zip(rows, group.view.alive)]
        num_tokens_N, starts_N, offered_N, low_latency_N, has_work_N, seen_seq_N, leaves_N, *others = zip(*rows)
        if min(leaves_N) > 0:
            self.waits.forget_exchange()
            return AgreedStep(computes=False, leaves=True)
        arrived_ns_N, took_ns_N, *migration_3N = others
        if migrator is not None:
            migrator.advance([MigrationHeader(*of_rank) for of_rank in zip(*migration_3N)])
        all_idle = not any(has_work_N) and min(seen_seq_N) == max(seen_seq_N)
        self.waits.end_exchange(arrived_ns_N, took_ns_N, all_idle)
        mode = "low_latency" if all(low_latency_N) else "normal"
        offers_N, pieces = tuple(map(ChunkOffer, starts_N, offered_N)), ()
        overlap = self._overlap.for_step(num_tokens_N, mode)
        if self._team is not None and (pieces := tuple(self._team.split(num_tokens_N, offers_N))):
            overlap = "none"  # half a batch would wait for ranks that have only one
            num_tokens += load_change(pieces, group.rank)
        self.overlap_steps[overlap] += any(num_tokens_N)
        if num_tokens:
            self.step_token_counts[bisect.bisect_left(STEP_TOKENS, num_tokens)] += 1
            self.num_step_tokens += num_tokens
        return AgreedStep(any(num_tokens_N), mode, overlap, all_idle, offers_N=offers_N, pieces=pieces)

    def step_counts(self) -> dict[str, Any]:
        """What has been counted of the steps, as fields of EngineStats."""
        return {
            "num_two_batch_steps": self.overlap_steps["tbo"],
            "num_single_batch_steps": self.overlap_steps["sbo"],
            "num_split_steps": 0 if self._team is None else self._team.num_split_steps,
            "step_token_counts": list(self.step_token_counts),
            "num_step_tokens": self.num_step_tokens,
        }

    @property
    def epoch(self) -> int:
        """As IntAllGather.epoch."""
        return self._gather.epoch

    def require_restartable(self) -> None:
        """As IntAllGather.require_restartable."""
        self._gather.require_restartable()

    def restart(self, epoch: int) -> None:
        """As IntAllGather.restart. The pause before counts as nobody's lateness."""
        self._gather.restart(epoch)
        self.waits.forget_exchange()

    def close(self) -> None:
        """Collective while all ranks live; never hangs when some do not."""
        self._gather.close()
