"""Runs a warp-specialized Gluon kernel on CPU tensors, and explores how its roles may interleave.

emulate(module) executes the source of the module's own kernel as Python: its roles are threads,
its shared memory and registers torch tensors, its barriers count arrivals and bytes as sm_90's do.
A product reads its operands as late as it may: when it is waited for. Besides the results it leaves
what every role did, as a list of steps; explore() then goes through every order in which roles,
copies and products may follow one another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from fastpar.kernels.triton_launch import Boxed

DEADLOCK_S = 20.0


@dataclass(frozen=True)
class Step:
    """what: wait | arrive | expect | load | read | drain. at: a barrier or a buffer, (ring, slot).

    number: of a wait its phase, of expect and load bytes, of read how many loads of that ring came
    before the one it sees, of drain the products that may stay in flight. A look is a read by no
    product: it is over at once.
    """

    what: str
    at: tuple[int, int] = (0, 0)
    number: int = 0
    barrier: tuple[int, int] = (0, 0)  # of a load: where it reports
    reads: tuple[tuple[tuple[int, int], int], ...] = ()  # of a product: (buffer, load) of each


@dataclass
class Barrier:
    at: tuple[int, int]
    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def change(self, arrivals: int, size: int) -> None:
        self.pending -= arrivals
        self.bytes += size
        assert self.pending >= 0, f"{self.at}: more arrivals than expected"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Block:
    """One thread block: its shared memory and what its roles did."""

    program: int
    programs: int
    rings: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)  # arrivals, by barrier
    loads: dict[int, int] = field(default_factory=dict)  # by ring of buffers
    holds: dict[tuple[int, int], int] = field(default_factory=dict)  # number of the last load
    roles: list[list[Step]] = field(default_factory=list)


@dataclass
class Shared:
    """Shared memory, or a part of it."""

    data: torch.Tensor
    at: tuple[int, int]
    note: Any = None  # the emulator's

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def dtype(self):
        return self.data.dtype

    def index(self, i):
        return Shared(self.data[i], (self.at[0], int(i)), self.note)

    def reshape(self, shape):
        return Shared(self.data.view(shape), self.at, self.note)

    def permute(self, order):
        return Shared(self.data.permute(order), self.at, self.note)

    def load(self, layout):
        self.note(self.at)
        return self.data.clone()

    def store(self, x):
        assert x.dtype == self.dtype
        self.data.copy_(x)


@dataclass
class Pointer:
    data: torch.Tensor
    offset: Any = 0

    def __add__(self, other):
        return Pointer(self.data, self.offset + other)


@dataclass
class Box:
    """A tensor descriptor."""

    data: torch.Tensor
    block_type: SimpleNamespace

    @classmethod
    def of(cls, descriptor):
        base, shape = descriptor.base, descriptor.block_shape
        data = base.as_strided(descriptor.shape, descriptor.strides)
        size = torch.Size(shape).numel() * base.element_size()
        return cls(data, SimpleNamespace(shape=list(shape), nbytes=size))

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def layout(self):
        return None

    def clipped(self, first):
        """(part of the tensor inside the box at first, the same part of the box)."""
        sizes = zip(first, self.block_type.shape, self.data.shape)
        box = tuple(slice(0, max(0, min(b, n - f))) for f, b, n in sizes)
        return self.data[tuple(slice(f, f + s.stop) for f, s in zip(first, box))], box


@dataclass
class Product:
    a: Any
    b: Shared
    acc: Any
    use_acc: bool
    value: Any = None

    def finish(self):
        a = self.a.data if isinstance(self.a, Shared) else self.a
        self.value = a.float() @ self.b.data.float()
        if self.use_acc:
            self.value += value_of(self.acc)


def value_of(x):
    assert not isinstance(x, Product) or x.value is not None, "read before it was waited for"
    return x.value if isinstance(x, Product) else x


class _Emulator:
    """Everything that a kernel's source calls, for the block and role of the calling thread."""

    def __init__(self):
        self.local = threading.local()
        self.gl = SimpleNamespace(
            allocate_shared_memory=self.allocate, arange=lambda a, b, layout: torch.arange(a, b),
            cast=lambda x, dtype: x, constexpr=lambda x: x, convert_layout=lambda x, layout: x,
            exp2=torch.exp2, float32=torch.float32, int64=torch.int64, log2=torch.log2,
            max=lambda x, axis: x.amax(axis), maximum=torch.maximum,
            num_programs=lambda axis: self.local.block.programs,
            program_id=lambda axis: self.local.block.program,
            static_range=range, store=self.store, sum=lambda x, axis: x.sum(axis),
            warp_specialize=self.warp_specialize, where=torch.where,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            **dict.fromkeys(
                ("DotOperandLayout", "NVMMADistributedLayout", "SliceLayout"), lambda *a: None
            ),
        )  # fmt: skip
        self.names = {
            "gl": self.gl,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None, init=self.init, wait=self.wait, arrive=self.arrive,
                expect=self.expect,
            ),
            "tma": SimpleNamespace(store_wait=lambda n: None),
            "fence_async_shared": lambda: None,
            "_load": self.load, "_store": self.store_box,
            "warpgroup_mma": self.product, "warpgroup_mma_wait": self.drain,
            "warpgroup_mma_init": lambda x: x,
        }  # fmt: skip

    def note(self, *step, **fields):
        self.local.steps.append(Step(*step, **fields))

    def allocate(self, dtype, shape, layout):
        block = self.local.block
        block.rings += 1
        if dtype is torch.int64:
            return SimpleNamespace(
                index=[Barrier((block.rings, i)) for i in range(shape[0])].__getitem__
            )
        data = torch.full(shape, float("nan"), dtype=dtype)
        return Shared(data, (block.rings, 0), self.look)

    def init(self, barrier, count):
        barrier.count = barrier.pending = count
        self.local.block.counts[barrier.at] = count

    def wait(self, barrier, phase):
        self.note("wait", barrier.at, phase)
        changed = self.local.block.changed
        with changed:
            done = changed.wait_for(lambda: barrier.phase != phase, timeout=DEADLOCK_S)
        assert done, f"deadlock: {barrier}"

    def _change(self, barrier, arrivals, size):
        with self.local.block.changed:
            barrier.change(arrivals, size)
            self.local.block.changed.notify_all()

    def arrive(self, barrier):
        self.note("arrive", barrier.at)
        self._change(barrier, 1, 0)

    def expect(self, barrier, size):
        self.note("expect", barrier.at, size)
        self._change(barrier, 1, size)

    def load(self, box, first, barrier, to):
        block = self.local.block
        ring, size = to.at[0], box.block_type.nbytes
        block.holds[to.at] = block.loads[ring] = block.loads.get(ring, -1) + 1
        self.note("load", to.at, size, barrier=barrier.at)
        part, inside = box.clipped(first)
        to.data.zero_()
        to.data[inside] = part
        self._change(barrier, 0, -size)

    def look(self, at):
        self.note("look", reads=((at, self.local.block.holds[at]),))

    def store_box(self, box, first, x):
        part, inside = box.clipped(first)
        part.copy_(x.data[inside])

    def store(self, pointer, x, mask):
        pointer.data.view(-1)[pointer.offset[mask]] = x[mask]

    def product(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        holds = self.local.block.holds
        buffers = [x.at for x in (a, b) if isinstance(x, Shared)]
        self.note("read", reads=tuple((at, holds[at]) for at in buffers))
        self.local.products.append(Product(a, b, acc, use_acc))
        return self.local.products[-1]

    def drain(self, n, deps):
        self.note("drain", number=n)
        while len(self.local.products) > n:
            self.local.products.pop(0).finish()
        values = tuple(value_of(x) for x in deps)
        return values if len(values) > 1 else values[0]

    def warp_specialize(self, roles, warps, registers):
        block, errors = self.local.block, []

        def role(function, args, steps):
            self.local.block, self.local.steps, self.local.products = block, steps, []
            try:
                function(*args)
            except BaseException as error:
                errors.append(error)

        block.roles = [[] for _ in roles]
        threads = [threading.Thread(target=role, args=(*r, s)) for r, s in zip(roles, block.roles)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def emulate(module, blocks):
    """A replacement for launch() that runs the kernels of this module; appends each Block."""
    emulator = _Emulator()
    names = {**vars(module), **emulator.names}
    for name, x in vars(module).items():
        if hasattr(x, "fn"):
            names[name] = FunctionType(x.fn.__code__, names, name, x.fn.__defaults__)
        elif type(x).__name__ == "constexpr":
            names[name] = x.value

    def launch(kernel, grid, *args, num_warps, **constants):
        assert num_warps == 4
        args = [Box.of(x.descriptor()) if isinstance(x, Boxed) else x for x in args]
        args = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
        for program in range(grid[0]):
            block = emulator.local.block = Block(program, grid[0])
            names[kernel.fn.__name__](*args, **constants)
            blocks.append(block)

    return launch


# Every order in which it may happen


def explore(roles: list[list[Step]], counts: dict[tuple[int, int], int]) -> int:
    """Number of states that these roles can reach. The last role is the only one that loads.

    Raises:
        AssertionError: an order of steps exists in which nobody can go on, a buffer is filled while
            a product reads it or before all have, or a product reads other rows than it should.
    """
    barriers = sorted(counts)
    readers, filler = roles[:-1], roles[-1]
    in_flight = [_products_in_flight(role) for role in readers]
    wanted = {reads for role in readers for step in role for reads in step.reads}
    last_read = [
        {reads: i for i, step in enumerate(role) for reads in step.reads} for role in readers
    ]
    loads: list[tuple[tuple[int, int], int]] = []  # buffer and number, in their order
    held: list[dict[tuple[int, int], int]] = []  # buffer -> its last load, before each step
    by_ring: dict[int, int] = {}
    latest: dict[tuple[int, int], int] = {}
    for step in filler:
        held.append(latest)
        if step.what == "load":
            number = by_ring[step.at[0]] = by_ring.get(step.at[0], -1) + 1
            latest = {**latest, step.at: len(loads)}
            loads.append((step.at, number))
    held.append(latest)
    assert wanted == set(loads), "what is loaded is not what is read"
    reports = [(barriers.index(s.barrier), s.number) for s in filler if s.what == "load"]

    start = (
        (0,) * len(roles),
        frozenset(),  # loads in flight
        tuple((counts[b], 0, 0) for b in barriers),  # arrivals missing, bytes missing, phase
    )
    seen = {start}
    todo = [start]

    def changed(state, at, arrivals, size):
        missing, behind, phase = state[at]
        missing, behind = missing - arrivals, behind + size
        assert missing >= 0, f"{barriers[at]}: more arrivals than expected"
        if missing == 0 and behind == 0:
            missing, phase = counts[barriers[at]], phase ^ 1
        return (*state[:at], (missing, behind, phase), *state[at + 1 :])

    def after(places, flying, state, who):
        """The state after the next step of one role, or None if it has to wait."""
        step = roles[who][places[who]]
        moved = (*places[:who], places[who] + 1, *places[who + 1 :])
        if step.what == "wait":
            return (
                (moved, flying, state) if state[barriers.index(step.at)][2] != step.number else None
            )
        if step.what in ("arrive", "expect"):
            at = barriers.index(step.at)
            return moved, flying, changed(state, at, 1, step.number)
        if step.what == "load":
            before = held[places[who]].get(step.at)
            for reader, place in enumerate(places[:-1]):
                busy = in_flight[reader][place]
                assert step.at not in busy, f"{step.at} is filled while role {reader} reads it"
                if before is not None:
                    read = last_read[reader].get(loads[before], -1) < place
                    assert read, f"{step.at} is overwritten before role {reader} reads it"
            return moved, flying | {held[places[who] + 1][step.at]}, state
        for buffer, number in step.reads:
            there = held[places[-1]].get(buffer)
            right = there is not None and there not in flying and loads[there][1] == number
            assert right, f"role {who} reads {buffer} before or after load {number} of it"
        return moved, flying, state

    while todo:
        places, flying, state = todo.pop()
        following = [
            after(places, flying, state, who)
            for who, place in enumerate(places)
            if place < len(roles[who])
        ]
        for at in {reports[n][0] for n in flying}:
            # All that a barrier waits for at once: before the last has come none may be read.
            come = {n for n in flying if reports[n][0] == at}
            size = sum(reports[n][1] for n in come)
            if size == state[at][1]:
                following.append((places, flying - come, changed(state, at, 0, -size)))
        possible = [s for s in following if s is not None]
        done = all(place == len(role) for place, role in zip(places, roles))
        assert possible or done, f"deadlock at {[r[p : p + 1] for r, p in zip(roles, places)]}"
        for s in possible:
            if s not in seen:
                seen.add(s)
                todo.append(s)
    return len(seen)


def _products_in_flight(role: list[Step]) -> list[set[tuple[int, int]]]:
    """Buffers that products in flight read, before each step."""
    flying: list[tuple[tuple[int, int], ...]] = []
    found = []
    for step in role:
        found.append({at for buffers in flying for at in buffers})
        if step.what == "read":
            flying.append(tuple(at for at, _ in step.reads))
        elif step.what == "drain":
            del flying[: max(0, len(flying) - step.number)]
    found.append({at for buffers in flying for at in buffers})
    return found
