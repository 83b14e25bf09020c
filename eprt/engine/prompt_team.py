"""PromptTeam: one rank's end of a team whose ranks compute each other's prompts (docs/prompt-ranks.md).

A rank that has a chunk of a prompt to compute offers it: it shows its tokens and the request's pages in memory that the
team shares. The headers of the step tell all ranks how large the offers are, so all know which of them are split, and
how (prompt_split.py). Then each rank computes its pieces as further requests of its batch, its guests. All ranks have
all ranks' pages (team_pages.py), so a guest's entries go straight where they belong; in each layer the team's ranks
wait for each other when these are written, and then read what they need.

The owner's requests never leave it: it keeps rows and pages, samples, and tells the client. A step that is thrown away
is the owner's to undo; nobody computes for it any more when its pages have another owner. On CPUs, because the next
headers come only once all have computed the step. On GPUs, whose hosts are ahead of them, because the team meets once
more before anything of the next step is launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from eprt.config import EngineConfig
from eprt.engine.batch_rows import BatchRows
from eprt.engine.prompt_split import ChunkOffer, ChunkPiece, Team, load_change
from eprt.engine.schedule import Chunk, Guest, Schedule
from eprt.engine.team_pages import TeamPages
from eprt.ep.errors import EPError
from eprt.ep.group.current_wait import CurrentWait
from eprt.ep.group.group import EPGroup
from eprt.ep.group.rank_barrier import RankBarrier
from eprt.ep.nvlink.meeting import DeviceMeeting

# Fewer tokens for each rank are not worth a wait in each layer.
_LEAST_TOKENS = 16


@dataclass(frozen=True, eq=False)
class _TeamDesk:
    """Where a rank shows the chunk that it offers. There are two, used in turns: a rank that writes for step n + 2 has
    seen the headers of n + 1, which each rank showed after it had read all of n."""

    tokens: np.ndarray  # int32: of the chunk, and the one behind it, if there is one
    pages: np.ndarray  # int32: of the request, from its beginning, by the owner's numbers

    @staticmethod
    def num_bytes(chunk_size: int, num_pages: int) -> int:
        """Of both."""
        return 2 * 4 * (chunk_size + 1 + num_pages)

    @staticmethod
    def both_at(segment: np.ndarray, chunk_size: int) -> "list[_TeamDesk]":
        halves = np.split(segment.view(np.int32), 2)
        return [_TeamDesk(words[: chunk_size + 1], words[chunk_size + 1 :]) for words in halves]


class PromptTeam:
    """Construction and close() are collective over the group.

    size: ranks of a team.
    chunk_size: most tokens of a rank's step.
    pages: of all ranks; its own from now on.
    device: of the model.
    """

    def __init__(
        self, group: EPGroup, size: int, rows: BatchRows, chunk_size: int, pages: TeamPages, device: torch.device
    ):
        self._group, self._rows, self._pages = group, rows, pages
        self.team = Team.of_rank(group.rank, group.size, size, chunk_size, _LEAST_TOKENS)
        num_bytes = _TeamDesk.num_bytes(chunk_size, rows.page_table_MP.shape[1])
        self._window = group.shared_window(num_bytes)
        self._desks = [_TeamDesk.both_at(segment, chunk_size) for segment in self._window.segments]
        self._turn = 0  # of two desks, the one of this step
        self.on_gpu: DeviceMeeting | None = None
        if device.type == "cuda":
            self.on_gpu = DeviceMeeting(group, self.team.ranks)
        phase = "entries of a prompt that is split"
        self.barrier = self.on_gpu or RankBarrier(group, self.team.ranks, phase)
        self._teams = {
            min(team.ranks): team
            for rank in range(group.size)
            for team in [Team.of_rank(rank, group.size, size, chunk_size, _LEAST_TOKENS)]
        }
        self._offered: Chunk | None = None
        self._is_split = False  # whether the latest step was
        self.num_split_steps = 0  # of this rank's team

    @staticmethod
    def for_config(
        config: EngineConfig, group: EPGroup, rows: BatchRows, pages: TeamPages | None, device: torch.device
    ) -> "PromptTeam | None":
        """None where each rank computes its prompts by itself."""
        size = min(config.prompt_ranks, group.size)
        if size == 1 or pages is None:
            return None
        return PromptTeam(group, size, rows, config.chunk_size, pages, device)

    def offer(self, schedule: Schedule) -> ChunkOffer:
        """Shows the longest chunk of a step to the team. Not one whose log-probabilities are wanted: its owner computes
        all of those."""
        self._turn ^= 1
        chunks = [c for c in schedule.chunks if not c.decoded and c.request.prompt_logprobs is None]
        self._offered = chunk = max(chunks, key=lambda c: c.num_tokens, default=None)
        if chunk is None:
            return ChunkOffer()
        desk, rows = self._desks[self._group.rank][self._turn], self._rows
        tokens = rows.tokens_ML[chunk.request_row, chunk.start : chunk.end + 1]
        pages = rows.page_table_MP[chunk.request_row, : -(-chunk.end // rows.page_size)]
        desk.tokens[: len(tokens)] = tokens
        desk.pages[: len(pages)] = pages
        return ChunkOffer(chunk.start, chunk.num_tokens)

    def split(self, num_tokens_N: Sequence[int], offers_N: Sequence[ChunkOffer]) -> list[ChunkPiece]:
        """Of the offers of all teams."""
        alive_N = self._group.view.alive
        return [piece for team in self._teams.values() for piece in team.split(num_tokens_N, offers_N, alive_N)]

    def share(self, schedule: Schedule, pieces: Sequence[ChunkPiece], offers_N: Sequence[ChunkOffer]) -> Schedule:
        """What this rank computes of a step in which these pieces of all teams are split, instead of what it would by
        itself."""
        if self.on_gpu is not None and self._is_split:
            self.on_gpu.wait()  # until all have read what this step may overwrite
        pieces = [piece for piece in pieces if piece.owner in self.team.ranks]
        self._is_split = bool(pieces)
        if not pieces:
            return schedule
        self.num_split_steps += 1
        mine = [piece for piece in pieces if piece.rank == self._group.rank]
        own = [piece for piece in mine if piece.owner == self._group.rank]
        chunks, num_tokens = schedule.chunks, schedule.num_tokens + load_change(pieces, self._group.rank)
        if own:
            chunks = [part for c in chunks for part in (_cut(c, own) if c is self._offered else [c])]
        guests = tuple(self._guest(piece, offers_N[piece.owner]) for piece in mine if piece.owner != self._group.rank)
        return replace(schedule, chunks=chunks, num_tokens=num_tokens, guests=guests)

    def _guest(self, piece: ChunkPiece, offer: ChunkOffer) -> Guest:
        desk = self._desks[piece.owner][self._turn]
        tokens = desk.tokens[piece.start - offer.start : piece.end - offer.start + 1]
        pages = desk.pages[: -(-piece.end // self._rows.page_size)] + np.int32(self._pages.shift_N[piece.owner])
        return Guest(tokens.astype(np.int64), piece.start, pages)

    def check(self) -> None:
        """Raises what waits on the GPU have reported by now."""
        if self.on_gpu is not None:
            self.on_gpu.check()

    def halt(self, error: EPError, view_number: int) -> None:
        """As Backend.halt: of waits on the GPU. The host's end by themselves."""
        if self.on_gpu is not None:
            self.on_gpu.halt(error, view_number)

    def current_wait(self) -> CurrentWait | None:
        """That the GPU is in. From one thread, at most twice a second."""
        return None if self.on_gpu is None else self.on_gpu.current_wait()

    @property
    def epoch(self) -> int:
        """At least that of any meeting of any rank so far: on GPUs a lost rank may have raised its flag for the one
        behind the others' latest."""
        return self.barrier.epoch + (self.on_gpu is not None)

    def restart(self, epoch: int) -> None:
        """As RankBarrier.restart, with the pages of the ranks that take part in group.view."""
        self.barrier.restart(epoch)
        self._pages.restart(self._group.view.alive)
        self._turn, self._is_split = 0, False

    def close(self) -> None:
        """Collective while all ranks live; never hangs when some do not."""
        self.barrier.close()
        self._pages.close()
        self._window.close()


def _cut(chunk: Chunk, pieces: Sequence[ChunkPiece]) -> list[Chunk]:
    """The owner's pieces of its chunk: the first begins where the chunk does, the last one ends there."""
    first, last = pieces[0], pieces[-1]
    return [
        replace(
            chunk,
            start=piece.start,
            end=piece.end,
            is_first=chunk.is_first and piece is first,
            is_last=chunk.is_last and piece is last,
        )
        for piece in pieces
    ]
