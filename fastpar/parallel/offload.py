"""The optimizer's state on the host, stepped there under the next forward: bits as without it.

    backward   a bucket's gradients are reduced --down--> host, its memory on the device is free
    step()     the norm's bins were counted on the device: the factor is known, nobody waits
    host       AdamW, bucket by bucket, in the order in which a forward needs them
    forward    weights --up--> device, each unit waits for its own buckets

The optimizer finds pieces of weights and gradients on the host (BucketState.stepped and .reduced),
so its state is made there, and its kernel for the CPU, which has the bits of that for GPUs, steps
them. Nothing is stale, nothing is guessed, and clipping and loss scales work as ever.

[Note: what crosses the bus] Gradients in the dtype in which they are added up, once a step, and
weights in their own, once a step; offload="parameters": at each gather. What is pinned is what
crosses it; masters and moments stay in ordinary memory of the host.

[Note: several backward passes] Gradients go down when the step's last reduction is over, so
grad_accum_steps must be told where backward passes add up. Where another comes all the same they
are brought back: the same bits, but the bus is crossed three times.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.bus import Bus
from fastpar.comm.handles import FutureHandle, Handle, TaskThread
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins
from fastpar.parallel.bucket import BucketState
from fastpar.parallel.shards import Shards

MODES = ("optimizer", "parameters")
IN_FLIGHT = 3  # buckets whose gradients may be on their way down
_STATE_BYTES = 12  # of a parameter: fp32 master and moments


class Offload:
    """The host's side of one engine.

    Args:
        order: buckets in the order in which a forward needs them.
        mode: "optimizer", or "parameters" where shards of the weights lie on the host too.
        keep_mb: the first buckets, up to so many MiB of state, stay on the device.
        poison: gradients on the host are nan once they are used.
    Attributes:
        grads: [S] gradients of each bucket on the host.
    Raises:
        ValueError: keep_mb of a whole model or more; too little memory on the host.
    """

    def __init__(
        self,
        shards: Shards,
        order: Sequence[BucketState],
        bus: Bus,
        mode: str,
        keep_mb: float,
        *,
        poison: bool,
    ) -> None:
        self._shards, self._bus, self.mode, self._poison = shards, bus, mode, poison
        order, kept = list(order), 0.0
        total = sum(map(_state_bytes, order)) / 2**20
        if keep_mb >= total:
            raise ValueError(
                f"parallelize: expected offload_keep_mb below {total:.1f}, the MiB of this "
                f"rank's optimizer state, got {keep_mb:g}; leave offload out to keep all of it"
            )
        while (kept := kept + _state_bytes(order[0]) / 2**20) <= keep_mb:
            order.pop(0)
        self.order, self.grads = order, dict[BucketState, Tensor]()
        _check_memory(order, shards.mesh.world_size if bus.pins else 1)
        for bucket in order:
            bucket.stepped = bus.memory(bucket.spec.shard_numel, bucket.spec.dtype)
            self.grads[bucket] = bus.memory(bucket.spec.shard_numel, bucket.grad_dtype)
            bucket.stepped.copy_(bucket.shard)
            if mode == "parameters":
                bucket.shard = bucket.stepped
            if bucket.stage.frees_gradients:
                bucket.grad_shard = None
            bucket.host = self
        self._summed_late = {
            bucket
            for bucket in order
            for p in bucket.params
            if (shards.declared is not None and shards.declared.is_partial(p))
            or (shards.stages is not None and p in shards.stages.tied)
        }
        self._thread = TaskThread()
        self._thread.end_with(self)
        self._down: dict[BucketState, Handle] = {}
        self._in_flight: deque[Handle] = deque()
        self._bins: dict[BucketState, Tensor] = {}
        self._stepping: dict[BucketState, tuple[FutureHandle, list[Handle]]] = {}
        self._threads = 0
        self._busy_s = self._touched = 0.0

    # Gradients

    @torch.no_grad()
    def send(self, bucket: BucketState) -> None:
        """Its gradients of this step are final: they go down; the device's memory is free then."""
        grads = self.grads[bucket]
        if bucket.reduced is None or bucket.reduced is grads or bucket in self._summed_late:
            return
        self._send(bucket)

    def _send(self, bucket: BucketState) -> None:
        self.finish(bucket)
        source, grads = bucket.reduced, self.grads[bucket]
        assert source is not None
        self._bins[bucket] = self._bins_of(bucket, range(len(bucket.params)))
        if not bucket.stage.frees_gradients:  # the next backward writes there
            source = source.clone()
        handle = self._down[bucket] = self._bus.down(grads, source)
        bucket.reduced, bucket.grad_shard = grads, None
        self._in_flight.append(handle)
        while len(self._in_flight) > IN_FLIGHT:
            with self._shards.log.timer.waiting(offload=True):
                self._bus.arrived(self._in_flight.popleft())

    def send_rest(self) -> None:
        """Before a step: what was not sent when it was reduced."""
        for bucket in self.order:
            if bucket.reduced is not None and bucket.reduced is not self.grads[bucket]:
                self._send(bucket)

    def bring_back(self, bucket: BucketState) -> None:
        """More is added to its gradients: see [Note: several backward passes]."""
        grads = self.grads[bucket]
        if bucket.reduced is grads:
            self._arrived(bucket)
            bucket.reduced = torch.empty_like(grads, device=bucket.device, pin_memory=False)
            self._bus.up(bucket.reduced, grads).wait()

    def _arrived(self, bucket: BucketState) -> None:
        if (handle := self._down.get(bucket)) is not None:
            self._bus.arrived(handle)
            handle.wait()
            del self._down[bucket]

    def settle(self, buckets: Iterable[BucketState] | None = None) -> None:
        """What is on the host may be read and written: nothing is under way."""
        for bucket in self.order if buckets is None else buckets:
            self._arrived(bucket)
            self.finish(bucket)

    def touch(self, bucket: BucketState) -> None:
        """Somebody is about to write into its gradients on the host."""
        self.settle([bucket])
        self._bins.pop(bucket, None)

    def _bins_of(self, bucket: BucketState, positions: Iterable[int]) -> Tensor:
        """Of some of its gradients, where they are now."""
        assert bucket.reduced is not None
        pieces = [(bucket.piece(i)[1], self._shards.counts(bucket.params[i])) for i in positions]
        found = [(grad, counts) for grad, counts in pieces if grad is not None and grad.numel()]
        none = torch.zeros(NORM_WORDS, dtype=torch.int64, device=bucket.reduced.device)
        return norm_bins([g for g, _ in found], counted=[c for _, c in found], out=none)

    def norm_bins(self, params: set[Tensor]) -> Tensor:
        """The bins of these parameters' gradients on this rank, on the device.

        They were counted there as gradients went down; of a bucket that has other parameters too
        they are counted on the host.
        """
        device = self._shards.mesh.device
        total = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
        for bucket in self._shards.buckets:
            mine = [i for i, p in enumerate(bucket.params) if p in params]
            if bucket.reduced is None or not mine:
                continue
            bins = self._bins.get(bucket)
            if bins is None or len(mine) < len(bucket.params):
                self._arrived(bucket)
                bins = self._bins_of(bucket, mine)
            total += bins.to(device)
        return total

    # The step

    def step(
        self, optimizer: Any, rows: list[Any], factor: Tensor | None, found: Tensor | None
    ) -> list[Any]:
        """Begin the host's step of its rows; returns the others, which are the device's.

        Waits for the device only under a loss scale, to know whether the step is skipped.
        """
        places = self._shards.places
        of: dict[BucketState, list[Any]] = {bucket: [] for bucket in self.order}
        others: list[Any] = []
        for row in rows:
            bucket = places[row.param][0] if row.engine is not None else None
            mine = bucket is not None and row.engine.shards is self._shards
            (of[bucket] if mine and bucket in of else others).append(row)
        sent = None
        if factor is not None:
            host = torch.empty((), dtype=factor.dtype, pin_memory=self._bus.pins)
            sent, factor = self._bus.down(host, factor), host
        if found is not None and found.item() != 0:
            for bucket in self.order:
                self._arrived(bucket)
            return others
        self._busy_s = self._touched = 0.0
        for bucket in self.order:
            if of[bucket]:
                self._begin(
                    bucket, of[bucket], optimizer.prepare(of[bucket], factor), sent, optimizer
                )
        return others

    def _begin(
        self,
        bucket: BucketState,
        rows: list[Any],
        calls: list[Callable[[], None]],
        factor: Handle | None,
        optimizer: Any,
    ) -> None:
        ups: list[Handle] = []
        down = self._down.pop(bucket, None)
        states = [x for row in rows for x in optimizer.state[row.param].values()]
        touched = 2 * sum(x.nbytes for x in states if isinstance(x, Tensor))
        touched += sum(2 * row.piece.nbytes + row.grad.nbytes for row in rows)

        def run() -> None:
            self._use_cores()
            for handle in (down, factor):
                if handle is not None:
                    self._bus.arrived(handle)
            begin = time.perf_counter()
            with torch.inference_mode(False), torch.no_grad():
                for call in calls:
                    call()
                for row in rows if self._poison else ():
                    row.grad.fill_(float("nan"))
            self._busy_s += time.perf_counter() - begin
            self._touched += touched
            if bucket.shard is not bucket.stepped:
                with self._bus.beside():
                    ups.append(self._bus.up(bucket.shard, bucket.stepped))

        future: Future = Future()
        self._thread.put((future, run, (), ()))
        handle = FutureHandle("the host's optimizer step", future, self)
        self._stepping[bucket] = handle, ups

    def finish(self, bucket: BucketState) -> None:
        """Its new weights are on their way up, which the current stream waits for."""
        if bucket in self._stepping:
            handle, ups = self._stepping.pop(bucket)
            with self._shards.log.timer.waiting(offload=True):
                handle.wait()
                for up in ups:
                    up.wait()

    def values(self, bucket: BucketState) -> Tensor:
        """Its newest weights on the device: where its slice of the whole is, or its shard."""
        self.finish(bucket)
        if bucket.shard is not bucket.stepped:
            return bucket.shard
        part = bucket.flat[bucket.own]
        with self._shards.log.timer.waiting(offload=True):
            self._bus.up(part, bucket.stepped).wait()
        return part

    def _use_cores(self) -> None:
        """On a GPU's host: the thread of this engine steps on a share of the cores."""
        if self._threads or not self._bus.pins:
            return
        cores = sorted(os.sched_getaffinity(0))
        local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._threads = max(1, len(cores) // local - 1)
        torch.set_num_threads(self._threads)

    # Reports

    def memory(self) -> dict[str, int]:
        """Bytes on the host, without the optimizer's state."""
        weights = sum(b.stepped.nbytes for b in self.order)
        return {
            "host weights": weights,
            "host gradients": sum(g.nbytes for g in self.grads.values()),
        }

    def describe(self) -> str:
        """One line: what is where, with which threads, and how fast the last step was."""
        rate = f"{self._touched / self._busy_s / 1e9:.1f} GB/s" if self._busy_s else "no step yet"
        threads = self._threads or torch.get_num_threads()
        return (
            f"offload: {self.mode} on the host, {len(self.order)} of "
            f"{len(self._shards.buckets)} buckets, {threads} threads{_numa()}, {rate}"
        )


def _state_bytes(bucket: BucketState) -> int:
    return bucket.spec.shard_numel * _STATE_BYTES


def _numa() -> str:
    """The NUMA node of this thread's cores, where the host tells one."""
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    mine = os.sched_getaffinity(0)
    names = [n.parent.name[4:] for n in nodes if mine & _cores(n.read_text().strip())]
    return f" on NUMA node {', '.join(sorted(names))}" if names else ""


def _cores(text: str) -> set[int]:
    ranges = [part.split("-") for part in text.split(",") if part]
    return {core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)}


def host_bytes(numel: int, weight: int, gradient: int) -> int:
    """On the host, of a rank that steps numel elements: fp32 master and moments, what is pinned."""
    return numel * (_STATE_BYTES + weight + gradient)


def _check_memory(order: Sequence[BucketState], ranks: int) -> None:
    local = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    each = [
        host_bytes(b.spec.shard_numel, b.spec.dtype.itemsize, b.grad_dtype.itemsize) for b in order
    ]
    needed, lines = sum(each) * local, Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if needed > free:
        raise ValueError(
            f"parallelize: expected {needed / 1e9:.1f} GB of free memory on the host for offload "
            f"by {local} ranks, got {free / 1e9:.1f} GB; share the state among more hosts, keep "
            "some on the GPU (offload_keep_mb), or use bf16 moments"
        )
