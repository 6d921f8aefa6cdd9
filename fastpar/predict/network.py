"""How long a collective takes on devices in nodes, and how many bytes leave each network adapter.

[Note: collectives] A group of n ranks has `local` of them in each of `nodes` nodes. Every device
has a link inside of its node with bandwidth b and latency a of a hop, and an adapter (NIC) to the
other nodes with w and c; an adapter "of the node" is shared by all of its devices, which
communicate at the same time, in whatever groups they are. Of a tensor of S bytes a rank sends

    way          inside                  through its adapter          hops
    ring         (n-1)/n S               (n-1)/n S / local            n - nodes, nodes
    hierarchy    (local-1)/local S       (nodes-1)/nodes S / local    local - 1, log2(nodes)
    tree         S                       S / local                    local - 1, log2(nodes)
    pairs        (local-1)/n S           (n-local)/n S                local - 1, n - local

for a reduce-scatter or an all-gather, and twice that for an all-reduce (in trees at most). A ring
enters and leaves each node once: there is one through each device's adapter, with its part of the
tensor, and inside of a node each goes as fast as its slowest link. In pairs every rank sends to
every other: that is an all-to-all, and the deterministic reduce-scatter, which adds up what it
received. Nothing is added up before it leaves a node, so that each adapter carries almost `local`
times the bytes of a ring.

An operation lasts as long as its slower link, or as both where one waits for the other
(hierarchy). Of several ways the fastest counts, as NCCL chooses. Its own halves of an all-reduce go
around rings where a node has several ranks: a hierarchy of them is the best that they could do.

Source: Thakur et al. 2005, doi 10.1177/1094342005051521 (rings, pairs); Sanders et al. 2009, doi
10.1016/j.parco.2009.09.001 (two trees); Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from fastpar.axes.step import CommOp
from fastpar.predict.devices import Cluster, Link
from fastpar.settings.files import check_at_least

# Of a collective before its first byte moves: a kernel's launch and its ranks' arrival (NCCL's
# base latencies are 7 to 14 us); between CPU ranks threads wake up.
START_S = {"cuda": 10e-6, "cpu": 40e-6}


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


class Traffic(NamedTuple):
    """What a rank of a group sends in one collective; see [Note: collectives].

    Attributes:
        way: of WAYS.
        inside: bytes over its link inside of the node; adapter: bytes to other nodes.
        hops_inside, hops_between: messages that wait for each other.
        in_turn: the bytes to other nodes wait for those inside.
    """

    way: str
    inside: float
    adapter: float
    hops_inside: int
    hops_between: int
    in_turn: bool = False


Way = Callable[[Group, float], Traffic]


def ring(at: Group, n_bytes: float, times: int = 1) -> Traffic:
    """Every byte goes to all ranks in turn; times: 2 for an all-reduce, which is both halves."""
    sent, across = times * (at.ranks - 1) / at.ranks * n_bytes, at.nodes > 1
    hops = times * (at.ranks - at.nodes), times * at.nodes * across
    return Traffic("ring", sent * (at.local > 1), sent / at.local * across, *hops)


def tree(at: Group, n_bytes: float, times: int = 1) -> Traffic:
    """A chain inside of nodes, two binary trees between them; times: 2 up and down again."""
    sent = times * n_bytes
    between = sent / at.local * (at.nodes > 1)
    return Traffic("tree", sent * (at.local > 1), between, *_levels(at, times))


def hierarchy(at: Group, n_bytes: float, times: int = 1) -> Traffic:
    """The nodes' rings inside, then a ring of the nodes; times: as in ring()."""
    inside = times * (at.local - 1) / at.local * n_bytes
    between = times * (at.nodes - 1) / at.nodes * n_bytes / at.local
    return Traffic("hierarchy", inside, between, *_levels(at, times), in_turn=True)


def pairs(at: Group, n_bytes: float) -> Traffic:
    """Every rank sends every other its slice."""
    slices = n_bytes / at.ranks
    near, far = at.local - 1, at.ranks - at.local
    return Traffic("pairs", near * slices, far * slices, near, far)


def message(at: Group, n_bytes: float) -> Traffic:
    """From one device to one other, the farthest in the group."""
    far = at.nodes > 1
    return Traffic("message", n_bytes * (not far), n_bytes * far, int(not far), int(far))


def _levels(at: Group, times: int) -> tuple[int, int]:
    return times * (at.local - 1), times * math.ceil(math.log2(at.nodes))


WAYS: dict[str, tuple[Way, ...]] = {
    "all_reduce": tuple(partial(way, times=2) for way in (ring, tree, hierarchy)),
    "reduce_scatter": (ring, hierarchy),
    "all_gather": (ring, hierarchy),
    "all_to_all": (pairs,),
    "broadcast": (tree,),
    "send": (message,),
}


class Network:
    """The links of a cluster; [Note: collectives]."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.start_s = START_S[cluster.device.kind]
        self._inside = _of_device(cluster.intra, cluster.per_node)
        self._between = _of_device(cluster.inter, cluster.per_node)

    def traffic(self, kind: str, n_bytes: float, ranks: int, stride: int = 1) -> Traffic:
        """What a rank sends in one collective, in the fastest way.

        Args:
            kind: one of WAYS.
            n_bytes: of the whole tensor, as in operations.CommOp.
        Raises:
            ValueError: an unknown kind; ranks or stride below 1.
        """
        at = place(ranks, stride, self.cluster.per_node)
        if kind not in WAYS:
            raise ValueError(
                f"Network: expected a kind of {', '.join(WAYS)}, got kind={kind!r}; "
                "choose one of these"
            )
        if ranks == 1:
            return Traffic("none", 0.0, 0.0, 0, 0)
        return min((way(at, n_bytes) for way in WAYS[kind]), key=self.traffic_s)

    def seconds(self, kind: str, n_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective; arguments as of traffic()."""
        traffic = self.traffic(kind, n_bytes, ranks, stride)
        return self.start_s + self.traffic_s(traffic) if ranks > 1 else 0.0

    def traffic_s(self, sent: Traffic) -> float:
        """Seconds that a group takes for this, after its start."""
        inside, between = sent.inside / self._inside, sent.adapter / self._between
        moving = inside + between if sent.in_turn else max(inside, between)
        hops_s = sent.hops_inside * self.cluster.intra.latency_s
        return moving + hops_s + sent.hops_between * self.cluster.inter.latency_s

    def nic_bytes(self, sent: Traffic) -> float:
        """Bytes that leave a node through each of its adapters while every rank sends this."""
        return sent.adapter * (self.cluster.per_node if self.cluster.inter.of_node else 1)

    def step_nic_bytes(self, comms: Iterable[CommOp]) -> float:
        """The same of all communication of a step."""
        sent = ((c.count, self.traffic(c.kind, c.bytes, c.ranks, c.stride)) for c in comms)
        return sum(count * self.nic_bytes(each) for count, each in sent)


def _of_device(link: Link, per_node: int) -> float:
    """Bytes a second that large transfers achieve, for each device."""
    return link.bytes_per_s * link.achieved / (per_node if link.of_node else 1)
