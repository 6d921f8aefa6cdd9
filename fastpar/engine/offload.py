"""The optimizer's state on the host, stepped there under the next forward: bits as without it.

    backward   a bucket's gradients are reduced --down--> host, its memory on the device is free
    step()     the norm's bins were counted on the device: the factor is known, nobody waits
    host       AdamW, bucket by bucket, in the order in which a forward needs them
    forward    weights --up--> device, each unit waits for its own buckets

The optimizer finds pieces of weights and gradients on the host, so its state is made there, and its
kernel for the CPU, which has the bits of that for GPUs, steps them. Nothing is stale, nothing is
guessed, and clipping and loss scales work as ever.

[Note: who waits for whom] The host steps nothing before the device has done all that it was given
before step(): until then a forward (of an evaluation, say) may read the old weights, on the device
or over the bus. So a copy up waits for no computation, and a gather that follows it runs in the
bus's stream, beside the forward that is there already. A forward waits for both at its unit.

[Note: what crosses the bus] Gradients in the dtype in which they are added up, once a step, and
weights in their own, once a step; offload="parameters": at each gather. What is pinned is what
crosses it; masters and moments stay in ordinary memory of the host. At stage 0 gradients stay in
p.grad, too: what was written there since they went down goes down again before a step.

[Note: several backward passes] Gradients go down when the step's last reduction is over, so
grad_accum_steps must be told where backward passes add up. Where another comes all the same they
are brought back: the same bits, but the bus is crossed three times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from fastpar.comm.bus import Bus, SlowBus
from fastpar.comm.handles import DONE, FutureHandle, Handle, TaskThread, started
from fastpar.comm.host import HostCores, check_host_memory, pinned_bytes
from fastpar.engine.bucket import BucketState
from fastpar.engine.debug import Debug
from fastpar.engine.engine import Engine
from fastpar.engine.shards import Shards
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins

IN_FLIGHT = 3  # buckets whose gradients may be on their way down


class Offload:
    """The host's side of one engine.

    Args:
        order: buckets in the order in which a forward needs them.
        mode: "optimizer", or "parameters" where shards of the weights lie on the host too.
        keep_mb: the first buckets, up to so many MiB of state, stay on the device.
        poison: nan are gradients on the host before they are there and once they are used, and
            weights on the device until the new ones are there.
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
                f"parallelize: expected offload_keep_mb below {total:.3g}, the MiB of this "
                f"rank's optimizer state, got {keep_mb:g}; leave offload out to keep all of it"
            )
        while (kept := kept + _state_bytes(order[0]) / 2**20) <= keep_mb:
            order.pop(0)
        self.order, self.grads = order, dict[BucketState, Tensor]()
        sizes = [(_state_bytes(bucket), _host_bytes(bucket, bus.pinned)) for bucket in order]
        check_host_memory(sizes, bus.n_ranks(shards.mesh.world_size))
        for bucket in order:
            bucket.stepped = bus.memory(bucket.spec.shard_numel, bucket.spec.dtype)
            self.grads[bucket] = bus.memory(bucket.spec.shard_numel, bucket.grad_dtype)
            bucket.stepped.copy_(bucket.shard)
            if mode == "parameters":
                bucket.shard = bucket.stepped
            if bucket.stage.frees_gradients:
                bucket.grad_shard = None
            if poison:
                self.grads[bucket].fill_(float("nan"))
            bucket.host = self
        self._summed_late = {
            bucket
            for bucket in order
            for p in bucket.params
            if (shards.declared is not None and shards.declared.is_partial(p))
            or (shards.stages is not None and p in shards.stages.tied)
        }
        self._thread, self._cores = TaskThread(), HostCores()
        self._thread.end_with(self)
        self._down: dict[BucketState, Handle] = {}
        self._in_flight: deque[Handle] = deque()
        self._bins: dict[BucketState, Tensor] = {}
        self._sent: dict[BucketState, int] = {}  # stage 0: version of the gradients that went down
        self._stepping: dict[BucketState, FutureHandle] = {}
        self._ups: dict[BucketState, list[Handle]] = {}  # that nobody has waited for
        self._reads: dict[BucketState, Handle] = {}  # the last copy of weights that lie here
        self._busy_s = self._touched = 0.0

    # Gradients

    @torch.no_grad()
    def send(self, bucket: BucketState) -> None:
        """Its gradients of this step are final: they go down; the device's memory is free then."""
        if bucket.reduced is not None and bucket not in self._summed_late:
            self._send(bucket)

    def _send(self, bucket: BucketState) -> None:
        source, grads = bucket.reduced, self.grads[bucket]
        if not bucket.stage.shards:
            source = bucket.grad
            if source is None or self._sent.get(bucket) == source._version:
                return
            self._sent[bucket] = source._version
        if source is None or source is grads:
            return
        self.finish(bucket)
        self._bins[bucket] = self._bins_of(bucket, range(len(bucket.params)))
        if not bucket.stage.frees_gradients:  # the next backward writes there
            source = source.clone()
        handle = self._down[bucket] = self._bus.down(grads, source)
        if bucket.stage.shards:
            bucket.keep_on_host(grads)
        self._in_flight.append(handle)
        del source
        while len(self._in_flight) > IN_FLIGHT:
            with self._shards.log.timer.waiting(offload=True):
                self._bus.arrived(self._in_flight.popleft())

    @torch.no_grad()
    def send_rest(self) -> None:
        """Before a step: what was not sent when it was reduced, or was written by hand since."""
        for bucket in self.order:
            for position in () if bucket.stage.shards else range(len(bucket.params)):
                bucket.check_given(position)
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
        grad_of = (lambda i: bucket.piece(i)[1]) if bucket.stage.shards else bucket.grad_of
        pieces = [(grad_of(i), self._shards.counts(bucket.params[i])) for i in positions]
        found = [(grad, counts) for grad, counts in pieces if grad is not None and grad.numel()]
        device = found[0][0].device if found else bucket.device
        none = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
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
            if not mine or (bucket.reduced is None and bucket.stage.shards):
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
            mine = row.engine is not None and row.engine.shards is self._shards
            bucket, position = places[row.param] if mine else (None, 0)
            if bucket not in of:
                others.append(row)
                continue
            if not bucket.stage.shards:  # whose gradients for all others are on the device
                row = row._replace(grad=bucket.slot_of(self.grads[bucket], position))
            of[bucket].append(row)
        if found is not None and found.item() != 0:
            for bucket in self.order:
                self._arrived(bucket)
            return others
        for bucket in self.order if self._poison else ():
            if of[bucket] and bucket.shard is not bucket.stepped:
                bucket.shard.fill_(float("nan"))
        # Behind all that the device was given: see [Note: who waits for whom].
        zero = torch.zeros((), device=self._shards.mesh.device, dtype=torch.float32)
        host = self._bus.memory(1, torch.float32).view(())
        sent = self._bus.down(host, zero if factor is None else factor)
        factor = None if factor is None else host
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
        sent: Handle,
        optimizer: Any,
    ) -> None:
        ups: list[Handle] = []
        down = self._down.pop(bucket, None)
        self._sent.pop(bucket, None)
        states = [x for row in rows for x in optimizer.state[row.param].values()]
        touched = 2 * sum(x.nbytes for x in states if isinstance(x, Tensor))
        touched += sum(2 * row.piece.nbytes + row.grad.nbytes for row in rows)

        def run() -> None:
            if self._bus.has_gpu:
                self._cores.take()
            for handle in (sent, down):
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
                with self._bus.behind():
                    ups.append(self._bus.up(bucket.shard, bucket.stepped))

        future: Future = Future()
        self._thread.put((future, run, (), ()))
        self._ups[bucket] = ups
        self._stepping[bucket] = FutureHandle("the host's optimizer step", future, self)

    def _await_step(self, bucket: BucketState) -> None:
        """The host has stepped it; an error of the host's thread is raised here, each time."""
        if bucket in self._stepping:
            self._stepping[bucket].wait()
            del self._stepping[bucket]

    def gather(self, bucket: BucketState) -> Handle:
        """Begin to make its parameters whole. They are after finish() and this handle's wait()."""
        group, own, index = bucket.groups.gather, bucket.shard, bucket.spec.index
        waiting = self._shards.log.timer.waiting
        if bucket.stage.frees_parameters and own is not bucket.stepped:
            self.finish(bucket)  # memory of the device that is filled was just made there
            assert group is not None
            return started(group.all_gather(bucket.flat, own, async_op=True, tag=index))
        with waiting(offload=True):
            self._await_step(bucket)
        ups = self._ups.setdefault(bucket, [])
        if own is bucket.stepped:
            own = bucket.flat[bucket.own]
            self._reads[bucket] = self._bus.up(own, bucket.stepped)
            ups.append(self._reads[bucket])
        if group is None or group.world_size == 1:  # the rank's own is the whole
            return DONE
        with waiting(offload=True), self._bus.behind(ups):
            return started(group.all_gather(bucket.flat, own, async_op=True, tag=index))

    def finish(self, bucket: BucketState) -> None:
        """Its new weights are on their way up, which the current stream waits for."""
        if bucket in self._stepping or self._ups.get(bucket):
            with self._shards.log.timer.waiting(offload=True):
                self._await_step(bucket)
                for up in self._ups.pop(bucket):
                    up.wait()

    def write_weights(self, bucket: BucketState) -> None:
        """Somebody is about to write its weights on the host: no copy reads them any more."""
        self.finish(bucket)
        if (read := self._reads.pop(bucket, None)) is not None:
            self._bus.arrived(read)

    # Reports

    def memory(self) -> dict[str, int]:
        """Bytes on the host, without the optimizer's state."""
        weights = sum(b.stepped.nbytes for b in self.order)
        return {
            "host weights": weights,
            "host gradients": sum(g.nbytes for g in self.grads.values()),
        }

    def describe(self) -> str:
        """What is where, with which threads, and how fast the last step was; waits for it."""
        self.settle()
        rate = f"{self._touched / self._busy_s / 1e9:.1f} GB/s" if self._busy_s else "no step yet"
        return (
            f"{self.mode} on the host, {len(self.order)} of "
            f"{len(self._shards.buckets)} buckets, {self._cores.describe()}, {rate}"
        )


def _state_bytes(bucket: BucketState) -> int:
    return bucket.spec.shard_numel * state_bytes(bucket.spec.dtype.itemsize)


def _host_bytes(bucket: BucketState, pinned: bool) -> int:
    crosses = [bucket.spec.shard_numel * d.itemsize for d in (bucket.spec.dtype, bucket.grad_dtype)]
    return _state_bytes(bucket) + sum(map(pinned_bytes, crosses) if pinned else crosses)


def state_bytes(weight: int) -> int:
    """Of an element, in AdamW's usual formats: two moments, and a master of what has 16 bits."""
    return 2 * max(4, weight) + 4 * (weight == 2)


def keep_on_host(engine: Engine, debug: Debug) -> None:
    """The optimizer's state lies on the host, where that is asked for."""
    asked, shards = engine.settings.asked.offload, engine.shards
    if asked.what is None or engine.gathers is None:
        return
    device = shards.mesh.device
    bus = SlowBus(debug.bus_gb_s) if debug.bus_gb_s else Bus(device, pinned=asked.pinned)
    order = [bucket for unit in engine.gathers.buckets for bucket in reversed(unit)]
    shards.offload = Offload(shards, order, bus, asked.what, asked.keep_mb, poison=debug.poison)
