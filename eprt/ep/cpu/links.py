"""NodeLinks: the messages of one backend between nodes.

Each rank sends one block to each other node (to its proxy there) and gets one message of sums back. Nothing here blocks
but the waits, which have deadlines. Knows where blocks and sums lie, nothing of what is in them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.ep.cpu.topology import Topology
from eprt.ep.errors import EPError
from eprt.ep.group.group import EPGroup, PendingMessage
from eprt.ep.group.wait import Waiter

_CLOSE_TIMEOUT_S = 2.0
# Sends that never ended when their backend was closed, with their buffers: MPI may read those for as long as it lives.
_abandoned: list[Any] = []


class NodeLinks:
    """Buffers and requests of one rank, one set per handle in flight. On one node every method does nothing.

    block_bytes, sums_bytes: largest block for, and largest sums message from, a node; by node.
    """

    def __init__(
        self,
        group: EPGroup,
        topology: Topology,
        waiter: Waiter,
        num_sets: int,
        *,
        block_bytes: list[int],
        sums_bytes: list[int],
    ):
        self._group, self._waiter, self._num_sets = group, waiter, num_sets
        self._node, self._num_nodes, self._block_bytes = topology.node, topology.num_nodes, block_bytes[topology.node]
        others = [node for node in range(topology.num_nodes) if node != topology.node]
        self._proxy_of_node = {node: topology.proxy(topology.rank, node) for node in others}
        self._node_of_proxy = {proxy: node for node, proxy in self._proxy_of_node.items()}
        self._proxied = topology.proxied_by(topology.rank)
        self._block_tag, self._sums_tag = group.new_channel(), group.new_channel()

        def buffers(bytes_of: dict[int, int]) -> list[dict[int, np.ndarray]]:
            return [{key: np.empty(n, dtype=np.uint8) for key, n in bytes_of.items()} for _ in range(num_sets)]

        self._blocks_out = buffers({node: block_bytes[node] for node in others})  # by destination node
        self._sums_in = buffers({node: sums_bytes[node] for node in others})  # by summing node
        self._sums_out = buffers({source: sums_bytes[self._node] for source in self._proxied})  # by destination rank
        self._block_receives: list[dict[int, PendingMessage]] = [{} for _ in range(num_sets)]  # by source rank
        self._sums_receives: list[dict[int, PendingMessage]] = [{} for _ in range(num_sets)]  # by proxy
        self._sends: list[list[tuple[int, PendingMessage]]] = [[] for _ in range(num_sets)]  # peer, request

    def addresses(self) -> list[Tensor]:
        """Where blocks for other nodes are to be written, and where their sums arrive: int64 [num_sets, num_nodes]; 0
        for this node."""
        nodes, both = range(self._num_nodes), (self._blocks_out, self._sums_in)
        return [
            torch.tensor([[s[node].ctypes.data if node in s else 0 for node in nodes] for s in sets]) for sets in both
        ]

    def connect(self, ops: Any, exchange: int, own_segment: np.ndarray) -> None:
        """Names the native exchange and the segment that keeps the blocks this rank is proxy for."""
        self._ops, self._exchange, self._own_segment = ops, exchange, own_segment

    def free_set(self, epoch: int) -> None:
        """Waits until the sends of epoch - num_sets have left their buffers, as they mostly have (docs/protocol.md)."""
        self._finish(self._sends[epoch % self._num_sets], epoch, "completion of an old send")

    def _finish(
        self, sends: list[tuple[int, PendingMessage]], epoch: int, phase: str, timeout_s: float | None = None
    ) -> None:
        while sends:
            peer, message = sends[-1]
            self._waiter.for_messages({peer: message}, epoch, phase, timeout_s=timeout_s)
            sends.pop()

    def send_blocks(self, epoch: int) -> None:
        """Posts the receives of this epoch, then sends this rank's blocks."""
        if self._num_nodes == 1:
            return
        i = epoch % self._num_sets
        for source in self._proxied:
            at = self._ops.ep_block_address(self._exchange, epoch, source) - self._own_segment.ctypes.data
            buffer = self._own_segment[at : at + self._block_bytes]
            self._block_receives[i][source] = self._group.irecv(buffer, source, self._block_tag)
        for node, proxy in self._proxy_of_node.items():
            self._sums_receives[i][proxy] = self._group.irecv(self._sums_in[i][node], proxy, self._sums_tag)
        for node, proxy in self._proxy_of_node.items():
            block = self._blocks_out[i][node][: self._ops.ep_outgoing_bytes(self._exchange, epoch, node)]
            self._sends[i].append((proxy, self._group.isend(block, proxy, self._block_tag)))

    def forward_blocks(self, epoch: int) -> None:
        """Shows the blocks this rank is proxy for to its node, each as it comes."""
        if not self._proxied:
            return
        self._ops.ep_start_dispatch_wait(self._exchange, epoch)

        def forward(source: int) -> None:
            if not self._ops.ep_forward(self._exchange, epoch, source):
                raise self._out_of_step(source, epoch, "dispatch between nodes")

        receives = self._block_receives[epoch % self._num_sets]
        self._waiter.for_messages(receives, epoch, "dispatch between nodes", forward)
        receives.clear()

    def exchange_sums(self, epoch: int) -> None:
        """Sends back this node's sums for the blocks this rank is proxy for, and takes in those for its own tokens."""
        i = epoch % self._num_sets
        for source, buffer in self._sums_out[i].items():
            num_bytes = self._ops.ep_sum_forwarded(self._exchange, epoch, source, buffer.ctypes.data)
            self._sends[i].append((source, self._group.isend(buffer[:num_bytes], source, self._sums_tag)))

        def accept(proxy: int) -> None:
            if not self._ops.ep_accept_returned(self._exchange, epoch, self._node_of_proxy[proxy]):
                raise self._out_of_step(proxy, epoch, "combine between nodes")

        self._waiter.for_messages(self._sums_receives[i], epoch, "combine between nodes", accept)
        self._sums_receives[i].clear()

    def _out_of_step(self, peer: int, epoch: int, phase: str) -> EPError:
        return EPError(
            f"[rank {self._group.rank}/{self._group.size}] rank {peer} sent another epoch than {epoch} in {phase}; "
            "all ranks must make the same calls in the same order"
        )

    def close(self) -> None:
        """Lets the last sends leave their buffers, and gives up receives that nobody will answer.

        MPI reads a large message's buffer until its receiver takes it, which may be after this rank's last call. A
        living receiver has posted its receive by then.
        """
        try:
            for sends in self._sends:
                self._finish(sends, 0, "close", _CLOSE_TIMEOUT_S)
        except EPError:
            _abandoned.append((self._sends, self._blocks_out, self._sums_out))
        for receives in (*self._block_receives, *self._sums_receives):
            for message in receives.values():
                message.cancel()
            receives.clear()
