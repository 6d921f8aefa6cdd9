"""Runs a warp-specialized Gluon kernel on CPU tensors, and proves every order of its roles safe.

emulate(module) executes the source of the module's own kernel as Python: its roles are threads,
its shared memory and registers torch tensors, its barriers count arrivals and bytes as sm_90's do.
A product reads its operands as late as it may: when it is waited for. Besides the results it leaves
what every role did, as a list of steps, of which check() goes through one order.

[Note: one order] Roles decide nothing, so their steps are the same in every order, and only waits
hold them up. Where each arrival is certain to count for one phase of its barrier, and each wait to
see the end of one phase, all orders pass the same phases and end alike: one that ends shows that
none is a deadlock. What is certain at a step is what its own role has seen the end of, and what was
certain at the phases that it waited for; so it is what holds in every order.
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
    """known: what is certain where its present phase is complete; phases: the complete ones'."""

    at: tuple[int, int]
    count: int = 0
    pending: int = 0
    bytes: int = 0
    known: set[tuple] = field(default_factory=set)
    phases: list[frozenset[tuple]] = field(default_factory=list)

    def change(self, arrivals: int, size: int, *known: tuple) -> None:
        self.pending -= arrivals
        self.bytes += size
        self.known.update(known)
        assert self.pending >= 0, f"{self.at}: more arrivals than expected"
        if self.pending == 0 and self.bytes == 0:
            self.known.add(("end", self.at, len(self.phases)))
            self.phases.append(frozenset(self.known))
            self.pending = self.count

    def has_left(self, phase: int) -> bool:
        """What the parity of a phase tells the hardware."""
        return len(self.phases) % 2 != phase


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
            done = changed.wait_for(lambda: barrier.has_left(phase), timeout=DEADLOCK_S)
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


def check(roles: list[list[Step]], counts: dict[tuple[int, int], int]) -> None:
    """See [Note: one order]. The last role is the only one that loads.

    Raises:
        AssertionError: an order of steps exists in which no role can continue, a buffer is filled
            while a product reads it or before all have, or a product reads wrong rows.
    """
    barriers = {at: Barrier(at, n, n) for at, n in counts.items()}
    known: list[set[tuple]] = [set() for _ in roles]
    flying: list[list[tuple]] = [[] for _ in roles]  # products, whose reads have no end yet
    passed = []  # (barrier, phase, role)
    readers: dict[tuple, list[tuple]] = {}  # (buffer, load) -> ends of its reads
    for who, role in enumerate(roles):
        for i, step in enumerate(role):
            for read in step.reads:
                readers.setdefault(read, []).append(("read", who, i))
    loads: dict[int, int] = {}  # ring -> how many
    held: dict[tuple[int, int], tuple] = {}  # buffer -> its last (buffer, load)
    filled: set[tuple] = set()  # all of them

    def counts_for_one_phase(barrier: Barrier, who: int) -> None:
        end = ("end", barrier.at, len(barrier.phases) - 1)
        early = f"role {who} may arrive at {barrier.at} in the phase before its own"
        assert not barrier.phases or end in known[who], early

    def take(who: int, i: int, step: Step) -> bool:
        """Takes a step of a role; False: it has to wait."""
        mine = known[who]
        if step.what == "wait":
            barrier = barriers[step.at]
            phase = sum(("end", step.at, n) in mine for n in range(len(barrier.phases))) - 1
            phase += (phase + 1) % 2 == step.number  # the last that it knows of, or the next
            if phase >= len(barrier.phases):
                return False
            mine.add(("pass", step.at, phase, who))
            passed.append((step.at, phase, who))
            mine.update(barrier.phases[phase] if phase >= 0 else ())
        elif step.what in ("arrive", "expect"):
            counts_for_one_phase(barriers[step.at], who)
            barriers[step.at].change(1, step.number, *mine)
        elif step.what == "load":
            number = loads[step.at[0]] = loads.get(step.at[0], -1) + 1
            for end in readers.get(held.get(step.at), ()):
                assert end in mine, f"{step.at} is filled while role {end[1]} reads it, or before"
            held[step.at] = step.at, number
            filled.add(held[step.at])
            counts_for_one_phase(barriers[step.barrier], who)
            barriers[step.barrier].change(0, -step.number, ("load", *held[step.at]))
        elif step.what == "drain":
            ready = max(0, len(flying[who]) - step.number)
            mine.update(flying[who][:ready])
            del flying[who][:ready]
        else:
            for buffer, number in step.reads:
                there = ("load", buffer, number) in mine
                assert there, f"role {who} reads {buffer} before or after load {number} of it"
            (mine.add if step.what == "look" else flying[who].append)(("read", who, i))
        return True

    left = [list(enumerate(role)) for role in roles]
    while any(left):
        before = list(map(len, left))
        for who, steps in enumerate(left):
            while steps and take(who, *steps[0]):
                del steps[0]
        stuck = f"deadlock at {[steps[:1] for steps in left]}"
        assert before != list(map(len, left)), stuck
    for at, phase, who in passed:
        phases = barriers[at].phases[phase + 1 :]
        sees = not phases or ("pass", at, phase, who) in phases[0]
        assert sees, f"deadlock: role {who} may see the end of a later phase of {at}"
    assert filled == set(readers), "what is loaded is not what is read"
