"""Bytes of whole gradients that are alive while backward goes through a GPT.

The engine's rules are simulated on the buckets of a model that need not exist. A bucket has memory
from the first gradient that is copied into it until its reduction is waited for; the engine waits
for the oldest one when reducer.too_many_in_flight() says so. At stages 0 and 1 gradients have their
place anyway, but a wire of another format needs a copy until the end of backward. At stage 3 whole
parameters come a unit ahead of its backward, and go bucket by bucket as gradients are complete.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import NamedTuple

from fastpar.cost.buckets import ROOT, GPTBuckets
from fastpar.parallel.reducer import too_many_in_flight

# Moments of a block's backward: when it begins; while the gradients of c_proj, those of c_fc, those
# from there to c_attn's are copied into their buckets; the rest.
N_MOMENTS = 5
_MOMENT_OF = (1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4)  # of a block's gradients, as they arrive


class GradientFlow(NamedTuple):
    """Bytes alive at a time.

    Attributes:
        at_loss: before backward.
        in_blocks: for each moment, (blocks whose activations are still there, the most bytes then,
            with the parameters of gathered units) without those that another pair exceeds in both.
        at_embedding: before its gradients are there.
        at_table: when they are copied into their bucket.
        at_end: when that is sent.
    """

    at_loss: int
    in_blocks: tuple[tuple[tuple[int, int], ...], ...]
    at_embedding: int
    at_table: int
    at_end: int


@functools.lru_cache(maxsize=4096)
def gradient_flow(
    buckets: GPTBuckets,
    *,
    stage: int,
    reduces: bool,
    bucket_mb: float,
    wire_bytes: int,
    sum_bytes: float,
    copies: bool,
    whole: bool,
    gathered_bytes: int = 0,
) -> GradientFlow:
    """Simulate one backward that reduces.

    Args:
        wire_bytes: of an element on the wire where it is another format, else 0.
        sum_bytes: of an element of a bucket, for the shard of its sum where that is added to an
            earlier one; with copies (of shards, in other groups) it stays to the end of backward.
            At stage 1 the earlier sum is put aside, from the first gradient on.
        whole: earlier micro-batches have left all gradients there.
        gathered_bytes: of an element that is gathered for backward.
    """
    backward = _Backward(buckets, stage, reduces, bucket_mb)
    backward.alive_bytes = buckets.grad_bytes if stage >= 2 else sum_bytes
    added_bytes = sum_bytes if stage >= 2 else 0.0
    backward.launch_bytes = wire_bytes + added_bytes
    backward.finish_bytes = wire_bytes + (0.0 if copies else added_bytes)
    backward.gathered_bytes = gathered_bytes
    if whole:
        for index in range(len(buckets.layout.buckets)):
            backward.allocate(index)
    at_loss = backward.now
    arrival = iter(buckets.arrival)
    for _ in range(2 * buckets.last):  # the last norm
        backward.take(next(arrival))
    if buckets.last and not buckets.first:  # the head's table; none of the embedding is added
        backward.take(buckets.arrival[-1])
    found: tuple[list[tuple[int, int]], ...] = tuple([] for _ in range(N_MOMENTS))
    for left in range(buckets.n_layers, 0, -1):
        block = [next(arrival) for _ in _MOMENT_OF]
        backward.enter(block[0])
        tops = [backward.now, *[0] * (N_MOMENTS - 1)]
        for moment, index in zip(_MOMENT_OF, block):
            backward.top = backward.now
            backward.take(index)
            tops[moment] = max(tops[moment], backward.top)
        for pairs, top in zip(found, tops):
            if not pairs or top > pairs[-1][1]:
                pairs.append((left, top))
    backward.free_complete()
    at_embedding = backward.now
    if not buckets.first:
        return GradientFlow(at_loss, tuple(map(tuple, found)), *[at_embedding] * 3)
    *positions, table = arrival
    for index in positions:
        backward.take(index)
    backward.allocate(table)
    at_table = backward.now
    backward.take(table)
    return GradientFlow(at_loss, tuple(map(tuple, found)), at_embedding, at_table, backward.top)


class _Backward:
    """Buckets under way, treated as the engine does."""

    def __init__(self, buckets: GPTBuckets, stage: int, reduces: bool, bucket_mb: float) -> None:
        self.stage, self.reduces, self.bucket_mb = stage, reduces, bucket_mb
        self.numel = [bucket.numel for bucket in buckets.layout.buckets]
        self.unit_of = [bucket.unit for bucket in buckets.layout.buckets]
        self.missing = [len(bucket.slots) for bucket in buckets.layout.buckets]
        self.grad_bytes = buckets.grad_bytes
        self.alive_bytes = self.launch_bytes = self.finish_bytes = 0.0  # of an element
        self.gathered_bytes = 0
        self.alive: set[int] = set()
        self.gathered: set[int] = set()
        self.pending: deque[int] = deque()
        self.next = 0  # buckets are launched in order
        self.now = self.top = 0

    def allocate(self, index: int) -> None:
        if index not in self.alive:
            self.alive.add(index)
            self._add(round(self.numel[index] * self.alive_bytes))

    def enter(self, index: int) -> None:
        """A block with this bucket begins: its unit is there, and the one before it is gathered."""
        self.free_complete()
        unit = self.unit_of[index]
        for other, its in enumerate(self.unit_of):
            needed = its in (unit, unit - 1) and its != ROOT and self.missing[other]
            if needed and other not in self.gathered:
                self.gathered.add(other)
                self._add(self.numel[other] * self.gathered_bytes)

    def free_complete(self) -> None:
        """Free gathered parameters that have their gradients."""
        for index in [index for index in self.gathered if not self.missing[index]]:
            self.gathered.discard(index)
            self.now -= self.numel[index] * self.gathered_bytes

    def _add(self, size: int) -> None:
        self.now += size
        self.top = max(self.top, self.now)

    def take(self, index: int) -> None:
        """Copy a gradient into its bucket; launch what is complete and limit what is pending."""
        self.allocate(index)
        self.free_complete()  # a bias completes a bucket after its weight has a place in the next
        self.missing[index] -= 1
        while self.reduces and self.next < len(self.numel) and not self.missing[self.next]:
            self._add(round(self.numel[self.next] * self.launch_bytes))
            self.pending.append(self.next)
            self.next += 1
            while self.stage >= 2 and too_many_in_flight(
                (self.numel[i] * self.grad_bytes for i in self.pending), self.bucket_mb
            ):
                self._finish(self.pending.popleft())

    def _finish(self, index: int) -> None:
        self.alive.discard(index)
        self.now -= round(self.numel[index] * self.alive_bytes)
        self.now -= round(self.numel[index] * self.finish_bytes)
