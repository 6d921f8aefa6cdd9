"""Ranks on nodes whose messages are really sent, from one thread to another, and counted.

Nodes counts the bytes of every message where it leaves its sender: over the link inside of the node
or through the adapter (NIC) to another one. NodeCollectives is fastpar's own TorchCollectives as it
behaves on GPUs, of a rank that is a thread; what it asks of torch.distributed arrives at NodeGroup,
which does it message by message as NCCL would. Results are right, bytes are counted; nothing is
timed.

[Note: ways] In an all-to-all every rank sends each other one its slice. Sums and gathers go around
rings, one through each adapter, which leave a node where they came to it; or in a hierarchy, inside
of each node and then between those ranks of the nodes that have the same place; or, an all-reduce,
up and down two binary trees of nodes for each adapter, each with half of the bytes, in which a node
that has children in one has none in the other. The planner's model chooses unless one is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.handles import DONE, Call, Handle, through
from fastpar.comm.torch_collectives import TorchCollectives
from fastpar.cost.network import Network


class Nodes:
    """What each rank has sent, to ranks of its node and to others.

    Args:
        network: its cluster says how many ranks a node has, its model which way is chosen.
        way: of sums and gathers, instead of that.
    """

    def __init__(self, network: Network, way: str | None = None) -> None:
        self.network, self.way, self.per_node = network, way, network.cluster.per_node
        self.inside = [0] * network.cluster.n_devices
        self.adapter = [0] * network.cluster.n_devices

    def send(self, x: Tensor, src: int, dst: int) -> Tensor:
        """What dst receives of src."""
        near = src // self.per_node == dst // self.per_node
        (self.inside if near else self.adapter)[src] += x.nbytes
        return x.clone()

    def nic_bytes(self) -> list[int]:
        """Sent through each adapter: of every rank, or of every node where its ranks share one."""
        step = self.per_node if self.network.cluster.inter.of_node else 1
        return [sum(self.adapter[i : i + step]) for i in range(0, len(self.adapter), step)]

    # The ways. ranks: of the group; x[i], out[i]: the tensors of its rank i, whole or a slice.

    def members(self, ranks: Sequence[int]) -> list[list[int]]:
        """Which ranks of the group each node has."""
        places = groupby(range(len(ranks)), key=lambda i: ranks[i] // self.per_node)
        return [list(part) for _, part in places]

    def rings(self, ranks: Sequence[int]) -> list[list[int]]:
        """The group in the order of each ring; ring c leaves every node at its member c."""
        nodes = self.members(ranks)
        count = range(len(nodes[0]))
        return [[i for node in nodes for i in (*node[c + 1 :], *node[: c + 1])] for c in count]

    def pairs(self, ranks: Sequence[int], out: list[Tensor], x: list[Tensor]) -> None:
        for i, src in enumerate(ranks):
            for j, part in enumerate(x[i].chunk(len(ranks))):
                received = part if i == j else self.send(part, src, ranks[j])
                out[j].chunk(len(ranks))[i].copy_(received)

    def ring_scatter(self, ranks: Sequence[int], out: list[Tensor], x: list[Tensor]) -> None:
        """The sum of each slice is made on its way to the rank that keeps it."""
        rings = self.rings(ranks)
        slices = [[part.chunk(len(rings)) for part in whole.chunk(len(ranks))] for whole in x]
        for c, ring in enumerate(rings):
            for at, last in enumerate(ring):
                way = ring[at + 1 :] + ring[: at + 1]
                total = slices[way[0]][last][c]
                for src, dst in pairwise(way):
                    total = self.send(total, ranks[src], ranks[dst]) + slices[dst][last][c]
                out[last].chunk(len(rings))[c].copy_(total)

    def ring_gather(self, ranks: Sequence[int], out: list[Tensor], x: list[Tensor]) -> None:
        rings = self.rings(ranks)
        slices = [[part.chunk(len(rings)) for part in whole.chunk(len(ranks))] for whole in out]
        for c, ring in enumerate(rings):
            for at, first in enumerate(ring):
                way = ring[at:] + ring[:at]
                part = x[first].chunk(len(rings))[c]
                slices[first][first][c].copy_(part)
                for src, dst in pairwise(way):
                    part = self.send(part, ranks[src], ranks[dst])
                    slices[dst][first][c].copy_(part)

    def hierarchy_scatter(self, ranks: Sequence[int], out: list[Tensor], x: list[Tensor]) -> None:
        nodes = self.members(ranks)
        sums = [torch.empty(whole.numel() // len(nodes[0]), dtype=whole.dtype) for whole in x]
        for node in nodes:  # member l gets the sums of what members l of all nodes will keep
            mine = [x[i].view(len(nodes), len(node), -1).transpose(0, 1).reshape(-1) for i in node]
            self.ring_scatter([ranks[i] for i in node], [sums[i] for i in node], mine)
        for alike in zip(*nodes):
            some = [ranks[i] for i in alike]
            self.ring_scatter(some, [out[i] for i in alike], [sums[i] for i in alike])

    def hierarchy_gather(self, ranks: Sequence[int], out: list[Tensor], x: list[Tensor]) -> None:
        nodes = self.members(ranks)
        parts = [torch.empty(part.numel() * len(nodes), dtype=part.dtype) for part in x]
        for alike in zip(*nodes):
            some = [ranks[i] for i in alike]
            self.ring_gather(some, [parts[i] for i in alike], [x[i] for i in alike])
        for node in nodes:
            whole = [torch.empty_like(out[i]) for i in node]
            self.ring_gather([ranks[i] for i in node], whole, [parts[i] for i in node])
            for i, found in zip(node, whole):
                by_member = found.view(len(node), len(nodes), -1)
                out[i].copy_(by_member.transpose(0, 1).reshape(-1))

    def tree_reduce(self, ranks: Sequence[int], x: list[Tensor]) -> None:
        """Node k's parent is (k - 1) // 2 in one tree, counted from the last node in the other."""
        nodes = self.members(ranks)
        for c, both in enumerate(zip(*(whole.chunk(len(nodes[0])) for whole in x))):
            for parts, order in zip(zip(*(p.chunk(2) for p in both)), (nodes, nodes[::-1])):
                chains = [(*node[c + 1 :], *node[: c + 1]) for node in order]
                edges = [pair for chain in chains for pair in pairwise(chain)]
                up = [(chains[k][-1], chains[(k - 1) // 2][-1]) for k in range(1, len(chains))]
                edges += up[::-1]
                for src, dst in edges:
                    parts[dst].add_(self.send(parts[src], ranks[src], ranks[dst]))
                for src, dst in reversed(edges):
                    parts[src].copy_(self.send(parts[dst], ranks[dst], ranks[src]))

    def reduced(self, way: str, ranks: Sequence[int], x: list[Tensor]) -> None:
        """An all-reduce in place: both halves of a ring or hierarchy, or a tree."""
        if way == "tree":
            return self.tree_reduce(ranks, x)
        parts = [whole.chunk(len(ranks))[i].clone() for i, whole in enumerate(x)]
        getattr(self, f"{way}_scatter")(ranks, parts, x)
        getattr(self, f"{way}_gather")(ranks, x, parts)

    def run(self, kind: str, ranks: Sequence[int], out: list[Tensor], x: list[Tensor]) -> None:
        """A collective of a group in the way that is chosen; all-reduces are in out."""
        whole = max(out[0].nbytes, x[0].nbytes)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        way = self.way or self.network.traffic(kind, whole, len(ranks), stride).way
        if kind == "all_reduce":
            self.reduced(way, ranks, out)
        elif kind == "all_to_all":
            self.pairs(ranks, out, x)
        else:
            name = "scatter" if kind == "reduce_scatter" else "gather"
            getattr(self, f"{way}_{name}")(ranks, out, x)


class NodeGroup:
    """A process group for torch.distributed's functions, of ranks that are threads.

    The last rank that calls does the collective for all.
    """

    def __init__(self, nodes: Nodes, ranks: Sequence[int]) -> None:
        self.nodes, self.ranks = nodes, ranks
        self._calls: list[Any] = [None] * len(ranks)
        self._meeting = threading.Barrier(len(ranks), self._run)

    def of(self, rank: int) -> OfRank:
        """What the rank of this index passes as group."""
        return OfRank(self, rank)

    def call(self, rank: int, kind: str, out: Tensor, x: Tensor, mean: bool) -> None:
        self._calls[rank] = kind, out, x, mean
        self._meeting.wait()

    def _run(self) -> None:
        kinds, outs, xs, means = zip(*self._calls)
        assert len(set(kinds)) == 1, kinds
        self.nodes.run(kinds[0], self.ranks, list(outs), list(xs))
        for out in outs if means[0] else ():
            out.div_(len(self.ranks))


class OfRank:
    """The methods of a process group that torch.distributed's functions call, by both names."""

    def __init__(self, group: NodeGroup, rank: int) -> None:
        self._group, self.rank = group, rank
        self.world_size = len(group.ranks)

    def _call(self, kind: str, out: Tensor, x: Tensor, options: Any) -> None:
        mean = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        self._group.call(self.rank, kind, out.view(-1), x.view(-1), mean)

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self._call("all_reduce", tensors[0], tensors[0], options)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, options: Any) -> None:
        self._call("reduce_scatter", out, x, options)

    def all_gather_single(self, out: Tensor, x: Tensor, options: Any) -> None:
        self._call("all_gather", out, x, options)

    def all_to_all_single(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], options: Any
    ) -> None:
        assert len({*out_sizes, *x_sizes}) <= 1, "equal slices"
        self._call("all_to_all", out, x, options)

    _reduce_scatter_base = reduce_scatter_single  # torch before 2.13
    _allgather_base, alltoall_base = all_gather_single, all_to_all_single


class NodeCollectives(TorchCollectives):
    """What TorchCollectives asks of NCCL, of NodeGroup: on CPU tensors, in the caller."""

    def __init__(self, group: OfRank, *, in_rank_order: bool) -> None:
        self.group: Any = group
        self.rank, self.world_size = group.rank, group.world_size
        self.device = torch.device("cpu")
        self.transport, self.why = "nodes", "counted"
        self.in_rank_order = in_rank_order
        self._on_gpu = self._averages = True
        self._thread, self._received, self._took_s = None, {}, {}

    def _submit(self, op: str, call: Call, *of: Tensor, message: bool = False) -> Handle:
        through(call())
        return DONE


def run_on_nodes(
    network: Network,
    ask: Callable[[TorchCollectives], Any],
    *,
    ranks: int,
    stride: int = 1,
    in_rank_order: bool = False,
    way: str | None = None,
) -> tuple[Nodes, list[Any]]:
    """What was sent, and what each rank of the cluster got from ask(its collectives).

    Args:
        ranks, stride: of each group; every rank of the cluster is in one.
        in_rank_order, way: of TorchCollectives and Nodes.
    """
    nodes = Nodes(network, way)
    found: list[Any] = []
    for first in range(network.cluster.n_devices):
        if first // stride % ranks == 0:
            group = NodeGroup(nodes, range(first, first + ranks * stride, stride))
            members = [
                NodeCollectives(group.of(i), in_rank_order=in_rank_order) for i in range(ranks)
            ]
            with ThreadPoolExecutor(ranks) as threads:
                found += threads.map(ask, members)
    return nodes, found
