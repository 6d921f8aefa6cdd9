"""bucket_mb="auto": the bucket size that makes the steps of this run fastest, measured by them.

[Note: cutting anew]
Between zero_grad() and the next backward there are no gradients, and every other tensor is known:
parameters are whole or can be gathered, the optimizer's entries can be made whole one at a time. So
the buckets of one size can be replaced by those of another without a change of any value. Buckets
of all sizes are cut from the same memory (a transport's memory cannot be given back): meanwhile the
parameters are copied aside. In deterministic mode sums do not depend on buckets, so that the run
has the bits of any fixed size (test_auto_has_the_bits_of_a_fixed_size).
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fastpar.buffers import BucketState
from fastpar.collectives import Collectives
from fastpar.layout import Layout
from fastpar.optim_state import cut_entry, whole_entry

if TYPE_CHECKING:
    from fastpar.engine import Engine

FACTORS = (0.25, 4.0)  # of the default size, which is where a run begins
STEPS = 4  # of each size; the first is not timed, it touches new memory
_ALIGNMENT = 4096


class Arena:
    """Memory of a transport from which buckets are cut again and again; None: plain memory."""

    def __init__(self, group: Collectives | None, n_bytes: int) -> None:
        self._memory = None if group is None else group.empty(n_bytes, torch.uint8)
        self._used = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], its values unknown."""
        assert self._memory is not None
        start, self._used = self._used, self._used + _padded(numel * dtype.itemsize)
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)

    def reset(self) -> None:
        """What was cut is not used any more."""
        self._used = 0


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


class Arenas(NamedTuple):
    """Of gradients and of parameters; they stand in for the groups whose memory it is."""

    reduce: Arena
    gather: Arena

    @classmethod
    def of(
        cls, groups: Any, stage: int, layouts: Sequence[Layout], grad_dtype: torch.dtype | None
    ) -> Arenas:
        """Enough for any of the layouts, and for what buckets of this stage keep there."""

        def make(group: Collectives | None, dtype: torch.dtype | None) -> Arena:
            sizes = [
                sum(_padded(b.numel * (dtype or b.dtype).itemsize) for b in layout.buckets)
                for layout in layouts
            ]
            return Arena(group, max(sizes))

        return cls(
            make(groups.reduce if stage <= 1 else None, grad_dtype),
            make(groups.gather if stage >= 1 else None, None),
        )


def candidates(
    first: dict[float, Layout], lay_out: Callable[[float], Layout]
) -> dict[float, Layout]:
    """The layouts to measure by their bucket size, first the default one; none twice."""
    (default,) = first
    found = dict(first)
    for factor in FACTORS:
        layout = lay_out(default * factor)
        if layout not in found.values():
            found[default * factor] = layout
    return found


Fill = Callable[[torch.nn.Parameter, Tensor], object]
Buckets = list[BucketState]


class AutoBucket:
    """Measures the bucket sizes of one engine in turn, then keeps the best.

    Args:
        layouts: bucket size in MiB -> layout; the engine runs the first.
        make: makes the buckets of a layout in memory of the arenas; by_unit: sorts them.
    Ranks: all; zero_grad() is collective until the choice is made.
    """

    def __init__(
        self,
        engine: Engine,
        layouts: dict[float, Layout],
        make: Callable[[Layout, Fill], Buckets],
        by_unit: Callable[[Buckets], list[Buckets]],
        arenas: Arenas,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._layouts, self._arenas = layouts, arenas
        self._make, self._by_unit = make, by_unit
        self._untried = list(layouts)[1:]
        self.bucket_mb = next(iter(layouts))
        self.times_ms: dict[float, float] = {}
        self._optimizers: list[weakref.ref[Any]] = []  # in the same order on every rank
        self._mark = _mark  # the clock
        self._marks: list[Any] = []  # what it said
        self._n_reductions = 0
        self.done = False

    def add(self, optimizer: Any) -> None:
        """It has entries for pieces of this engine's parameters."""
        if not any(known() is optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def next_step(self) -> None:
        """A step is over and its gradients are forgotten."""
        engine = self._engine()
        if self.done or engine is None or engine.n_reductions == self._n_reductions:
            return  # not a step's zero_grad
        self._n_reductions = engine.n_reductions
        self._marks.append(self._mark(engine.mesh.device))
        if len(self._marks) < STEPS:
            return
        gaps = [_ms(a, b) for a, b in zip(self._marks, self._marks[1:])]
        self.times_ms[self.bucket_mb] = statistics.median(gaps)
        self._marks.clear()
        if self._untried:
            self._cut(engine, self._untried.pop(0))
            return
        self._agree(engine)
        best = min(self.times_ms, key=lambda mb: self.times_ms[mb])
        if best != self.bucket_mb:
            self._cut(engine, best)
        self.done = True
        if engine.mesh.is_main:
            print(f"fastpar: {self}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        if not self.done:
            return f"bucket_mb=auto: measuring {self.bucket_mb:g}"
        times = ", ".join(f"{mb:g} {ms:.1f}" for mb, ms in self.times_ms.items())
        return f"bucket_mb=auto: {self.bucket_mb:g} (size and ms of a step: {times})"

    def _agree(self, engine: Engine) -> None:
        """A step lasts as long as the slowest rank's; every rank knows the same times."""
        world = engine.mesh.world_size
        mine = torch.zeros(world, len(self.times_ms), dtype=torch.float64)
        mine[engine.mesh.rank] = torch.tensor(list(self.times_ms.values()))
        everyone = engine.all_reduce_scalars(mine.to(engine.mesh.device).view(-1))
        slowest = everyone.view(world, -1).amax(0).tolist()
        self.times_ms = dict(zip(self.times_ms, slowest))

    @torch.no_grad()
    def _cut(self, engine: Engine, bucket_mb: float) -> None:
        """See [Note: cutting anew]."""
        new = self._layouts[bucket_mb]
        optimizers = [optimizer for known in self._optimizers if (optimizer := known()) is not None]
        for optimizer in optimizers if engine.zero_stage else ():
            for p in engine.params:
                for name, value in list(optimizer.state.get(p, {}).items()):
                    whole = whole_entry(name, value, p, engine, along_tp=False)
                    with _laid_out(engine, new):
                        cut = cut_entry(name, whole, p, engine, along_tp=False)
                    optimizer.state[p][name] = cut
        with engine.gathered():
            values = {p: p.detach().clone() for p in engine.params}
        for arena in self._arenas:
            arena.reset()
        buckets = self._make(new, lambda p, view: view.copy_(values.pop(p)))
        engine.use(new, buckets)
        if engine.gathers is not None:
            engine.gathers.buckets = self._by_unit(buckets)
        if engine.split is not None:
            engine.split.bucket = buckets[0]
        self.bucket_mb = bucket_mb


@contextlib.contextmanager
def _laid_out(engine: Engine, layout: Layout) -> Iterator[None]:
    """Pieces are those of another layout inside."""
    before = engine.layout, engine._index
    registered = {slot.registered: p for slot, p in zip(engine.layout.slots, engine.params)}
    engine.layout = layout
    engine._index = {registered[slot.registered]: i for i, slot in enumerate(layout.slots)}
    try:
        yield
    finally:
        engine.layout, engine._index = before


def _mark(device: torch.device) -> Any:
    """Now: on a GPU, when it gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ms(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return (end - start) * 1e3
    end.synchronize()
    return start.elapsed_time(end)
