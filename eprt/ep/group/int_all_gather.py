"""IntAllGather: every rank's few integers to all ranks, once per step: the engine's headers, a router's counts.

Inside a node through flags in a shared window; between nodes the first rank of each node (the leader) exchanges the
node's rows by messages. Knows nothing of what the integers mean.
"""

from collections.abc import Sequence

import numpy as np
import torch

from eprt import env
from eprt.ep.group.group import EPGroup, PendingMessage
from eprt.ep.group.wait import Waiter
from eprt.ops import native

_LINE = 64
_NUM_SETS = 2  # see all_gather()


class IntAllGather:
    """Construction and close() are collective.

    num_values: W, how many int64 each rank contributes; equal on all ranks.
    timeout_s: deadline of every wait; default EPRT_TIMEOUT_S.
    """

    def __init__(self, group: EPGroup, num_values: int = 8, timeout_s: float | None = None):
        self.group, self.num_values = group, num_values
        self._waiter = Waiter(group, env.get("EPRT_TIMEOUT_S") if timeout_s is None else timeout_s)
        self._ops = native.load()
        self._exchange_rows = self._ops.ep_exchange_rows.default
        self._out_NW = torch.empty(group.size, num_values, dtype=torch.int64)
        self._zeros_W = torch.zeros(num_values, dtype=torch.int64)
        self._epoch = 0
        self._closed = False
        self._map_segments()
        self._local_ranks: tuple[int, ...] = ()  # of this node, those that take part
        self._locate_rows()
        self._tag = group.new_channel()
        self._sends: dict[int, PendingMessage] = {}
        group.barrier()

    # One segment: flag of the own row | flag of all rows (leaders) | own row x sets | all rows x sets (leaders).
    def _map_segments(self) -> None:
        self._row_at, self._row_bytes = 2 * _LINE, 8 * self.num_values
        self._table_at = self._row_at + _NUM_SETS * self._row_bytes
        self._table_bytes = self.group.size * self._row_bytes
        self._window = self.group.shared_window(self._table_at + _NUM_SETS * self._table_bytes)
        self._segments = self._window.segments
        local = self.group.local_ranks.index(self.group.rank)
        self._is_leader, own = local == 0, self._segments[local]
        own[: self._row_at] = 0
        self._own_row = self._view(own, self._row_at, self._row_bytes)
        self._table = self._view(own, self._table_at, self._table_bytes).reshape(_NUM_SETS, self.group.size, -1)
        self._row_flag, self._table_flag = own.ctypes.data, own.ctypes.data + _LINE

    def _view(self, segment: np.ndarray, at: int, num_bytes: int) -> np.ndarray:
        return segment[at : at + _NUM_SETS * num_bytes].view(np.int64).reshape(_NUM_SETS, -1)

    def _locate_rows(self) -> None:
        """Addresses of the flags to await and of every rank's row, per set; zeros for ranks that take no part."""
        group, base = self.group, [segment.ctypes.data for segment in self._segments]
        local = {rank: base[i] for i, rank in enumerate(group.local_ranks) if group.view.alive[rank]}
        self._local_ranks = tuple(local)
        self._row_flags = torch.tensor(list(local.values()))
        self._leader_flag = torch.tensor([base[0] + _LINE])
        self._rows = []
        for i in range(_NUM_SETS):
            table = base[0] + self._table_at + i * self._table_bytes
            in_table = dict.fromkeys(range(group.size), self._zeros_W.data_ptr())
            in_table |= {rank: table + rank * self._row_bytes for rank in group.view.ranks}
            in_segment = {rank: at + self._row_at + i * self._row_bytes for rank, at in local.items()}
            self._rows.append(torch.tensor([{**in_table, **in_segment}[rank] for rank in range(group.size)]))
        ranks_of_others = [group.ranks_of_node(node) for node in range(group.num_nodes) if node != group.node]
        self._inbox = {ranks[0]: np.empty(len(ranks) * self._row_bytes, dtype=np.uint8) for ranks in ranks_of_others}

    def all_gather(self, values: Sequence[int], timeout_s: float | None = None) -> np.ndarray:
        """Contributes values [W] and returns everyone's, int64 [N, W], once all ranks have called as often as this one.

        Ranks that take no part have zeros.

        timeout_s: deadline of this call alone; math.inf to sleep until the others come (idle ranks).

        Raises EPTimeoutError or RankLostError, and what group.interrupt raises.

        Two sets are enough: whoever writes set e % 2 for epoch e has seen all rows of epoch e - 1, and their owners
        wrote those after they had read everything of epoch e - 2.
        """
        if self._closed:
            raise RuntimeError(f"[rank {self.group.rank}/{self.group.size}] this IntAllGather is closed")
        if len(values) != self.num_values:
            raise ValueError(
                f"[rank {self.group.rank}/{self.group.size}] all_gather of {len(values)} values, made for "
                f"{self.num_values}; pass exactly num_values integers"
            )
        self._epoch += 1
        self._own_row[self._epoch % _NUM_SETS] = values
        rows = self._rows[self._epoch % _NUM_SETS]
        owns_core = self._waiter.owns_core
        slice_ns = self._waiter.slice_ns
        arguments = (self._row_flag, self._row_flags, rows, self._out_NW, self._epoch, owns_core, slice_ns)
        self._waiter.for_call(
            self._exchange_rows, arguments, self._seen_row, self._epoch, "header all-gather", timeout_s
        )
        if self._inbox:
            self._exchange_nodes(timeout_s)
            self._ops.ep_gather_rows(rows, self._out_NW)
        return self._out_NW.numpy().copy()

    def _seen_row(self, local: int) -> tuple[int, int]:
        return self._local_ranks[local], self._ops.ep_flag_epoch(self._row_flags[local].item())

    def _seen_table(self, _: int) -> tuple[int, int]:
        return self._local_ranks[0], self._ops.ep_flag_epoch(self._leader_flag.item())

    def _exchange_nodes(self, timeout_s: float | None) -> None:
        """Brings the other nodes' rows into the leader's table."""
        phase = "header all-gather between nodes"
        i, group = self._epoch % _NUM_SETS, self.group
        if not self._is_leader:
            arguments = (self._leader_flag, self._epoch, self._waiter.owns_core, self._waiter.slice_ns)
            self._waiter.for_call(self._ops.ep_wait, arguments, self._seen_table, self._epoch, phase, timeout_s)
            return
        self._waiter.for_messages(self._sends, self._epoch, phase, timeout_s=timeout_s)
        mine = np.stack([self._view(s, self._row_at, self._row_bytes)[i] for s in self._segments])
        self._outbox = mine.reshape(-1).view(np.uint8)  # lives until the sends are done
        self._sends = {peer: group.isend(self._outbox, peer, self._tag) for peer in self._inbox}
        receives = {peer: group.irecv(buffer, peer, self._tag) for peer, buffer in self._inbox.items()}
        self._waiter.for_messages(receives, self._epoch, phase, timeout_s=timeout_s)
        for peer, buffer in self._inbox.items():
            ranks = list(group.ranks_of_node(group.node_of_rank[peer]))
            self._table[i, ranks] = buffer.view(np.int64).reshape(len(ranks), -1)
        self._ops.ep_publish(self._table_flag, self._epoch)

    @property
    def epoch(self) -> int:
        """Of the latest call, also where it failed."""
        return self._epoch

    def require_restartable(self) -> None:
        """Raises ValueError, saying why, unless restart() is possible."""
        if self.group.num_nodes > 1:
            raise ValueError(
                f"[rank {self.group.rank}/{self.group.size}] the ranks of {self.group.num_nodes} nodes cannot go on "
                "without one of them; restart the job"
            )

    def restart(self, epoch: int) -> None:
        """From now on the ranks of group.view exchange; their next call has this epoch, larger than any before."""
        self.require_restartable()
        self._epoch = epoch - 1
        self._locate_rows()

    def close(self) -> None:
        """Frees the window. Collective while all ranks live; never hangs when some do not."""
        if not self._closed:
            self._closed = True
            self._segments = []
            self._window.close()
