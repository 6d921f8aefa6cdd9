"""Rates from data sheets: what a device reaches of its peaks, by a few rules with few constants.

    matmul      max(flops / (peak * reached * tiles * depth), bytes / (bandwidth * streamed))
    attention   flops / (peak * reached * a fraction of its own)
    others      bytes / (bandwidth * streamed)

each plus what a launch costs, and at least what the host needs to issue it.

[Note: constants] `reached` is what a large product with random data reaches of the sheet's peak: on
A100 about 250 of 312 TFLOP/s, on H100 about 650 of 989, because power caps its clock and memory
feeds a tensor unit that grew faster. It was set with the published runs of
bench/peers/published.py in view, like the fractions of attention; the same numbers hold for all of
a device's rows there.
[Note: tiles] A product is cut into tiles of its output; each multiprocessor has one, so that the
last wave is partly empty, and a small tile reads more for what it computes. Of TILES that which
wastes least counts, as libraries choose; a long inner dimension can be cut too (split K).
[Note: depth] The beginning and end of a tile's loop cost as much as DEPTH elements of it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.files.dtypes import DTYPES
from fastpar.predict.devices import Cluster
from fastpar.predict.matrix_updates import STEPS
from fastpar.predict.network import Network

# Output tiles of a multiprocessor, and the part of the best tile's speed that they have.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.82), (64, 64, 0.66))
DEPTH = 64
SPLIT_K = (1, 2, 4, 8)
# Of products in 8 bits: 2 on paper; published layers of 1664 features reach 1.38, casts included.
FP8_SPEED = 1.6
SPLIT_COST = 0.04  # of a product's time for each doubling: parts are added up in fp32


class Generation(NamedTuple):
    """The parts of its peaks that a maker's design reaches; see [Note: constants].

    Attributes:
        reached: by a large product.
        attention: by attention's forward and backward, of what a large product reaches.
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
    # A core with fused kernels: no waves, little memory bandwidth beside the others.
    "cpu": Generation(0.75, (0.45, 0.40), 0.70, 1),
}

LAUNCH_S = {"cuda": 4e-6, "cpu": 5e-6}  # of the device: start and drain of a kernel
HOST_S = {"cuda": 25e-6, "cpu": 0.0}  # Python, autograd and dispatch of an op that is not captured
LAUNCHES = {("matmul", "backward"): 2, ("attention", "backward"): 3, ("layer_norm", "backward"): 2}


class DatasheetRates:
    """Rates of a cluster for one setup's formats.

    Args:
        setup: its dtype says which peak counts.
    """

    def __init__(self, cluster: Cluster, setup: Setup) -> None:
        device = cluster.device
        self.cluster, self.network = cluster, Network(cluster)
        self._kind, self._generation = device.kind, GENERATIONS[device.generation]
        self._item = DTYPES[setup.dtype].itemsize
        self._peak = device.peak_flops if self._item == 2 else device.peak_flops_fp32
        self._stream = device.bytes_per_s * self._generation.streamed
        self._known: dict[Any, float] = {}  # a search asks for the same things again and again

    @property
    def peak_flops(self) -> float | None:
        return self._peak

    @property
    def generation(self) -> str:
        return self.cluster.device.generation

    @property
    def overlap(self) -> float:
        """Collectives take some of a GPU's multiprocessors and of its memory's bandwidth."""
        return 0.0 if self._kind == "cpu" else 0.8

    def overhead_s(self, workload: Workload, setup: Setup) -> float:
        """Data, the log and the optimizer's Python, once a step."""
        return 1e-3

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
            seconds = self._matmul_s(op.shape, direction)
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
            # Below 128 the dimension of a head leaves a part of the tensor units' depth empty.
            speed *= min(1.0, op.shape[-1] / 128) ** 0.25
            seconds = max(op.flops / speed, op.bytes / self._stream)
        else:
            seconds = op.bytes / self._stream
        return max(seconds + launches * LAUNCH_S[self._kind], launches * HOST_S[self._kind])

    def _matmul_s(self, shape: tuple[int, ...], direction: str) -> float:
        m, k, n = shape
        if direction == "forward":
            return self._product_s(m, k, n)
        return self._product_s(m, n, k) + self._product_s(n, m, k)

    def _product_s(self, m: int, k: int, n: int) -> float:
        """Seconds of [m, k] @ [k, n]."""
        speed = self._peak * self._generation.reached
        moved = float(self._item * (m * k + k * n + m * n))
        return max(2.0 * m * k * n / (speed * self.utilization(m, k, n)), moved / self._stream)

    @property
    def has_fp8(self) -> bool:
        """Whether the device multiplies 8-bit floats, twice as many on paper, of bf16 weights."""
        return self._item == 2 and self.generation in ("ada", "hopper", "blackwell")

    def fp8_saves_s(self, m: int, k: int, n: int) -> float:
        """Seconds that x[m, k] @ w[n, k].T saves in a step with fp8, scales of rows, less than 0
        if it costs: two of three products are faster; x and dy are read and written as codes, the
        weight twice, and x's values are made for the third."""
        products = self._product_s(m, k, n) + self._product_s(m, n, k)
        moved = (self._item + 1) * (2 * m * k + m * n + 2 * n * k)
        return products * (1 - 1 / FP8_SPEED) - moved / self._stream - 5 * LAUNCH_S[self._kind]

    def utilization(self, m: int, k: int, n: int) -> float:
        """Part of the multiprocessors that a product uses; see [Note: tiles] and [Note: depth]."""
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
