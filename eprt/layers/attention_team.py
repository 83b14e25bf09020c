"""AttentionTeam: one rank's end of a team whose ranks compute each other's attention, each for heads of its own
(docs/attention-tp.md).

Requests and pages stay with their ranks. All ranks have all ranks' pages under the same numbers (cache_layout.py), so a
rank attends to another's tokens where they lie; what travels are queries' inputs, heads' results and outputs, through
memory that the ranks share. Before a rank reads what others wrote the team meets. Each of the parts of that memory is
read between two meetings and written again only behind the second, so one copy of each suffices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eprt.config import EngineConfig, ModelConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.group.rank_barrier import RankBarrier
from eprt.layers.batch import ForwardBatch
from eprt.layers.head_shares import HeadShares

_ALIGNMENT = 64


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class TeamRows:
    """The rows of a team's batches as one batch: the decodes of all ranks, then the prompts of all."""

    batch: ForwardBatch  # what attention reads of it: positions, pages and lengths
    parts: tuple[tuple[int, int, int], ...]  # rank of the team, first row of its own batch, end
    own: tuple[slice, ...]  # of this rank's rows, among all, in its own order
    num_tokens_R: tuple[int, ...]  # of each rank of the team

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens


@dataclass(frozen=True, eq=False)
class _BatchDesk:
    """Where a rank shows its batch."""

    sizes: np.ndarray  # int64: tokens, requests, pages of the longest, decodes, tokens of contexts behind these or -1
    position_T: np.ndarray  # int64
    seq_len_B: np.ndarray  # int32
    query_start_B1: np.ndarray  # int32
    page_table: np.ndarray  # int32, flat

    NUM_SIZES = 5

    def write(self, batch: ForwardBatch) -> None:
        (num_requests, num_pages), num_context = batch.page_table_BP.shape, batch.num_context
        num_context = -1 if num_context is None else num_context
        self.sizes[:] = batch.num_tokens, num_requests, num_pages, batch.num_decode, num_context
        self.position_T[: batch.num_tokens] = batch.position_T.numpy()
        self.seq_len_B[:num_requests] = batch.seq_len_B.numpy()
        self.query_start_B1[: num_requests + 1] = batch.query_start_B1.numpy()
        self.page_table[: num_requests * num_pages] = batch.page_table_BP.reshape(-1).numpy()

    def read(self) -> "_ShownBatch":
        """Copies: the desk may be written again."""
        num_tokens, num_requests, num_pages, num_decode, num_context = self.sizes.tolist()
        return _ShownBatch(
            self.position_T[:num_tokens].copy(),
            self.seq_len_B[:num_requests].copy(),
            self.query_start_B1[: num_requests + 1].copy(),
            self.page_table[: num_requests * num_pages].reshape(num_requests, num_pages).copy(),
            num_decode,
            None if num_context < 0 else num_context,
        )


@dataclass(frozen=True, eq=False)
class _ShownBatch:
    """As ForwardBatch's fields of these names."""

    position_T: np.ndarray
    seq_len_B: np.ndarray
    query_start_B1: np.ndarray
    page_table_BP: np.ndarray
    num_decode: int
    num_context: int | None

    @property
    def num_tokens(self) -> int:
        return len(self.position_T)


@dataclass(frozen=True)
class RoomSizes:
    """How large the memory is that a rank shows its team."""

    num_tokens: int  # most of a rank's batch
    num_pages: int  # most of a request
    dtype: torch.dtype
    input_width: int
    heads_width: int  # of the rank with most
    output_width: int
    num_ranks: int  # of a team

    @staticmethod
    def for_config(engine: EngineConfig, config: ModelConfig, shares: HeadShares) -> "RoomSizes":
        longest = engine.max_model_len or config.max_position_embeddings
        return RoomSizes(
            num_tokens=engine.chunk_size,
            num_pages=-(-longest // engine.page_size),
            dtype=config.dtype,
            input_width=config.q_lora_rank or config.hidden_size,
            heads_width=shares.most_heads * config.v_head_dim if shares.gathers else 0,
            output_width=shares.most_columns if shares.gathers else config.hidden_size,
            num_ranks=shares.num_ranks,
        )

    def parts(self) -> tuple[int, ...]:
        """Bytes of each part: the desk's five, then inputs, heads and outputs. Of these memory takes what is used."""
        tokens, of_team, size = self.num_tokens, self.num_ranks * self.num_tokens, self.dtype.itemsize
        desk = 8 * _BatchDesk.NUM_SIZES, 8 * tokens, 4 * tokens, 4 * (tokens + 1), 4 * tokens * self.num_pages
        rows = tokens * self.input_width, of_team * self.heads_width, of_team * self.output_width
        return (*desk, *(size * num_values for num_values in rows))

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(size) for size in self.parts())

    @property
    def num_row_bytes(self) -> int:
        """Without the desk, of which steps fill little."""
        return sum(_aligned(size) for size in self.parts()[5:])


@dataclass(frozen=True, eq=False)
class _Room:
    """What one rank shows: its batch, and values of rows that lie behind each other, as wide as they happen to be."""

    desk: _BatchDesk
    input: Tensor
    heads: Tensor
    output: Tensor

    @staticmethod
    def at(segment: np.ndarray, sizes: RoomSizes) -> "_Room":
        ends = np.cumsum([0, *(_aligned(size) for size in sizes.parts())]).tolist()
        parts = [segment[at : at + size] for at, size in zip(ends, sizes.parts())]
        kinds = np.int64, np.int64, np.int32, np.int32, np.int32
        desk = _BatchDesk(*(part.view(kind) for part, kind in zip(parts, kinds)))
        return _Room(desk, *(torch.from_numpy(part).view(sizes.dtype) for part in parts[5:]))


class AttentionTeam:
    """Construction and close() are collective over the group, whose ranks are of one node.

    Attributes: index: of this rank in its team. heads, columns: its own.
    """

    def __init__(self, group: EPGroup, shares: HeadShares, sizes: RoomSizes):
        self.shares, self.sizes = shares, sizes
        first = group.rank - group.rank % shares.num_ranks
        self.ranks = tuple(range(first, first + shares.num_ranks))
        self.index = group.rank - first
        self.heads, self.columns = shares.heads[self.index], shares.columns[self.index]
        self._window = group.shared_window(sizes.num_bytes)
        rooms = [_Room.at(self._window.segments[group.local_ranks.index(rank)], sizes) for rank in self.ranks]
        self._rooms, self._own = rooms, rooms[self.index]
        self._barrier = RankBarrier(group, self.ranks, "attention by heads")

    @staticmethod
    def require_fit(engine: EngineConfig, group: EPGroup) -> None:
        """ValueError unless the group's ranks can be teams."""
        size, where = engine.attention_tp, f"[rank {group.rank}/{group.size}]"
        if group.size % size:
            raise ValueError(
                f"{where} --attention-tp {size}: {group.size} ranks make no teams of {size}; take a multiple of that"
            )
        if len(group.local_ranks) != group.size:
            raise ValueError(
                f"{where} --attention-tp {size}: ranks that share attention share memory, and these are of "
                f"{group.num_nodes} nodes; leave it out"
            )

    def meet(self) -> None:
        """Until all ranks of the team have come; then what each wrote before is there for all."""
        self._barrier.wait()

    def show_batch(self, batch: ForwardBatch) -> None:
        self._own.desk.write(batch)

    def join_batches(self, batch: ForwardBatch) -> TeamRows:
        """Of all ranks' batches, once they have met. batch: this rank's."""
        shown = [room.desk.read() for room in self._rooms]
        parts = [(rank, 0, each.num_decode) for rank, each in enumerate(shown)]
        parts += [(rank, each.num_decode, each.num_tokens) for rank, each in enumerate(shown)]
        ends = np.cumsum([0, *(end - begin for _, begin, end in parts)]).tolist()
        own = tuple(slice(*ends[at : at + 2]) for at in (self.index, len(shown) + self.index))
        return TeamRows(_joined(batch, shown), tuple(parts), own, tuple(each.num_tokens for each in shown))

    def show_input(self, x_TA: Tensor) -> None:
        _rows(self._own.input, *x_TA.shape).copy_(x_TA)

    def inputs(self, rows: TeamRows) -> Tensor:
        """Of all rows, once the team has met."""
        width = self.sizes.input_width
        shown = [_rows(room.input, num_tokens, width) for room, num_tokens in zip(self._rooms, rows.num_tokens_R)]
        return torch.cat([shown[rank][begin:end] for rank, begin, end in rows.parts])

    def show_heads(self, heads_TW: Tensor) -> None:
        """Of all rows, this rank's heads."""
        _rows(self._own.heads, *heads_TW.shape).copy_(heads_TW)

    def all_heads(self, num_tokens: int, width: int) -> Tensor:
        """Of all rows, all heads, each `width` wide, once the team has met."""
        widths = [len(heads) * width for heads in self.shares.heads]
        return torch.cat([_rows(room.heads, num_tokens, each) for room, each in zip(self._rooms, widths)], dim=1)

    def show_output(self, output_TH: Tensor) -> None:
        """Of all rows: this rank's columns, or its heads' part of all columns."""
        _rows(self._own.output, *output_TH.shape).copy_(output_TH)

    def outputs(self, rows: TeamRows) -> list[Tensor]:
        """Of this rank's own rows, what each rank has shown, once the team has met."""
        widths = [len(columns) if self.shares.gathers else self.sizes.output_width for columns in self.shares.columns]
        shown = [_rows(room.output, rows.num_tokens, width) for room, width in zip(self._rooms, widths)]
        return [torch.cat([output_TH[part] for part in rows.own]) for output_TH in shown]

    def close(self) -> None:
        """Collective while all ranks live; never hangs when some do not."""
        self._rooms.clear()
        del self._own
        self._barrier.close()
        self._window.close()


def _rows(room: Tensor, num_tokens: int, width: int) -> Tensor:
    return room[: num_tokens * width].view(num_tokens, width)


def _joined(batch: ForwardBatch, shown: Sequence[_ShownBatch]) -> ForwardBatch:
    """Decodes are a request each."""
    cuts = [(slice(each.num_decode), slice(each.num_decode, None)) for each in shown]
    halves = [(each, cut[half]) for half in (0, 1) for each, cut in zip(shown, cuts)]
    most_pages = max(each.page_table_BP.shape[1] for each in shown)
    tables = [_widened(each.page_table_BP[requests], most_pages) for each, requests in halves]
    lengths_B = np.concatenate([np.diff(each.query_start_B1)[requests] for each, requests in halves])
    contexts = [each.num_context for each in shown]
    position_T = torch.from_numpy(np.concatenate([each.position_T[rows] for each, rows in halves]))
    return replace(
        batch,
        token_id_T=position_T.new_full(position_T.shape, -1),  # nobody has shown them
        kv_slot_T=position_T.new_full(position_T.shape, -1),
        logits_idx=position_T[:0],
        position_T=position_T,
        page_table_BP=torch.from_numpy(np.concatenate(tables)),
        seq_len_B=torch.from_numpy(np.concatenate([each.seq_len_B[requests] for each, requests in halves])),
        query_start_B1=torch.from_numpy(np.concatenate(([0], lengths_B.cumsum())).astype(np.int32)),
        num_decode=sum(each.num_decode for each in shown),
        num_context=None if None in contexts else sum(filter(None, contexts)),
        longest=None,
        meet=None,
    )


def _widened(table_BP: np.ndarray, num_pages: int) -> np.ndarray:
    return np.pad(table_BP, ((0, 0), (0, num_pages - table_BP.shape[1])))
