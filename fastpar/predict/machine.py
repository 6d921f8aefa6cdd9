"""Speeds of machines: from data sheets, or measured; and which machine a result was measured on.

Cluster has devices and links from the tables devices.csv and links.csv, Network the time of a
collective on them, DatasheetRates the time of operations.

[Note: sources] devices.csv has a row per device. Peaks are dense (makers print twice as much for
sparse matrices): 16-bit products with sums in fp32, and true fp32 products, because torch uses tf32
only on request. Peak and bandwidth are from the data sheet in column `source`. Memory is what torch
reports, slightly less than the sheet says. Prices are rounded hourly on-demand list prices of
clouds from mid-2025: they change faster than this table, so pass your own.

[Note: links] links.csv has a row per link. Bandwidth is that of one direction per device; makers
print both directions. A link "of the node" is shared by its devices. `achieved` is the fraction
that large collectives reach, and latency is that of one hop of a ring or tree: rounded from reports
of NCCL's tests (8 A100: about 235 of 300 GB/s; 8 H100: 365 of 450; InfiniBand: 90 %); for shared
memory and PCIe estimates.

[Note: hosts] For data centre machines: a GPU's share of the memory bandwidth of both sockets, from
the makers' sheets: DGX B200 (Xeon 8570, 8 channels of DDR5-5600 each), DGX H100 (Xeon 8480C,
DDR5-4800), DGX A100 (EPYC 7742, 8 of DDR4-3200), DGX-1 (Xeon E5-2698 v4, 4 of DDR4-2400).
HOST_ACHIEVED is the fraction that loops like AdamW's reach.

[Note: collectives] A group of n ranks has `local` of them in each of `nodes` nodes. Every device
has a link inside its node with bandwidth b and latency a per hop, and an adapter (NIC) to the other
nodes with w and c; an adapter "of the node" is shared by all of its devices, which communicate at
the same time, whatever their groups. For a tensor of S bytes a rank sends

    way          inside                  through its adapter          hops
    ring         (n-1)/n S               (n-1)/n S / local            n - nodes, nodes
    hierarchy    (local-1)/local S       (nodes-1)/nodes S / local    local - 1, log2(nodes)
    tree         S                       S / local                    local - 1, log2(nodes)
    pairs        (local-1)/n S           (n-local)/n S                local - 1, n - local

for a reduce-scatter or an all-gather, and twice that for an all-reduce (in trees at most). A ring
enters and leaves each node once: there is one through each device's adapter, with its slice of the
tensor, and inside a node each runs at the speed of its slowest link. In pairs every rank sends to
every other: that is an all-to-all, and the deterministic reduce-scatter, which sums what it
received. Nothing is summed before it leaves a node, so each adapter carries almost `local` times
the bytes of a ring.

An operation lasts as long as its slower link, or as both if one waits for the other (hierarchy). Of
several ways the fastest counts, as NCCL chooses. The engine's own halves of an all-reduce use rings
if a node has several ranks: a hierarchy of them is the best that they could do.

Source: Thakur et al. 2005, doi 10.1177/1094342005051521 (rings, pairs); Sanders et al. 2009, doi
10.1016/j.parco.2009.09.001 (two trees); Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002

Rates from data sheets are what a device reaches of its peaks, by a few rules with few constants:

    matmul      max(flops / (peak * reached * tiles * depth), bytes / (bandwidth * streamed))
    attention   flops / (peak * reached * a fraction of its own)
    others      bytes / (bandwidth * streamed)

each plus the cost of a launch, and at least what the host needs to issue it.

[Note: constants] `reached` is the fraction of the sheet's peak that a large product with random
data reaches: on A100 about 250 of 312 TFLOP/s, on H100 about 650 of 989, because power limits its
clock and memory feeds a tensor unit that grew faster. It was set with the published runs of
bench/peers/published.py in view, like the fractions of attention; the same numbers hold for all of
a device's rows there.
[Note: tiles] A product is divided into output tiles; each multiprocessor has one at a time, so that
the last wave is partly empty, and a small tile reads more per computed element. The best of TILES
counts, as libraries choose; a long inner dimension can be split too (split K).
[Note: depth] The beginning and end of a tile's loop cost as much as DEPTH elements of it.
"""

from __future__ import annotations

import datetime
import difflib
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastpar._version import __version__
from fastpar.axes.offload import Host
from fastpar.axes.step import CommOp, Op, Setup
from fastpar.comm.ranks import available_cores
from fastpar.doctor.table import cpu_name
from fastpar.doctor.trial import clock_for, interleave
from fastpar.files.tensor_file import DTYPES
from fastpar.kernels import linear
from fastpar.kernels.orthogonalize import POLAR_EXPRESS

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """A connection between devices; [Note: links]."""

    name: str
    bytes_per_s: float
    latency_s: float
    achieved: float
    of_node: bool = False


@dataclass(frozen=True)
class Device:
    """One kind of device; [Note: sources].

    Attributes:
        pattern: regular expression that matches torch's names for it.
        generation: the maker's design, a key of GENERATIONS.
        peak_flops, peak_flops_fp32: operations per second.
        intra, inter: usual links inside a node and between nodes.
    """

    name: str
    aliases: tuple[str, ...]
    pattern: str
    generation: str
    peak_flops: float
    peak_flops_fp32: float
    memory_bytes: int
    bytes_per_s: float
    per_node: int
    intra: str
    inter: str
    price_per_hour: float
    source: str

    @property
    def kind(self) -> str:
        return "cpu" if self.generation == "cpu" else "cuda"

    @property
    def has_bf16(self) -> bool:
        return self.generation not in ("volta", "turing")


def _read(name: str) -> list[list[str]]:
    """The rows of a table in this folder, columns in the order of the fields."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()[1:]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def _in(unit: float) -> Callable[[str], float]:
    return lambda text: float(text) * unit


Columns = tuple[Callable[[str], Any], ...]
_OF_LINK: Columns = (str, _in(1e9), lambda text: float(text) / 1e6, float, "node".__eq__)
_OF_DEVICE: Columns = (
    *(str, lambda text: tuple(text.split()), str, str, _in(1e12), _in(1e12)),
    *(lambda text: int(float(text) * GIB), _in(1e9), int, str, str, float, str),
)
LINKS = tuple(Link(*(f(x) for f, x in zip(_OF_LINK, row))) for row in _read("links.csv"))
# By device generation, see [Note: hosts]: memory bytes per second, the link between host and GPU.
HOSTS = {
    "blackwell": (716.8e9 / 8, "pcie5"),
    "hopper": (614.4e9 / 8, "pcie5"),
    "cdna3": (614.4e9 / 8, "pcie5"),
    "ada": (614.4e9 / 8, "pcie4"),
    "ampere": (409.6e9 / 8, "pcie4"),
    "volta": (153.6e9 / 8, "pcie3"),
    "turing": (153.6e9 / 8, "pcie3"),
}
HOST_ACHIEVED = 0.7
# The first matching pattern counts.
DEVICES = tuple(Device(*(f(x) for f, x in zip(_OF_DEVICE, row))) for row in _read("devices.csv"))


def host_of(generation: str) -> Host:
    """A GPU's share of its usual host."""
    bytes_per_s, name = HOSTS.get(generation, HOSTS["hopper"])
    link = next(link for link in LINKS if link.name == name)
    return Host(HOST_ACHIEVED * bytes_per_s, link.bytes_per_s * link.achieved)


def device_of(torch_name: str) -> Device | None:
    """The device that torch.cuda.get_device_name() names; None: not in the table."""
    devices = (device for device in DEVICES if re.search(device.pattern, torch_name))
    return next(devices, None)


def find_device(name: str) -> Device:
    """The device with this name: the table's, an alias, or torch's.

    Raises:
        ValueError: unknown; names the nearest and all.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    by_name = {other: device for device in DEVICES for other in (device.name, *device.aliases)}
    match = by_name.get(plain) or device_of(name)
    if match is None:
        raise _unknown("device", name, plain, by_name, [device.name for device in DEVICES])
    return match


def find_link(name: str) -> Link:
    """The link with this name in the table; ethernet and infiniband may be spelled out.

    Raises:
        ValueError: unknown; names the nearest and all.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = plain.replace("ethernet", "eth").replace("infiniband", "ib")
    by_name = {link.name: link for link in LINKS}
    if plain not in by_name:
        raise _unknown("link", name, plain, by_name, list(by_name))
    return by_name[plain]


def _unknown(
    what: str, name: str, plain: str, by_name: Mapping[str, Any], listed: list[str]
) -> ValueError:
    close = difflib.get_close_matches(plain, list(by_name), n=1, cutoff=0.3)
    hint = f"did you mean {by_name[close[0]].name}? " if close else ""
    return ValueError(
        f"find_{what}: expected a {what} of the table, got name={name!r}; "
        f"{hint}choose one of {', '.join(listed)}"
    )


def larger_device(n_bytes: float) -> str | None:
    """The GPU with the least memory of at least n_bytes; None: there is none."""
    fit = [d for d in DEVICES if d.kind == "cuda" and d.per_node > 1]
    fit = [d for d in fit if d.memory_bytes >= n_bytes]
    return min(fit, key=lambda d: (d.memory_bytes, d.price_per_hour)).name if fit else None


def device_table() -> str:
    """All devices and links as text: `fastpar plan --gpu list`."""
    lines = ["device        TFLOP/s  fp32   GiB    GB/s  links             USD/h  source"]
    for d in DEVICES:
        lines.append(
            f"{d.name:12s}  {d.peak_flops / 1e12:7.5g}  {d.peak_flops_fp32 / 1e12:5.4g}  "
            f"{d.memory_bytes / GIB:5.1f}  {d.bytes_per_s / 1e9:5.0f}  "
            f"{d.intra + ', ' + d.inter:16s}  {d.price_per_hour:5.2f}  {d.source}"
        )
    lines.append("link      GB/s (one way)    per   latency us  achieved")
    for link in LINKS:
        owner = "node" if link.of_node else "device"
        lines.append(
            f"{link.name:8s}  {link.bytes_per_s / 1e9:16.4g}  {owner:6s}  "
            f"{link.latency_s * 1e6:8.3g}  {link.achieved:8.0%}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in nodes of per_node each.

    Raises:
        ValueError: nodes that are not full.
    """

    device: Device
    n_devices: int
    per_node: int
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        if self.n_devices > self.per_node and self.n_devices % self.per_node:
            raise ValueError(
                f"Cluster: expected full nodes of per_node={self.per_node}, got "
                f"n_devices={self.n_devices}; use a multiple of per_node, or pass another"
            )

    @classmethod
    def of(
        cls,
        device: Device | str,
        n_devices: int,
        per_node: int | None = None,
        intra: str | None = None,
        inter: str | None = None,
    ) -> Cluster:
        """A cluster with the device's usual links and node size by default.

        Args:
            per_node: None: the usual number, or fewer so that nodes are full.
        Raises:
            ValueError: an unknown name; nodes that are not full.
        """
        device = find_device(device) if isinstance(device, str) else device
        if per_node is None:
            most = min(device.per_node, n_devices)
            per_node = next(n for n in range(most, 0, -1) if n_devices % n == 0)
        links = find_link(intra or device.intra), find_link(inter or device.inter)
        return cls(device, n_devices, per_node, *links)

    def __str__(self) -> str:
        nodes = -(-self.n_devices // self.per_node)
        between = f", {nodes} nodes over {self.inter.name}" if nodes > 1 else ""
        over = f" over {self.intra.name}" if self.per_node > 1 else ""
        return f"{self.n_devices} x {self.device.name}, {self.per_node} per node{over}{between}"


# Start of a collective before its first byte moves: a kernel's launch and its ranks' arrival
# (NCCL's base latencies are 7 to 14 us); between CPU ranks threads wake up.
START_S = {"cuda": 10e-6, "cpu": 40e-6}


class Group(NamedTuple):
    """Positions of a group's ranks: number of nodes, and the most ranks in one node."""

    ranks: int
    local: int
    nodes: int


def place(ranks: int, stride: int, per_node: int) -> Group:
    """The Group of ranks that are `stride` apart."""
    local = max(1, min(ranks, per_node // stride))
    return Group(ranks, local, -(-ranks // local))


class Traffic(NamedTuple):
    """What a rank of a group sends in one collective; see [Note: collectives].

    Attributes:
        inside: bytes over its link inside the node; adapter: bytes to other nodes.
        hops_inside, hops_between: messages that wait for each other.
        in_turn: bytes to other nodes wait for those inside.
    """

    inside: float
    adapter: float
    hops_inside: int
    hops_between: int
    in_turn: bool = False


Way = Callable[[Group, float], Traffic]


def ring(group: Group, n_bytes: float, times: int = 1) -> Traffic:
    """Every byte visits all ranks; times: 2 for an all-reduce, which is both halves."""
    sent, across = times * (group.ranks - 1) / group.ranks * n_bytes, group.nodes > 1
    hops = times * (group.ranks - group.nodes), times * group.nodes * across
    return Traffic(sent * (group.local > 1), sent / group.local * across, *hops)


def tree(group: Group, n_bytes: float, times: int = 1) -> Traffic:
    """A chain inside nodes, two binary trees between them; times: 2 for up and down."""
    sent = times * n_bytes
    between = sent / group.local * (group.nodes > 1)
    return Traffic(sent * (group.local > 1), between, *_levels(group, times))


def hierarchy(group: Group, n_bytes: float, times: int = 1) -> Traffic:
    """Rings inside nodes, then a ring of the nodes; times: as in ring()."""
    inside = times * (group.local - 1) / group.local * n_bytes
    between = times * (group.nodes - 1) / group.nodes * n_bytes / group.local
    return Traffic(inside, between, *_levels(group, times), in_turn=True)


def pairs(group: Group, n_bytes: float) -> Traffic:
    """Every rank sends its slice to every other."""
    slices = n_bytes / group.ranks
    near, far = group.local - 1, group.ranks - group.local
    return Traffic(near * slices, far * slices, near, far)


def message(group: Group, n_bytes: float) -> Traffic:
    """From one device to one other, the farthest in the group."""
    far = group.nodes > 1
    return Traffic(n_bytes * (not far), n_bytes * far, int(not far), int(far))


def _levels(group: Group, times: int) -> tuple[int, int]:
    return times * (group.local - 1), times * math.ceil(math.log2(group.nodes))


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
            n_bytes: of the full tensor, as in CommOp.
        """
        group = place(ranks, stride, self.cluster.per_node)
        if ranks == 1:
            return Traffic(0.0, 0.0, 0, 0)
        return min((way(group, n_bytes) for way in WAYS[kind]), key=self.traffic_s)

    def seconds(self, kind: str, n_bytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of one collective; arguments as in traffic()."""
        traffic = self.traffic(kind, n_bytes, ranks, stride)
        return self.start_s + self.traffic_s(traffic) if ranks > 1 else 0.0

    def traffic_s(self, sent: Traffic) -> float:
        """Seconds that a group takes for this, after its start."""
        inside, between = sent.inside / self._inside, sent.adapter / self._between
        moving = inside + between if sent.in_turn else max(inside, between)
        hops_s = sent.hops_inside * self.cluster.intra.latency_s
        return moving + hops_s + sent.hops_between * self.cluster.inter.latency_s


def _of_device(link: Link, per_node: int) -> float:
    """Bytes per second that large transfers achieve, per device."""
    return link.bytes_per_s * link.achieved / (per_node if link.of_node else 1)


# Output tiles of a multiprocessor, and their speed relative to the best tile's.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.66))
DEPTH = 64
SPLIT_K = (1, 2, 4, 8)
# Products in 8 bits: 2 on paper; published layers of 1664 features reach 1.38, casts included.
FP8_SPEED = 1.6
STEPS = len(POLAR_EXPRESS)  # of muon's orthogonalization
SPLIT_COST = 0.04  # of a product's time per doubling: partial sums are added in fp32


class Generation(NamedTuple):
    """The fractions of its peaks that a maker's design reaches; see [Note: constants].

    Attributes:
        reached: by a large product.
        attention: by attention's forward and backward, relative to a large product.
        streamed: of memory bandwidth.
        units: multiprocessors of a large chip.
    """

    reached: float
    attention: tuple[float, float]
    streamed: float
    units: int


GENERATIONS = {
    "volta": Generation(0.72, (0.45, 0.35), 0.82, 80),
    "turing": Generation(0.60, (0.45, 0.35), 0.80, 40),
    "ampere": Generation(0.80, (0.62, 0.52), 0.85, 108),
    "ada": Generation(0.75, (0.60, 0.50), 0.85, 128),
    "hopper": Generation(0.66, (0.60, 0.48), 0.87, 132),
    "blackwell": Generation(0.66, (0.55, 0.45), 0.87, 148),
    "cdna3": Generation(0.50, (0.50, 0.40), 0.80, 304),
    # A core with fused kernels: no waves, little memory bandwidth compared with GPUs.
    "cpu": Generation(0.75, (0.45, 0.40), 0.70, 1),
}

LAUNCH_S = {"cuda": 4e-6, "cpu": 5e-6}  # of the device: start and drain of a kernel
HOST_S = {"cuda": 25e-6, "cpu": 0.0}  # Python, autograd and dispatch of an op outside CUDA graphs
LAUNCHES = {("matmul", "backward"): 2, ("attention", "backward"): 3, ("layer_norm", "backward"): 2}


class DatasheetRates:
    """Rates of a cluster for one setup's formats.

    Args:
        setup: its dtype determines the peak.
    """

    def __init__(self, cluster: Cluster, setup: Setup) -> None:
        device = cluster.device
        self.cluster, self.network = cluster, Network(cluster)
        self._kind, self._generation = device.kind, GENERATIONS[device.generation]
        self._item = DTYPES[setup.dtype].itemsize
        self._peak = device.peak_flops if self._item == 2 else device.peak_flops_fp32
        self._stream = device.bytes_per_s * self._generation.streamed
        self._known: dict[Any, float] = {}  # a search asks for the same values repeatedly
        self.peak_flops = self._peak
        self.generation, self.host = device.generation, host_of(device.generation)
        # Collectives take some of a GPU's multiprocessors and memory bandwidth.
        self.overlap = 0.0 if self._kind == "cpu" else 0.8
        self.overhead_s = 1e-3  # of a step: data, logging and the optimizer's Python

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation."""
        if op.key not in self._known:
            self._known[op.key] = self._op_s(op)
        return self._known[op.key]

    def comm_s(self, comm: CommOp) -> float:
        """Seconds of one such communication."""
        key = (comm.kind, comm.bytes, comm.ranks, comm.stride)
        if key not in self._known:
            self._known[key] = self.network.seconds(*key)
        return self._known[key]

    def _op_s(self, op: Op) -> float:
        name, _, direction = op.key
        launches = LAUNCHES.get((name, direction), 1)
        if name == "matmul":
            m, k, n = op.shape
            both = [(m, k, n)] if direction == "forward" else [(m, n, k), (n, m, k)]
            seconds = sum(self._product_s(*product) for product in both)
        elif name == "loss" and direction == "forward":
            n, width, vocab = op.shape
            seconds = op.bytes / self._stream
            for product in ((n, width, vocab), (n, vocab, width), (vocab, n, width)):
                seconds += self._product_s(*product)
        elif name == "orthogonalize":
            short, long = op.shape
            products = (short, long, short), (short, short, short), (short, short, long)
            seconds = STEPS * sum(self._product_s(*product) for product in products)
            launches = 4 * STEPS
        elif name == "attention":
            speed = self._generation.attention[direction == "backward"]
            speed *= self._generation.reached * self._peak
            # Below 128 a head's dimension leaves some of the tensor units' depth unused.
            speed *= min(1.0, op.shape[-1] / 128) ** 0.25
            seconds = max(op.flops / speed, op.bytes / self._stream)
        else:
            seconds = op.bytes / self._stream
        return max(seconds + launches * LAUNCH_S[self._kind], launches * HOST_S[self._kind])

    def _product_s(self, m: int, k: int, n: int) -> float:
        """Seconds of [m, k] @ [k, n]."""
        speed = self._peak * self._generation.reached
        moved = float(self._item * (m * k + k * n + m * n))
        return max(2.0 * m * k * n / (speed * self.utilization(m, k, n)), moved / self._stream)

    @property
    def has_fp8(self) -> bool:
        """Whether the device multiplies 8-bit floats, twice as fast on paper, for bf16 weights."""
        return self._item == 2 and self.generation in ("ada", "hopper", "blackwell")

    def fp8_saves_s(self, m: int, k: int, n: int) -> float:
        """Seconds that fp8 with row scales saves for x[m, k] @ w[n, k].T in a step; negative if it
        costs time. Two of three products are faster; x and dy are read and written as codes, the
        weight twice, and x's values are restored for the third product."""
        products = self._product_s(m, k, n) + self._product_s(m, n, k)
        moved = (self._item + 1) * (2 * m * k + m * n + 2 * n * k)
        return products * (1 - 1 / FP8_SPEED) - moved / self._stream - 5 * LAUNCH_S[self._kind]

    def utilization(self, m: int, k: int, n: int) -> float:
        """Fraction of the multiprocessors that a product uses; see [Note: tiles], [Note: depth]."""
        if self._kind == "cpu":
            return k / (k + 16.0)
        units, best = self._generation.units, 0.0
        for rows, columns, speed in TILES:
            tiles = math.ceil(m / rows) * math.ceil(n / columns)
            covered = m * n / (tiles * rows * columns)
            for parts in SPLIT_K:
                work = tiles * parts
                full = work / (math.ceil(work / units) * units)
                depth = k / parts
                cost = 1 + SPLIT_COST * math.log2(parts)
                best = max(best, speed * covered * full * depth / (depth + DEPTH) / cost)
        return best


def gpu_name() -> str:
    """The first GPU's name; "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


class Ceilings(NamedTuple):
    """The best rates of this machine, measured by this process."""

    copy_gb_per_s: float  # bytes read plus bytes written
    matmul_tflop_per_s: float
    matmul: str  # "bf16 8192^3"


def measure_ceilings(device: str, quick: bool = False) -> Ceilings:
    """Measures a copy of GBs and a square product, with torch's current number of threads.

    Args:
        device: "cpu" or "cuda".
        quick: tiny sizes that are no ceilings, to test the code.
    """
    clock = clock_for(device)
    on_cuda = device == "cuda"
    numel = (1 << 28) if on_cuda else (1 << 20 if quick else 1 << 25)
    size = 8192 if on_cuda else (256 if quick else 1536)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    source = torch.randn(numel, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timings = interleave(
        {
            "copy": [lambda: target.copy_(source)],
            # torch's fp32 product is not the fastest on every CPU (kernels/linear).
            "torch": [lambda: a @ b],
            "linear": [lambda: linear(a, b)],
        },
        clock,
        budget_s=0.2 if quick else 1.5,
    )
    matmul_ms = min(timings["torch"].median_ms, timings["linear"].median_ms)
    return Ceilings(
        8 * numel / timings["copy"].median_ms / 1e6,
        2 * size**3 / matmul_ms / 1e9,
        f"{'bf16' if on_cuda else 'fp32'} {size}^3",
    )


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with + if modified; or None."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "csrc").is_dir() or not (root / "fastpar").is_dir():  # installed elsewhere
        return os.environ.get("FASTPAR_COMMIT")
    git = ["git", "-C", str(root), "-c", "safe.directory=*"]
    try:
        head = _output([*git, "rev-parse", "--short=12", "HEAD"])
        changed = _output([*git, "status", "--porcelain", "--", "fastpar", "kernels", "csrc"])
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("FASTPAR_COMMIT")
    return head + "+" * bool(changed)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def version_of(package: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def about_machine(device: str) -> dict[str, Any]:
    """device (its name), cores, system, date, commit, and versions of software."""
    name = f"CPU: {cpu_name()}, {available_cores()} cores"
    if device == "cuda":
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return {
        "device": name,
        "cores": available_cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "deepspeed": version_of("deepspeed"),
        "fastpar": __version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
