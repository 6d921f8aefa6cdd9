"""How long a collective takes on paper: latency and bandwidth of rings, trees and hierarchies.

A group of n ranks has `local` of them in each of `nodes` nodes. With S bytes, bandwidths b inside
of a node and w between nodes for each device, latencies a and c of a hop, an all-reduce is

    ring            2 (n-1)/n S / min(b, local w)    + 2 (n - nodes) a + 2 nodes c
    tree            2 S / min(b, local w)            + 2 (local - 1) a + 2 log2(nodes) c
    hierarchical    2 (local-1)/local S / b + 2 (nodes-1)/nodes S / (local w)
                                                     + 2 (local - 1) a + 2 log2(nodes) c

and a reduce-scatter or an all-gather half of ring or hierarchical. The best of them counts, as NCCL
chooses. Rings and trees go through every device's adapter at once; an adapter of the node is shared
by all of its devices, which communicate at the same time, in whatever groups they are.

Source: Thakur et al. 2005, doi 10.1177/1094342005051521; Sanders et al. 2009, doi
10.1016/j.parco.2009.09.001 (two trees); Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastpar.config.settings import check_at_least
from fastpar.cost.devices import Cluster, Link

# Of a collective before its first byte moves: a kernel's launch and its ranks' arrival (NCCL's
# base latencies are 7 to 14 us); between CPU ranks threads wake up.
START_S = {"cuda": 10e-6, "cpu": 40e-6}
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")


class Group(NamedTuple):
    """Where the ranks of a group are: nodes, and the most of them in one node."""

    ranks: int
    local: int
    nodes: int


def place(ranks: int, stride: int, per_node: int) -> Group:
    """Where ranks are that are stride apart.

    Raises:
        ValueError: a number below 1.
    """
    values = {"ranks": ranks, "stride": stride, "per_node": per_node}
    check_at_least("place", values, dict.fromkeys(values, 1), "count from 1")
    local = max(1, min(ranks, per_node // stride))
    return Group(ranks, local, -(-ranks // local))


class Network:
    """The links of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.start_s = START_S[cluster.device.kind]
        self.inside_s = cluster.intra.latency_s
        self.between_s = cluster.inter.latency_s
        self.inside = _of_device(cluster.intra, cluster.per_node)
        self.between = _of_device(cluster.inter, cluster.per_node)

    def ring_s(self, n_bytes: float, at: Group, ways: int = 2) -> float:
        """Seconds of a ring: of an all-reduce with ways=2, of one half of it with ways=1."""
        inside = (at.ranks - at.nodes) * self.inside_s
        hops = inside + (at.nodes * self.between_s if at.nodes > 1 else 0.0)
        return ways * ((at.ranks - 1) / at.ranks * n_bytes / self._slowest(at) + hops)

    def tree_s(self, n_bytes: float, at: Group) -> float:
        """Seconds of an all-reduce."""
        return 2 * (n_bytes / self._slowest(at) + self._levels_s(at))

    def hierarchical_s(self, n_bytes: float, at: Group, ways: int = 2) -> float:
        """Seconds of the nodes' rings inside, then one between them; ways: as in ring_s()."""
        inside = (at.local - 1) / at.local * n_bytes / self.inside
        between = (at.nodes - 1) / at.nodes * n_bytes / (at.local * self.between)
        return ways * (inside + between + self._levels_s(at))

    def seconds(self, kind: str, n_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective.

        Args:
            kind: one of KINDS.
            n_bytes: of the whole tensor, as in operations.CommOp.
        Raises:
            ValueError: an unknown kind; ranks or stride below 1.
        """
        at = place(ranks, stride, self.cluster.per_node)
        if ranks == 1:
            return 0.0
        if kind == "all_reduce":
            best = min(self.ring_s(n_bytes, at), self.tree_s(n_bytes, at))
            best = min(best, self.hierarchical_s(n_bytes, at))
        elif kind in ("reduce_scatter", "all_gather"):
            best = min(self.ring_s(n_bytes, at, 1), self.hierarchical_s(n_bytes, at, 1))
        elif kind == "broadcast":
            best = n_bytes / self._slowest(at) + self._levels_s(at)
        elif kind == "send":  # of one device to one other
            best = n_bytes / self.inside + self.inside_s
            if at.nodes > 1:
                best = n_bytes / self.between + self.between_s
        else:
            raise ValueError(
                f"Network: expected a kind of {', '.join(KINDS)}, got kind={kind!r}; "
                "choose one of these"
            )
        return self.start_s + best

    def _slowest(self, at: Group) -> float:
        inside = self.inside if at.local > 1 else math.inf
        return min(inside, at.local * self.between) if at.nodes > 1 else inside

    def _levels_s(self, at: Group) -> float:
        between = math.ceil(math.log2(at.nodes)) * self.between_s
        return (at.local - 1) * self.inside_s + between


def _of_device(link: Link, per_node: int) -> float:
    """Bytes a second that large transfers achieve, for each device."""
    return link.bytes_per_s * link.achieved / (per_node if link.of_node else 1)
