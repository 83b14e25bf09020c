"""Topology: which rank forwards what between nodes. Pure arithmetic on node_of_rank; see docs/protocol.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    rank: int  # this one
    node_of_rank: tuple[int, ...]  # of every rank; nodes are numbered from 0 in order of first appearance

    @property
    def node(self) -> int:
        return self.node_of_rank[self.rank]

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    def ranks_of(self, node: int) -> tuple[int, ...]:
        return tuple(rank for rank, its_node in enumerate(self.node_of_rank) if its_node == node)

    def local_index(self, rank: int) -> int:
        """Position of a rank among the ranks of its node."""
        return self.ranks_of(self.node_of_rank[rank]).index(rank)

    def proxy(self, source: int, node: int) -> int:
        """The rank of another node that takes in source's tokens for that node, and sends back their sums."""
        ranks = self.ranks_of(node)
        return ranks[self.local_index(source) % len(ranks)]

    def proxied_by(self, rank: int) -> tuple[int, ...]:
        """Ranks of other nodes whose tokens come to this node through `rank`, in order."""
        node = self.node_of_rank[rank]
        others = [r for r, its_node in enumerate(self.node_of_rank) if its_node != node]
        return tuple(source for source in others if self.proxy(source, node) == rank)

    def home(self, source: int) -> tuple[int, int]:
        """Where this node keeps source's block: local index of the rank whose segment holds it, and which block there.

        Block 0 of a segment is its own rank's, block 1 + i is that of the i-th rank it is proxy of.
        """
        if self.node_of_rank[source] == self.node:
            return self.local_index(source), 0
        holder = self.proxy(source, self.node)
        return self.local_index(holder), 1 + self.proxied_by(holder).index(source)
