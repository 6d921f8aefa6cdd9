"""The Hopper forward, and dk and dv of its backward: their source as Python with numbers, in which
nobody waits for ever and no slot is filled early in any order of the roles, and what they compile
to. test_on_a_gpu alone runs the kernels.

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

import itertools
import json
import math
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from cells import slow, sweep

pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="needs Triton with Gluon")

from fastpar.kernels.attention import hopper_bwd_triton, hopper_triton, peers
from fastpar.kernels.reference import attention_ref
from fastpar.kernels.triton_launch import Boxed

ROOT = Path(__file__).parents[2]
BLOCK = 128
LOG2_E = hopper_triton.LOG2_E.value
HALF = (torch.bfloat16, torch.float16)
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


@pytest.fixture
def emulated(monkeypatch):
    """emulated(way, do, q, k, v, scale): (o, lse) or (dk, dv) on CPU tensors, once check() has seen
    what each program did; emulated.blocks has it. slots: of the rings of q (or of q and do) and of
    k and v."""
    blocks = []

    def run(way, do, q, k, v, scale, programs=3, slots=None):
        module = {"fwd": hopper_triton, "bwd": hopper_bwd_triton}[way]
        blocks.clear()
        monkeypatch.setattr(module, "launch", emulate(module, blocks))
        monkeypatch.setattr(module, "sm_count", lambda device: programs)
        slots = slots or SLOTS[way][0]
        monkeypatch.setattr(module, "Q_SLOTS" if way == "fwd" else "SLOTS", slots[0])
        monkeypatch.setattr(module, "KV_SLOTS", slots[1])
        if way == "fwd":
            found = module.attention_hopper_fwd(q, k, v, scale)
        else:
            lse, delta = statistics(do, q, k, v, scale)
            found = torch.empty(*q.shape[:2], 2 * k.shape[2], 64, dtype=q.dtype).chunk(2, 2)
            module.attention_hopper_dkdv(do, q, k, v, lse, delta, *found, scale)
        for block in blocks:
            check(block.roles, block.counts)
        return found

    run.blocks = blocks
    return run


def draw(B, T, H, Hkv, D, dtype=torch.bfloat16, device="cpu"):
    """do, and q, k, v as parts of one projection's output, as a model has them."""
    x = torch.randn(B, T, 2 * H + 2 * Hkv, D).to(device, dtype)
    q, k, v, do = x.split([H, Hkv, Hkv, H], 2)
    return do.contiguous(), q, k, v


def probabilities(q, k, scale):
    """(lse in base 2 [B, H, T], p [B, H, T, T]) by the formula in fp64."""
    k = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    return scores.logsumexp(-1) * LOG2_E, scores.softmax(-1)


def statistics(do, q, k, v, scale):
    """lse in base 2 and delta, [B, H, T], as the forward and the dq kernel leave them."""
    lse, p = probabilities(q, k, scale)
    v = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    o = torch.einsum("bhts,bshd->bthd", p, v)
    delta = (do.double() * o).sum(-1).transpose(1, 2)
    return lse.float().contiguous(), delta.float().contiguous()


def roundings(q, k, scale):
    """(u, r): of one rounding to q's dtype; and how far probabilities are off, relatively.

    A score is off by its sum of D products (D roundings of fp32 of sum |q| |k|) and its scaling,
    and a probability by twice that, an exponential and its share of the sum of T terms.
    """
    U, D, T = 2.0**-24, q.shape[3], k.shape[1]
    norms = (x.double().norm(dim=-1).max().item() for x in (q, k))
    score = (D + 2) * U * math.prod(norms) * scale
    return torch.finfo(q.dtype).eps / 2, 2 * score + (T + 8) * U


def check_fwd(found, do, q, k, v, scale):
    """P is rounded to the inputs' dtype, and so is the result; all else is fp32's."""
    o, lse = found
    exact = attention_ref(q.double(), k.double(), v.double(), softmax_scale=scale)
    size = attention_ref(q.double(), k.double(), v.double().abs(), softmax_scale=scale)
    u, r = roundings(q, k, scale)
    assert ((o - exact).abs() <= 1.01 * (u + r) * size + u * exact.abs() + 1e-30).all()
    torch.testing.assert_close(lse.double(), probabilities(q, k, scale)[0], atol=2e-5, rtol=2e-6)


def check_bwd(found, do, q, k, v, scale):
    """P, dS, o (for delta) and the results are rounded to the inputs' dtype; all else is fp32's.
    Where fp16 is subnormal (P of many keys), half of its spacing is the error instead.
    found: dq, dk and dv, or the last two."""
    do, *doubles = (x.double() for x in (do, q, k, v))
    leaves = [x.requires_grad_() for x in doubles]
    exact = torch.autograd.grad(attention_ref(*leaves, softmax_scale=scale), leaves, do)
    u, r = roundings(q, k, scale)
    tiny = torch.finfo(found[0].dtype).smallest_normal * u
    group, T, D = q.shape[2] // k.shape[2], *q.shape[1::2]
    _, p = probabilities(q, k, scale)
    q, k, v = (x.detach() for x in leaves)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    dp, size = (torch.einsum("bthd,bshd->bhts", *x) for x in ((do, v), (do.abs(), v.abs())))
    ds = (p * (dp - (p * dp).sum(-1, True))).abs()
    fp32 = (D + T + 4) * 2.0**-24 * p * (size + (p * size).sum(-1, True))
    o = torch.einsum("bhts,bshd->bthd", p, v)
    delta = (do.abs() * o.abs()).sum(-1).transpose(1, 2)[..., None]
    seen = torch.ones(T, T, dtype=p.dtype, device=p.device).tril()
    off = (u + r) * ds + u * p * delta + fp32 + tiny * seen
    bounds = [
        torch.einsum("bhts,bshd->bthd", off, k.abs()) * scale,
        torch.einsum("bhts,bthd->bshd", off, q.abs()) * scale,
        torch.einsum("bhts,bthd->bshd", (u + r) * p + tiny * seen, do.abs()),
    ]
    bounds[1:] = [x.unflatten(2, (-1, group)).sum(3) for x in bounds[1:]]
    for got, want, bound in zip(found, exact[-len(found) :], bounds[-len(found) :]):
        last = (u + 2**-20) * want.abs() + tiny  # of the result
        assert ((got - want).abs() <= 1.01 * bound + last + 1e-30).all()


CHECKS = {"fwd": check_fwd, "bwd": check_bwd}
SLOTS = {"fwd": [(2, 2), (1, 1), (1, 3)], "bwd": [(3, 2), (2, 1), (4, 1)]}  # shipped ones first
SIZES = [  # B, T, H, Hkv, D of the forward; programs; slots. T of the backward: multiples of 4
    ((1, 4, 1, 1, 64), 1, 0), ((2, 132, 2, 1, 128), 3, 0), ((1, 300, 4, 2, 64), 2, 1),
    ((1, 300, 2, 2, 64), 1, 2), slow((2, 384, 1, 1, 64), 5, 0), slow((1, 1024, 2, 2, 64), 3, 0),
    slow((3, 128, 2, 2, 128), 2, 0), slow((1, 2000, 2, 1, 128), 7, 0),
]  # fmt: skip


@pytest.mark.parametrize("way", CHECKS)
@pytest.mark.parametrize(("sizes", "programs", "slots"), SIZES)
def test_emulated_source_matches_oracle(emulated, poisoned, way, sizes, programs, slots):
    """poisoned: every row is written, and shared memory is read only when filled."""
    *sizes, D = sizes
    if way == "fwd" and sizes[1] < 300:
        sizes[1] -= 3  # 1 and 129: the backward needs rows of 16 bytes of its statistics
    given = draw(*sizes, D if way == "fwd" else 64, dtype=HALF[programs % 2])
    CHECKS[way](emulated(way, *given, 0.2, programs, SLOTS[way][slots]), *given, 0.2)


@pytest.mark.parametrize("way", CHECKS)
def test_rows_beyond_the_end_come_from_nowhere(emulated, way):
    """The next sample's rows, infinite here, begin where a tile of this one goes on; and those of
    the results behind its own last one belong to the next sample."""
    given = draw(2, 132, 1, 1, 64)
    both = emulated(way, *given, 0.1)
    for i in range(2):
        alone = emulated(way, *(x[i : i + 1].clone() for x in given), 0.1)
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(both, alone))
    for x in given:
        x[1] = torch.inf
    for got, want in zip(emulated(way, *given, 0.1), both):
        assert torch.equal(got[:1], want[:1])


@sweep("n_tiles", range(1, 18))
def test_every_tile_belongs_to_one_program_and_pairs_are_of_equal_length(n_tiles):
    steps, tile_at = hopper_triton.n_steps.fn, hopper_triton.tile_at.fn
    for n_heads, programs in itertools.product((1, 2, 5), range(1, 8)):
        found, lengths = [], set()
        for program in range(min(programs, n_heads * ((n_tiles + 1) // 2))):
            places = range(steps(program, programs, n_heads, n_tiles))
            mine = [tile_at(s, program, programs, n_tiles) for s in places]
            found += [place for place in mine if place[1] >= 0]
            pairs = list(zip(mine[::2], mine[1::2]))
            assert all(long >= short for (_, long), (_, short) in pairs)
            lengths |= {long + 1 + short + 1 for (_, long), (_, short) in pairs}  # blocks of keys
        assert sorted(found) == [(h, t) for h in range(n_heads) for t in range(n_tiles)]
        assert lengths == {n_tiles + 1 - n_tiles % 2}


def moved(role, what, to):
    """The role with its third step of a kind, of those that are not the first, moved by `to`."""
    role = list(role)
    at = [i for i, step in enumerate(role) if step.what == what][2]
    role.insert(at + to, role.pop(at))
    return role


def without(role, what, which):
    at = [i for i, step in enumerate(role) if step.what == what][which]
    return [step for i, step in enumerate(role) if i != at]


EARLY, MIXED = "filled while|the phase before its own", "before or after"
FAULTS = [  # way, what check says, which role (two consumers, the producer), its fault
    ("fwd", EARLY, 0, moved, "arrive", -2), ("bwd", EARLY, 0, moved, "arrive", -3),
    ("fwd", EARLY, 2, without, "wait", 6), ("bwd", EARLY, 2, without, "wait", 4),
    ("fwd", MIXED, 0, without, "wait", 1), ("bwd", MIXED, 0, without, "wait", 1),
    ("fwd", MIXED, 1, without, "wait", 2), ("bwd", MIXED, 1, without, "wait", 0),
    ("fwd", "deadlock", 0, without, "arrive", 0), ("bwd", "deadlock", 0, without, "arrive", 0),
]  # fmt: skip


@pytest.mark.parametrize("way", CHECKS)
def test_faults_of_the_protocol_are_found(emulated, way):
    do, *qkv = draw(1, 2 * BLOCK, 1, 1, 64)
    emulated(way, torch.ones_like(do), *qkv, 0.1, programs=1)
    (block,) = emulated.blocks
    for _, message, which, fault, *how in (row for row in FAULTS if row[0] == way):
        broken = list(block.roles)
        broken[which] = fault(broken[which], *how)
        with pytest.raises(AssertionError, match=message):
            check(broken, block.counts)


def fake_gpu(*shape, dtype=torch.bfloat16):
    x = torch.empty(shape, dtype=dtype)
    return SimpleNamespace(
        is_cuda=True, device="cuda", shape=x.shape, dtype=dtype, stride=x.stride,
        element_size=x.element_size, numel=x.numel, data_ptr=x.data_ptr,
    )  # fmt: skip


def test_what_they_cannot_serve_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    x = fake_gpu(2, 128, 4, 64)
    assert peers.refusal_of_hopper(x, x, x) == peers.refusal_of_backward(x) == ""
    assert "causal" in peers.refusal_of_hopper(x, x, x, causal=False)
    for words, tensors in (
        ("as many keys", (x, *[fake_gpu(2, 64, 4, 64)] * 2)),
        ("not 80", [fake_gpu(2, 128, 4, 80)] * 3),
        ("float32", [fake_gpu(2, 128, 4, 64, dtype=torch.float32)] * 3),
        ("16 bytes", [fake_gpu(0, 128, 4, 64)] * 3),
    ):
        assert words in peers.refusal_of_hopper(*tensors)
    assert "head dimension 64, not 128" in peers.refusal_of_backward(fake_gpu(2, 128, 4, 128))
    assert "16 bytes, not T=130" in peers.refusal_of_backward(fake_gpu(2, 130, 4, 64))
    monkeypatch.setattr(peers, "_gluon_found", lambda: False)
    assert "Triton 3.6" in peers.refusal_of_hopper(x, x, x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "sm_90" in peers.refusal_of_hopper(x, x, x)
    with pytest.raises(RuntimeError, match=r"does not: it needs a GPU of sm_90 .*; call attention"):
        peers.attention_forward_hopper(*draw(1, 8, 1, 1, 64)[1:], True, 0.125)
    x = torch.empty(1, 8, 1, 64)
    with pytest.raises(RuntimeError, match=r"attention_backward_hopper: .* sm_90 .*; call att"):
        peers.attention_backward_hopper(*[x] * 5, torch.empty(1, 1, 8), True, 0.125, *[x] * 3)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("T", [1, 4, 128, 300, 1024, 2000])
def test_on_a_gpu(T, D):
    for dtype in HALF:
        do, q, k, v = draw(3, T, 12, 4, D, dtype=dtype, device="cuda")
        why = peers.refusal_of_hopper(q, k, v)
        if why:
            pytest.skip(f"the Hopper forward {why}")
        scale = D**-0.5
        found, again = (peers.attention_forward_hopper(q, k, v, True, scale) for _ in range(2))
        check_fwd(found, do, q, k, v, scale)
        assert all(map(torch.equal, found, again))
        if peers.refusal_of_backward(q):
            continue
        results = [[torch.empty_like(x) for x in (q, k, v)] for _ in range(2)]
        for grads in results:
            peers.attention_backward_hopper(do, q, k, v, *found, True, scale, *grads)
        check_bwd(results[0], do, q, k, v, scale)
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("module", "calls", "mufu"),
    [("attention_hopper", 8, 66), ("attention_hopper_bwd", 4, 32)],  # scores a thread (and 2 rows)
)
def test_exponentials_run_while_a_product_is_in_flight(module, calls, mufu):
    """In both Triton versions' machine code. `make aot` refuses spills and broken products."""
    rows = json.loads((ROOT / "bench" / "results" / "aot" / "table.json").read_text())["rows"]
    rows = [row for row in rows if row["module"] == module]
    assert len({(row["triton"], row["calls"][0]) for row in rows}) == calls
    for row in rows:
        assert row["arch"] == 90
        assert row["overlapped_mufu"] == row["loop_mufu"] == mufu
