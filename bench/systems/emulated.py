"""An emulated interconnect: one real rank that computes and waits as one of many would.

EmulatedMesh makes a mesh of any number of ranks of which this process is one and the others do not
exist. EmulatedCollectives, given to parallelize(collectives=emulated(link)), do the arithmetic of
an operation here, as if every rank had this rank's data, and take as long as the bytes of the
operation take on the link. Everything measured with them carries the word "emulated".

[Note: what is emulated]
Time, bytes, order, and who waits for what. An operation takes (bytes this rank sends) / bandwidth +
latency, twice the latency for an all-reduce, which is a reduce-scatter and an all-gather. The
operations of a rank share its link: they pass one after another in the order of the calls. Where a
profile is not shared, each role (reduce, gather, ...) has the bandwidth for itself. A profile of
nodes has two links, inside of nodes and between them, and an operation takes what the planner's
model of it says (fastpar/cost/network.py); Link.nic_bytes() is what leaves through an adapter.
bench/systems/nodes.py sends such messages really and counts them.
Not emulated: what transports take from the computation (NCCL occupies a few multiprocessors and
memory bandwidth, gloo and shared memory occupy cores), stragglers, and congestion. Figures are
therefore lower bounds of what communication costs.

[Note: the clock of a GPU]
The link is a stream on which torch.cuda._sleep runs; the host never waits. Its unit is a cycle of
the GPU's clock, measured when the link is made. The clock can change under load: what an operation
really took is measured by events, and comm_ms() is the sum of these.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import DONE, Handle
from fastpar.comm.mesh import Mesh
from fastpar.cost.devices import Cluster
from fastpar.cost.network import Network, Traffic

_CALIBRATION_CYCLES = 20_000_000  # about 10 ms


@dataclass(frozen=True)
class Profile:
    """A kind of link.

    Attributes:
        gb_per_s: 1e9 bytes per second that one rank sends while it receives as many.
        latency_us: of one operation; bandwidths are line rates, latencies are assumptions.
        shared: see [Note: what is emulated].
        network: of nodes; None: all ranks are alike.
    """

    name: str
    gb_per_s: float
    latency_us: float
    source: str
    shared: bool = True
    network: Network | None = None

    def ms(self, n_bytes: float, passes: int = 1) -> float:
        """How long an operation takes that sends n_bytes and pays the latency `passes` times."""
        return n_bytes / self.gb_per_s / 1e6 + passes * self.latency_us / 1e3

    def traffic(self, op: Op) -> Traffic:
        """What a rank sends in an operation of a profile of nodes."""
        assert self.network is not None
        kind = {"barrier": "all_reduce", "recv": "send"}.get(op.kind, op.kind)
        n_bytes = op.tensor_bytes if op.wire_bytes else 0
        return self.network.traffic(kind, n_bytes, op.world_size, op.stride)


NVLINK = Profile(
    "NVLink", 450.0, 10.0, "NVLink 4: 18 links x 25 GB/s a direction (NVIDIA H100 data sheet)"
)
PCIE = Profile(
    "PCIe 4 x16",
    31.5,
    20.0,
    "16 lanes x 16 GT/s x 128/130 bits (PCI Express 4.0)",
)
ETHERNET_100 = Profile("100 GbE", 12.5, 30.0, "100 Gbit/s a rank (IEEE 802.3ba)")
ETHERNET_25 = Profile("25 GbE", 3.125, 50.0, "25 Gbit/s a rank (IEEE 802.3by)")
ETHERNET_1 = Profile("1 GbE", 0.125, 100.0, "1 Gbit/s a rank (IEEE 802.3ab); for CPUs")
PROFILES = (NVLINK, PCIE, ETHERNET_100, ETHERNET_25)


def nodes_of(per_node: int, inter: str) -> Profile:
    """Nodes of H100s with NVLink; inter: of links.csv, between them."""
    network = Network(Cluster.of("h100", per_node, per_node, inter=inter))
    link = network.cluster.inter
    name = f"nodes of {per_node}: NVLink, {inter}"
    speed = link.bytes_per_s / 1e9, link.latency_s * 1e6
    return Profile(name, *speed, "fastpar/cost/links.csv", network=network)


NODES = (nodes_of(8, "ib-ndr"), nodes_of(8, "eth-100"))  # an adapter for each GPU; one a node


class Op(NamedTuple):
    """One operation as it was called."""

    role: str
    kind: str
    tensor_bytes: int  # of the whole tensor
    wire_bytes: float  # that this rank sends
    world_size: int
    tag: int
    stride: int = 1  # between neighbours of the group, in ranks of the mesh


class Link:
    """What the operations of this rank travel over.

    Args:
        profile: of the link; None takes no time. It can be set anew between steps.
        cuda: torch.cuda, or a double of it; None chooses by device.
    Attributes:
        ops: what was called since clear().
    """

    def __init__(
        self, profile: Profile | None, device: torch.device | str = "cpu", cuda: Any = None
    ) -> None:
        self.profile = profile
        on_gpu = torch.device(device).type == "cuda" or cuda is not None
        self._cuda = (cuda or torch.cuda) if on_gpu else None
        self.cycles_per_ms = _cycles_per_ms(self._cuda) if on_gpu else 0.0
        self.ops: list[Op] = []
        self._done: list[Any] = []
        self._channels: dict[str, Any] = {}

    def submit(self, op: Op, passes: int, work: Callable[[], None]) -> Handle:
        """Do the work, and be over when the bytes have passed."""
        self.ops.append(op)
        ms, name = 0.0, ""
        if self.profile is not None and op.world_size > 1:
            network = self.profile.network
            if network is None:
                ms = self.profile.ms(op.wire_bytes, passes)
                name = "" if self.profile.shared else op.role
            else:
                sent = self.profile.traffic(op)
                ms = 1e3 * (network.start_s + network.traffic_s(sent))
                name = "" if sent.adapter or sent.hops_between else "inside"
        if name not in self._channels:
            self._channels[name] = _Thread() if self._cuda is None else _Stream(self._cuda)
        handle = self._channels[name].submit(ms, int(ms * self.cycles_per_ms), work)
        self._done.append(handle)
        return handle

    def comm_ms(self) -> float:
        """Sum of what the operations since clear() took. All of them are over."""
        return sum(handle.elapsed_ms() for handle in self._done)

    def wire_bytes(self) -> float:
        """Sent by this rank since clear()."""
        return sum(op.wire_bytes for op in self.ops)

    def nic_bytes(self) -> float:
        """Through each adapter of a node since clear(); 0 without nodes."""
        profile = self.profile
        if profile is None or profile.network is None:
            return 0.0
        return sum(profile.network.nic_bytes(profile.traffic(op)) for op in self.ops)

    def clear(self) -> None:
        self.ops.clear()
        self._done.clear()

    def close(self) -> None:
        """Nothing may be under way."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def _cycles_per_ms(cuda: Any) -> float:
    """Cycles of _sleep in a ms, at the clock of a GPU after some work: the median of three."""
    cuda._sleep(_CALIBRATION_CYCLES)
    rates = []
    for _ in range(3):
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        cuda._sleep(_CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        rates.append(_CALIBRATION_CYCLES / start.elapsed_time(end))
    return sorted(rates)[1]


class _ThreadHandle(Handle):
    def __init__(self, work: Callable[[], None], ms: float) -> None:
        self.work: Callable[[], None] | None = work
        self.takes_ms = ms
        self.took_ms = 0.0
        self.called = time.perf_counter()
        self.over = threading.Event()
        self.error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.over.wait(timeout_s):
            raise TimeoutError(
                f"EmulatedCollectives: expected to end within timeout_s={timeout_s}, got an "
                "operation still under way; wait longer than the link takes"
            )
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.over.is_set()

    @property
    def ms(self) -> float | None:
        return self.took_ms if self.over.is_set() else None

    def elapsed_ms(self) -> float:
        self.wait()
        return self.took_ms


class _Thread:
    """A link on a CPU: a thread that sleeps while the bytes pass."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_ThreadHandle | None] = queue.SimpleQueue()
        self._free = 0.0  # when the last operation is over
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, ms: float, cycles: int, work: Callable[[], None]) -> Handle:
        handle = _ThreadHandle(work, ms)
        self._tasks.put(handle)
        return handle

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            begin = max(task.called, self._free)
            try:
                assert task.work is not None
                task.work()
            except BaseException as error:
                task.error = error
            task.work = None  # with its tensors
            # At least as long as the arithmetic. A sleep that is too long shortens the next one.
            self._free = end = max(begin + task.takes_ms / 1e3, time.perf_counter())
            while (now := time.perf_counter()) < end:
                time.sleep(end - now)
            task.took_ms = (end - begin) * 1e3
            task.over.set()
            del task

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()


class _StreamHandle(Handle):
    def __init__(self, cuda: Any, work: Callable[[], None], events: Any) -> None:
        self._cuda, self._work = cuda, work
        self._start, self._end, self._over = events

    def wait(self, timeout_s: float | None = None) -> None:
        self._cuda.current_stream().wait_event(self._over)
        self._work = None  # type: ignore[assignment]  # until here its tensors may not be reused

    def is_completed(self) -> bool:
        return self._over.query()

    @property
    def ms(self) -> float | None:
        return self.elapsed_ms() if self._end.query() else None

    def elapsed_ms(self) -> float:
        return self._start.elapsed_time(self._end)


class _Stream:
    """A link on a GPU: a stream that sleeps while the bytes pass, one beside it for arithmetic."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        # High priority: a sleep of one thread must not wait behind the blocks of large kernels.
        self._link, self._arithmetic = (cuda.Stream(priority=-1) for _ in range(2))

    def submit(self, ms: float, cycles: int, work: Callable[[], None]) -> Handle:
        cuda = self._cuda
        ready, over = cuda.Event(), cuda.Event()
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        ready.record()
        with cuda.stream(self._link):
            self._link.wait_event(ready)
            start.record()
            if cycles:
                cuda._sleep(cycles)
            end.record()
        with cuda.stream(self._arithmetic):
            self._arithmetic.wait_event(ready)
            work()
            self._arithmetic.wait_event(end)
            over.record()
        return _StreamHandle(cuda, work, (start, end, over))

    def close(self) -> None:
        self._link.synchronize()
        self._arithmetic.synchronize()


class EmulatedCollectives(Collectives):
    """One rank of a group whose other ranks have the same data, behind a link.

    Sums are W * x, means are x, and what is gathered are W copies of x; in an all-to-all every
    rank sends what this rank sends to itself. What is received is what this rank sent before, in
    the order of its sends; without any, out stays as it is.
    """

    def __init__(
        self,
        link: Link,
        role: str,
        rank: int,
        world_size: int,
        device: torch.device | str,
        stride: int = 1,
    ) -> None:
        self.link, self.role, self.stride = link, role, stride
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        self.transport = "emulated"
        name = "no link" if link.profile is None else link.profile.name
        self.why = f"emulated: {name}"
        self._sent: deque[Tensor] = deque()

    def barrier(self, *, tag: int = 0) -> None:
        self._submit("barrier", torch.empty(0), 0.0, 2, tag, lambda: None).wait()

    def _all_reduce(self, x: Tensor, mean: bool, tag: int = 0) -> Handle:
        def work() -> None:
            if not mean:
                x.mul_(self.world_size)

        return self._submit("all_reduce", x, 2 * self._share(x), 2, tag, work)

    def _reduce_scatter(self, out: Tensor, x: Tensor, mean: bool, tag: int = 0) -> Handle:
        def work() -> None:
            own = x.view(-1).view(self.world_size, -1)[self.rank]
            if own.data_ptr() != out.data_ptr():
                out.view(-1).copy_(own)
            if not mean:
                out.mul_(self.world_size)

        return self._submit("reduce_scatter", x, self._share(x), 1, tag, work)

    def _all_gather(self, out: Tensor, x: Tensor, tag: int = 0) -> Handle:
        def work() -> None:
            rows, mine = out.view(-1).view(self.world_size, -1), x.view(-1)
            if rows[self.rank].data_ptr() != mine.data_ptr():
                rows[self.rank].copy_(mine)
            for others in (rows[: self.rank], rows[self.rank + 1 :]):
                others.copy_(rows[self.rank])

        return self._submit("all_gather", out, self._share(out), 1, tag, work)

    def _broadcast(self, x: Tensor, src: int, tag: int = 0) -> Handle:
        return self._submit("broadcast", x, float(x.nbytes), 1, tag, lambda: None)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: list[int], x_sizes: list[int], tag: int = 0
    ) -> Handle:
        def work() -> None:
            mine = x.view(-1).split(x_sizes)[self.rank]
            for part in out.view(-1).split(out_sizes):
                part.copy_(mine[: part.numel()])

        wire = float(x.nbytes - x_sizes[self.rank] * x.element_size())
        return self._submit("all_to_all", x, wire, 1, tag, work)

    def _send(self, x: Tensor, dst: int, tag: int = 0) -> Handle:
        self._sent.append(x.clone())
        return self._submit("send", x, float(x.nbytes), 1, tag, lambda: None)

    def _recv(self, out: Tensor, src: int, tag: int = 0) -> Handle:
        def work() -> None:
            if self._sent:
                out.copy_(self._sent.popleft())

        return self._submit("recv", out, 0.0, 1, tag, work)

    def _share(self, whole: Tensor) -> float:
        return whole.numel() * whole.element_size() * (self.world_size - 1) / self.world_size

    def _submit(
        self, kind: str, whole: Tensor, wire: float, passes: int, tag: int, work: Callable[[], None]
    ) -> Handle:
        n_bytes = whole.numel() * whole.element_size()
        op = Op(self.role, kind, n_bytes, wire, self.world_size, tag, self.stride)
        return self.link.submit(op, passes, torch.no_grad()(work))


class InlineCollectives(EmulatedCollectives):
    """Their operations are over when they return: no other thread lets go of memory unseen."""

    in_caller = True

    def _submit(
        self, kind: str, whole: Tensor, wire: float, passes: int, tag: int, work: Callable[[], None]
    ) -> Handle:
        with torch.no_grad():
            work()
        return DONE


def emulated(
    link: Link, kind: type[EmulatedCollectives] = EmulatedCollectives
) -> Callable[[dist.ProcessGroup | None, str], EmulatedCollectives]:
    """For parallelize(collectives=...): every group of an EmulatedMesh goes over this link.

    But for the few bytes of host tensors beside a GPU (role "sizes"), which take no time.
    """
    device = "cpu" if link._cuda is None else "cuda"

    def factory(group: dist.ProcessGroup | None, role: str) -> EmulatedCollectives:
        group = group if group is not None else dist.group.WORLD
        on_host = role == "sizes"
        ranks = dist.get_process_group_ranks(group)
        return kind(
            Link(None) if on_host else link,
            role,
            dist.get_rank(group),
            len(ranks),
            "cpu" if on_host else device,
            ranks[1] - ranks[0] if len(ranks) > 1 else 1,
        )

    return factory


class EmulatedMesh(Mesh):
    """world_size ranks of which only this one exists, over torch's fake process group.

    It replaces the process group of this process until close().
    """

    def __init__(
        self,
        world_size: int,
        rank: int = 0,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        tp_grid: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            raise RuntimeError(
                "EmulatedMesh: expected a process without a process group, got an initialized "
                "torch.distributed; close the other mesh first"
            )
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        super().__init__(tp=tp, cp=cp, pp=pp, tp_grid=tp_grid, device=device)

    def check_same(self, caller: str, lines: Any) -> None:
        """Nobody to differ from."""

    def broadcast_(self, tensors: Any, *axes: str) -> None:
        """Everybody has these values."""

    def close(self) -> None:
        """Destroy the fake process group."""
        with contextlib.suppress(AssertionError):
            dist.destroy_process_group()

    def __enter__(self) -> EmulatedMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
