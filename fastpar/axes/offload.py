"""The optimizer's state on the host, stepped there during the next forward, with the same bits.

    backward   a bucket's gradients are reduced --down--> host; then device memory is freed
    step()     the norm's bins were computed on the device: the factor is known without a wait
    host       AdamW, bucket by bucket, in the order in which a forward needs them
    forward    weights --up--> device, each unit waits for its own buckets

Bytes         the bus carries gradients down and weights up, once a step. The host holds moments and
              masters (state_bytes() per element); of these the device holds keep_mb.
Use it        if the model does not fit otherwise: the step is as fast as the host's memory.
Not with      Adafactor, Muon, tp_grid, wires, node_size, CUDA graphs.
Source: Ren et al. 2021 (ZeRO-Offload), arXiv 2101.06840

The host holds 18 bytes per parameter and rank (bf16, fp32 masters, moments and gradients). On the
GPU stay the weights (with Offload("parameters"), stage 3, those of units in use) and up to
IN_FLIGHT + 1 buckets of gradients; keep_mb keeps the state of the first units there.
engine.report.offload_ms is the time that a step waited. The step's thread has its own cores
(comm/host.py).

The optimizer gets pieces of weights and gradients in host memory, so its state is created there,
and its CPU kernel, which has the bits of the GPU's, steps them. No weights are stale, and clipping
and loss scales work as usual.

Order of copies: the host steps nothing before the device has finished the work queued before
step(): until then a forward (of an evaluation, say) may read the old weights, on the device or over
the bus. So a copy up waits for no computation, and a gather after it runs in the bus's stream,
concurrently with the present forward. A forward waits for both at its unit.

Gradients cross the bus once a step, in the dtype in which they are accumulated; weights once a step
in their own, with Offload("parameters") at each gather. Only memory that crosses the bus is pinned.
At stage 0 gradients stay in p.grad, too: gradients written after the copy are copied again before a
step.

Gradients go down after the step's last reduction, so pass grad_accum_steps if backward passes
accumulate. If another backward follows anyway, they are copied back: the same bits, but three
crossings of the bus.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fastpar.axes import Axis, Making
from fastpar.axes.data import buckets_of
from fastpar.axes.step import Setup, Workload
from fastpar.comm.collectives import DONE, Collectives, FutureHandle, Handle, TaskThread, started
from fastpar.comm.host import Bus, HostCores, SlowBus, check_host_memory, pinned_bytes
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import CollectiveLog
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins
from fastpar.settings import parallel as settings
from fastpar.sharding.layout import Bucket

IN_FLIGHT = 3  # buckets whose gradients may be in flight to the host


def can_offload(setup: Setup) -> bool:
    """Whether device and optimizer support offload."""
    return setup.device_type == "cuda" and setup.optim.optimizer == "adamw"


def going_down(setup: Setup, buckets: Any) -> float:
    """Bytes of reduced gradients in flight to the host; those of earlier micro-batches stay."""
    if setup.parallel.offload.what is None:
        return 0.0
    whole = buckets.grad_bytes * buckets.elements / setup.n_shards
    if setup.grad_accum_steps > 1 and setup.accumulate == "shard":
        return float(whole)
    return min(whole, (IN_FLIGHT + 1) * setup.bucket_bytes / setup.n_shards)


class Offloaded(Axis):
    """State of a rank on its host."""

    name = "offload"
    order = 80
    place = 7

    def plan(self, making: Making) -> None:
        what, on_cpu = making.parallel.offload.what, making.mesh.device.type == "cpu"
        if what is not None and on_cpu and not making.debug.bus_gb_s:
            raise ValueError(
                f"parallelize: offload={what!r} needs a GPU, got device=cpu; do not use it on a "
                "CPU, or try it with a simulated bus, debug=Debug(bus_gb_s=12)"
            )

    def attach(self, making: Making, engine: Any) -> None:
        """Move the optimizer's state to the host, if requested."""
        if making.parallel.offload.what is None:
            return
        offload, shards, debug = making.parallel.offload, engine.shards, engine.debug
        slow, device = debug.bus_gb_s, making.mesh.device
        bus = SlowBus(slow) if slow else Bus(device, pinned=offload.pinned)
        shards.storage = Offload(
            shards.buckets,
            offload,
            bus,
            making.mesh,
            shards.log,
            counts=shards.counts,
            summed_late=shards.summed_late,
            poison=debug.poison,
        )

    def states(self, setup: Setup, buckets: Any, sizes: dict[str, float]) -> None:
        """On the host: state, gradients if the stage frees them, parameters if requested."""
        offload = setup.parallel.offload
        if offload.what is not None:
            sizes["optimizer"] = min(sizes["optimizer"], offload.keep_mb * 2**20)
            sizes["gradients"] *= setup.stage < 2
            sizes["parameters"] *= offload.what != "parameters"

    def describe(self, shards: Any) -> Iterable[str]:
        return [f"offload: {shards.storage.describe()}"] if shards.storage.steps_later else ()

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        for what in (None, "optimizer", "parameters") if can_offload(setup) else (None,):
            yield setup.change(offload=what)

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return (setup.parallel.offload.what,)

    def note(self, setup: Setup) -> str:
        what = setup.parallel.offload.what
        return "" if what is None else f"{what} on the host"

    def host_bytes(self, workload: Workload, setup: Setup) -> float:
        """State, and pinned memory for the bus."""
        if setup.parallel.offload.what is None:
            return 0.0
        each = setup.state_bytes + setup.weight_bytes + setup.grad_bytes
        return stepped_elements(workload, setup) * each


AXIS = Offloaded()


class State(Protocol):
    """The part of a bucket that this file uses: see engine/bucket.py."""

    spec: Bucket
    params: list[nn.Parameter]
    stage: Any
    groups: Any
    own: slice
    device: torch.device
    grad_dtype: torch.dtype
    flat: Tensor
    shard: Tensor
    stepped: Tensor
    grad: Tensor | None
    grad_shard: Tensor | None
    reduced: Tensor | None
    storage: Any

    def all_pieces(self) -> list[Any]:
        """An engine.bucket.Piece of each parameter."""

    def slot_of(self, whole: Tensor | None, position: int) -> Tensor:
        """A parameter's slice of whole parameters or gradients."""

    def check_given(self, position: int) -> None:
        """Refuse a p.grad that no backward produced."""

    def keep_on_host(self, grads: Tensor) -> None:
        """Take reduced gradients on the host."""


class Offload:
    """The host's side of one engine, the storage of its buckets: see engine/bucket.py.

    Args:
        buckets: of the engine; those of a unit are needed last to first.
        counts: whether this rank's piece of a parameter counts in sums over the model.
        summed_late: whether a parameter's gradient changes after its reduction.
        offload: Offload.what is "optimizer", or "parameters" to keep shards of the weights on the
            host too; keep_mb: the first buckets, up to so many MiB of state, stay on the device.
        poison: gradients on the host are nan until they arrive, as are weights on the device. A
            second step without a backward takes the same gradients again, as in plain PyTorch.
    Attributes:
        grads: [S] gradients of each bucket on the host.
    Raises:
        ValueError: keep_mb of a whole model or more; too little memory on the host.
    """

    steps_later = True

    def __init__(
        self,
        buckets: Sequence[State],
        offload: settings.Offload,
        bus: Bus,
        mesh: Mesh,
        log: CollectiveLog,
        *,
        counts: Callable[[Tensor], bool],
        summed_late: Callable[[Tensor], bool],
        poison: bool,
    ) -> None:
        self._buckets, self._bus, self.where, self._poison = buckets, bus, offload.what, poison
        self._device, self._counts, self._waiting = mesh.device, counts, log.timer.waiting
        keep_mb, kept = offload.keep_mb, 0.0
        order = sorted(buckets, key=lambda bucket: (bucket.spec.unit, -bucket.spec.index))
        total = sum(map(_state_bytes, order)) / 2**20
        if keep_mb >= total:
            raise ValueError(
                f"parallelize: expected offload_keep_mb below {total:.3g}, the MiB of this "
                f"rank's optimizer state, got {keep_mb:g}; drop offload to keep all of it"
            )
        while (kept := kept + _state_bytes(order[0]) / 2**20) <= keep_mb:
            order.pop(0)
        self.order, self.grads = order, dict[State, Tensor]()
        sizes = [(_state_bytes(bucket), _host_bytes(bucket, bus.pinned)) for bucket in order]
        check_host_memory(sizes, bus.n_ranks(mesh.world_size))
        for bucket in order:
            bucket.stepped = bus.memory(bucket.spec.shard_numel, bucket.spec.dtype)
            self.grads[bucket] = bus.memory(bucket.spec.shard_numel, bucket.grad_dtype)
            bucket.stepped.copy_(bucket.shard)
            if offload.what == "parameters":
                bucket.shard = bucket.stepped
            if bucket.stage.frees_gradients:
                bucket.grad_shard = None
            if poison:
                self.grads[bucket].fill_(float("nan"))
            bucket.storage = self
        self._summed_late = {b for b in order if any(map(summed_late, b.params))}
        self._places = {p: (b, i) for b in order for i, p in enumerate(b.params)}
        self._thread, self._cores = TaskThread(), HostCores()
        self._thread.end_with(self)
        self._down: dict[State, Handle] = {}
        self._in_flight: deque[Handle] = deque()
        self._bins: dict[State, Tensor] = {}
        self._sent: dict[State, int] = {}  # stage 0: version of the gradients that were copied
        self._stepping: dict[State, FutureHandle] = {}
        self._ups: dict[State, list[Handle]] = {}  # not awaited yet
        self._reads: dict[State, Handle] = {}  # the last copy of weights in host memory
        self._busy_s = self._touched = 0.0

    # Gradients

    @torch.no_grad()
    def send(self, bucket: State) -> None:
        """Copy the final gradients of a step down; device memory is free then."""
        if bucket.reduced is not None and bucket not in self._summed_late:
            self._send(bucket)

    def _send(self, bucket: State) -> None:
        source, grads = bucket.reduced, self.grads[bucket]
        if not bucket.stage.shards:
            source = bucket.grad
            if source is None or self._sent.get(bucket) == source._version:
                return
            self._sent[bucket] = source._version
        if source is None or source is grads:
            return
        self.await_weights(bucket)
        if bucket.stage.shards:  # at stage 0 not every gradient is in its p.grad yet
            self._bins[bucket] = self._bins_of(bucket, range(len(bucket.params)))
        if not bucket.stage.frees_gradients:  # the next backward writes there
            source = source.clone()
        if self._poison:
            grads.fill_(float("nan"))
        handle = self._down[bucket] = self._bus.down(grads, source)
        if bucket.stage.shards:
            bucket.keep_on_host(grads)
        self._in_flight.append(handle)
        del source
        while len(self._in_flight) > IN_FLIGHT:
            with self._waiting(offload=True):
                self._bus.arrived(self._in_flight.popleft())

    @torch.no_grad()
    def send_rest(self) -> None:
        """Before a step: send what was not sent when it was reduced, or was written since."""
        for bucket in self.order:
            for position in () if bucket.stage.shards else range(len(bucket.params)):
                bucket.check_given(position)
            self._send(bucket)

    def bring_back(self, bucket: State) -> None:
        """Copy gradients back, as more is added to them: see the top of the file."""
        grads = self.grads[bucket]
        if bucket.reduced is grads:
            self._arrived(bucket)
            bucket.reduced = torch.empty_like(grads, device=bucket.device, pin_memory=False)
            self._bus.up(bucket.reduced, grads).wait()

    def _arrived(self, bucket: State) -> None:
        if (handle := self._down.get(bucket)) is not None:
            self._bus.arrived(handle)
            handle.wait()
            del self._down[bucket]

    def settle(self, bucket: State) -> None:
        """Wait until its memory on the host may be read and written."""
        self._arrived(bucket)
        self.await_weights(bucket)

    def touch(self, bucket: State) -> None:
        """Called before its gradients on the host are written."""
        self.settle(bucket)
        self._bins.pop(bucket, None)

    def _bins_of(self, bucket: State, positions: Iterable[int]) -> Tensor:
        """The bins of some of its gradients, on their present device."""
        each = bucket.all_pieces()
        pieces = [(each[i].grad, self._counts(bucket.params[i])) for i in positions]
        present = [(grad, counts) for grad, counts in pieces if grad is not None and grad.numel()]
        device = present[0][0].device if present else bucket.device
        none = torch.zeros(NORM_WORDS, dtype=torch.int64, device=device)
        return norm_bins([g for g, _ in present], counted=[c for _, c in present], out=none)

    def norm_bins(self, params: Iterable[Tensor]) -> Tensor:
        """The bins of these parameters' gradients on this rank, on the device.

        They were computed there before the copy down; if a bucket has other parameters too, they
        are computed on the host. Stage 0 has gradients on the device, and computes them now.
        """
        params = set(params)
        total = torch.zeros(NORM_WORDS, dtype=torch.int64, device=self._device)
        for bucket in self._buckets:
            indices = [i for i, p in enumerate(bucket.params) if p in params]
            if not indices or (bucket.reduced is None and bucket.stage.shards):
                continue
            bins = self._bins.get(bucket)
            if bins is None or len(indices) < len(bucket.params):
                if bucket.stage.shards:
                    self._arrived(bucket)
                bins = self._bins_of(bucket, indices)
            total += bins.to(self._device)
        return total

    # The step

    def step(
        self, optimizer: Any, rows: list[Any], factor: Tensor | None, found_inf: Tensor | None
    ) -> list[Any]:
        """Begin the host's step of its rows; returns the rows that the device steps.

        Waits for the device only with a loss scale, to know whether the step is skipped.
        """
        of: dict[State, list[Any]] = {bucket: [] for bucket in self.order}
        others: list[Any] = []
        for row in rows:
            if row.param not in self._places:
                others.append(row)
                continue
            bucket, position = self._places[row.param]
            if not bucket.stage.shards:  # piece() refers to gradients on the device
                row = row._replace(grad=bucket.slot_of(self.grads[bucket], position))
            of[bucket].append(row)
        if found_inf is not None and found_inf.item() != 0:
            for bucket in self.order:
                self._arrived(bucket)
            return others
        for bucket in self.order if self._poison else ():
            if of[bucket] and bucket.shard is not bucket.stepped:
                bucket.shard.fill_(float("nan"))
        # After all queued work of the device: see "Order of copies" above.
        zero = torch.zeros((), device=self._device, dtype=torch.float32)
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
        bucket: State,
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
            self._busy_s += time.perf_counter() - begin
            self._touched += touched
            if bucket.shard is not bucket.stepped:
                with self._bus.behind():
                    ups.append(self._bus.up(bucket.shard, bucket.stepped))

        future: Future = Future()
        self._thread.put((future, run, (), ()))
        self._ups[bucket] = ups
        self._stepping[bucket] = FutureHandle("the host's optimizer step", future, self)

    def _await_step(self, bucket: State) -> None:
        """Wait for the host's step; an error of its thread is raised here, each time."""
        if bucket in self._stepping:
            self._stepping[bucket].wait()
            del self._stepping[bucket]

    def gather(self, bucket: State, group: Collectives | None, shard: Tensor) -> Handle:
        """Begin to make its parameters whole; await_weights() and the handle's wait() end it."""
        index = bucket.spec.index
        if bucket.stage.frees_parameters and shard is not bucket.stepped:
            self.await_weights(bucket)  # the target was allocated in the current stream
            assert group is not None
            return started(group.all_gather(bucket.flat, shard, async_op=True, tag=index))
        with self._waiting(offload=True):
            self._await_step(bucket)
        ups = self._ups.setdefault(bucket, [])
        if shard is bucket.stepped:
            shard = bucket.flat[bucket.own]
            self._reads[bucket] = self._bus.up(shard, bucket.stepped)
            ups.append(self._reads[bucket])
        if group is None or group.world_size == 1:  # the rank's own shard is the whole
            return DONE
        with self._waiting(offload=True), self._bus.behind(ups):
            return started(group.all_gather(bucket.flat, shard, async_op=True, tag=index))

    def await_weights(self, bucket: State) -> None:
        """Make the current stream wait for the copy of its new weights."""
        if bucket in self._stepping or self._ups.get(bucket):
            with self._waiting(offload=True):
                self._await_step(bucket)
                for up in self._ups.pop(bucket):
                    up.wait()

    def write_weights(self, bucket: State) -> None:
        """Called before its weights on the host are written: waits for copies that read them."""
        self.await_weights(bucket)
        if (read := self._reads.pop(bucket, None)) is not None:
            self._bus.arrived(read)

    # Reports

    def memory(self) -> dict[str, int]:
        """Bytes on the host, without the optimizer's state; subtracts shards that moved there."""
        weights = sum(b.stepped.nbytes for b in self.order)
        on_host = {
            "host weights": weights,
            "host gradients": sum(g.nbytes for g in self.grads.values()),
        }
        return on_host | ({"parameter shards": -weights} if self.where == "parameters" else {})

    def describe(self) -> str:
        """Text: what is on the host, threads, and speed of the last step; waits for it."""
        for bucket in self.order:
            self.settle(bucket)
        rate = f"{self._touched / self._busy_s / 1e9:.1f} GB/s" if self._busy_s else "no step yet"
        return (
            f"{self.where} on the host, {len(self.order)} of "
            f"{len(self._buckets)} buckets, {self._cores.describe()}, {rate}"
        )


def _state_bytes(bucket: State) -> int:
    return bucket.spec.shard_numel * state_bytes(bucket.spec.dtype.itemsize)


def _host_bytes(bucket: State, pinned: bool) -> int:
    crosses = [bucket.spec.shard_numel * d.itemsize for d in (bucket.spec.dtype, bucket.grad_dtype)]
    return _state_bytes(bucket) + sum(map(pinned_bytes, crosses) if pinned else crosses)


def state_bytes(weight: int) -> int:
    """Bytes per element in AdamW's usual formats: two moments, and a master for 16 bits."""
    return 2 * max(4, weight) + 4 * (weight == 2)


# A predicted step


class Host(NamedTuple):
    """Bytes per second of a host's optimizer step, and of its bus."""

    bytes_per_s: float
    bus_bytes_per_s: float


def stepped_elements(workload: Workload, setup: Setup) -> float:
    """Elements that this rank's host steps."""
    kept = setup.parallel.offload.keep_mb * 2**20 / state_bytes(setup.weight_bytes)
    return max(0.0, sum(buckets_of(workload, setup).units) / setup.n_shards - kept)


def waiting_s(
    workload: Workload, setup: Setup, host: Host, forward_s: float, backward_s: float
) -> float:
    """Seconds that a step waits for the host and the bus.

    Gradients go down during backward. During the next forward the host steps them, unit by unit,
    and the new weights go up.

    Args:
        forward_s, backward_s: of one micro-batch.
    """
    elements, bus = stepped_elements(workload, setup), host.bus_bytes_per_s
    touched = 2 * (setup.state_bytes + setup.weight_bytes) + setup.grad_bytes
    down_s, up_s = elements * setup.grad_bytes / bus, elements * setup.weight_bytes / bus
    stepping_s = max(elements * touched / host.bytes_per_s, up_s)
    waits = max(0.0, down_s - backward_s) + max(0.0, stepping_s - forward_s)
    if setup.parallel.offload.what == "parameters":  # forward and backward gather the host's shards
        again = max(0.0, up_s - forward_s) + max(0.0, up_s - backward_s)
        waits += again * setup.grad_accum_steps
    return waits
