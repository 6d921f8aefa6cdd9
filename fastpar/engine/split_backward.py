"""A backward in two halves: the input's gradient at once, the parameters' gradients later.

    input_gradient()     autograd runs; what parameters get is set aside, and the engine knows
                         nothing of it; weights of linear layers wait (kernels/weight_gradients.py)
    weight_gradients()   the rest is computed, and everything goes into the buckets, as one
                         backward of the engine

So all of a micro-batch's gradients come to the engine at once, in the order of the micro-batches.

In a backward in one piece such weights' gradients are computed where the buckets keep them: Places.
Where autograd adds all of a later micro-batch's gradients there, no hook has work: adding().
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.engine.bucket import BucketState
from fastpar.engine.engine import Engine
from fastpar.engine.stages import SENT, StepPhase
from fastpar.engine.units import Hook, NotCopied
from fastpar.kernels.weight_gradients import WeightGradients

# Of weights that are offered a place, by type of device. The layer's own backward costs the host
# more than torch's (100 us on a slow core): on a GPU a copy must be large to be worth that, an
# estimate that nobody has measured. A wide place also saves a rounding: 2 MiB takes the layers of
# GPT-2 124M, but for the 768 x 768 projection.
LEAST_BYTES = {"cuda": 32 << 20, "cpu": 0}
LEAST_WIDE_BYTES = {"cuda": 2 << 20, "cpu": 0}


class SplitBackward:
    """Of one micro-batch and one chunk of a pipeline's rank.

    Args:
        params: trained ones that the chunk uses.
    """

    def __init__(self, engine: Engine, chunk: int, params: Sequence[nn.Parameter]) -> None:
        self._engine, self._chunk, self._params = engine, chunk, params
        self._queue = WeightGradients(set(params))
        self._aside: list[tuple[Tensor, Callable[[Tensor | None], Tensor]]] = []

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """The forward runs inside."""
        return self._queue.collect()

    def input_gradient(self, out: Tensor, grad: Tensor | None) -> None:
        """autograd.backward of out, without the gradients that wait. Ranks: all of dp."""
        with self._alone(), self._set_aside():
            torch.autograd.backward(out, grad)

    @torch.no_grad()
    def weight_gradients(self, kept: dict[Tensor, Tensor]) -> None:
        """The rest, as the engine's next backward. Ranks: all of dp.

        Args:
            kept: gradients of a table that another chunk uses too: the later chunk leaves its own
                here, the earlier one, whose backward comes second, takes it.
        """
        engine, shards = self._engine, self._engine.shards
        if engine.gathers is not None:
            engine.gathers.part = "weights"  # needs no parameters
        engine.begin_backward()
        parts: dict[Tensor, list[Callable[[Tensor | None], Tensor]]] = {}
        for p, compute in itertools.chain(self._aside, self._queue.take()):
            parts.setdefault(p, []).append(compute)
        self._aside.clear()
        # Bucket by bucket, so that no more of them are open than in a backward in one piece.
        for p in sorted(parts, key=lambda p: shards.places[p][0].spec.index):  # type: ignore[index]
            computes = parts.pop(p)  # with what it keeps
            bucket, position = shards.places[p]  # type: ignore[index]
            mine = bucket.spec.part == self._chunk
            alone = mine and len(computes) == 1 and p not in kept
            grad = computes[0](bucket.room_for(position) if alone else None)
            for compute in computes[1:]:
                grad.add_(compute(None))
            if p in kept:
                grad = kept.pop(p).add_(grad)
            if not mine:
                kept[p] = grad
            elif bucket.take(position, grad):
                engine.reducer.launch_ready()
        engine.end_backward()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Parameters are gathered, but the engine's hooks do nothing."""
        engine, gathers = self._engine, self._engine.gathers
        if gathers is not None:
            gathers.part = self._chunk
            gathers.begin("backward")
        engine.paused = True
        try:
            yield
        finally:
            engine.paused = False
        if gathers is not None:
            gathers.end_backward()

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Gradients go to no p.grad; what is there stays as it is."""

        def store(p: Any) -> None:
            if p.grad is not None:  # autograd comes here for those that wait, too
                self._aside.append((p, _made(p.grad)))
                p.grad = None

        before = [(p, p.grad) for p in self._params]
        hooks = [p.register_post_accumulate_grad_hook(store) for p in self._params]
        for p in self._params:
            p.grad = None
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for p, grad in before:
                p.grad = grad


def _made(grad: Tensor) -> Callable[[Tensor | None], Tensor]:
    return lambda _: grad


class Places(NotCopied):
    """Offers the memory of the buckets to layers' backward passes; see weight_gradients.py.

    Where it is None, take() copies or adds: a second gradient of a weight, one of another dtype.
    Not to who may keep what he is given: hooks of others, torch.autograd.grad. A wide place takes
    every gradient; in deterministic mode none is offered, as not all layers use them.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)
        self._task = -1
        self._given: set[tuple[int, int]] = set()  # bucket and position, in this backward

    @classmethod
    def offer(cls, engine: Engine) -> None:
        """To all weights of LEAST_BYTES whose gradients the buckets keep in their dtype, and to
        those of 16 bits and LEAST_WIDE_BYTES where gradients are fp32. A table that two stages of a
        pipeline have gets no wide one: the halves of a split backward would not use it."""
        places, wide = cls(engine), not engine.settings.deterministic
        stages = engine.shards.stages
        tied = set() if stages is None else set(stages.tied)
        for bucket in engine.buckets:
            kind, own, grad = bucket.device.type, bucket.spec.dtype, bucket.grad_dtype
            wide_here = wide and own.itemsize == 2 and grad == torch.float32
            for p, slot in zip(bucket.params, bucket.slots):
                n_bytes = slot.spec.numel * own.itemsize
                if grad == own and n_bytes >= LEAST_BYTES.get(kind, 0):
                    p.fastpar_place = places  # type: ignore[attr-defined]
                elif wide_here and p not in tied and n_bytes >= LEAST_WIDE_BYTES.get(kind, 0):
                    p.fastpar_wide_place = places  # type: ignore[attr-defined]

    def __call__(self, weight: Tensor) -> tuple[Tensor, bool] | None:
        engine = None if self._engine is None else self._engine()
        if engine is not None and engine.recorder is not None:
            return engine.recorder(weight)
        if engine is None or (engine.paused and not engine.adds):
            return None
        bucket, position = engine.shards.places[weight]  # type: ignore[index]
        hooks, wide = weight._backward_hooks or {}, bucket.grad_dtype != bucket.spec.dtype
        if position in bucket.has and not (wide or engine.adds):
            return None  # take() will add: said first, later micro-batches ask often
        if not _fires(weight) or not all(isinstance(hook, Hook) for hook in hooks.values()):
            return None
        if engine.adds:
            after: dict = weight._post_accumulate_grad_hooks or {}
            ours = all(isinstance(hook, Hook) for hook in after.values())
            return (bucket.grad_views[position], True) if ours else None
        if wide:  # also the first gradient of a backward, which no hook has told of
            engine.before_unit_backward()
        task = torch._C._current_graph_task_id()
        begun = engine.phase is StepPhase.BACKWARD and task == engine.graph_task
        if not begun or bucket.phase in SENT:
            return None
        if wide:
            return _wide_room(bucket, position)
        if task != self._task:
            self._task = task
            self._given.clear()
        if (bucket.spec.index, position) in self._given:
            return None
        place = bucket.room_for(position)
        if place is None:
            return None
        self._given.add((bucket.spec.index, position))
        return place.view_as(place), False  # autograd keeps it as p.grad if nobody else has it


@contextlib.contextmanager
def adding(engine: Engine, chunk: int) -> Iterator[None]:
    """A backward of a chunk inside; not of the last micro-batch: the reductions need its hooks."""
    shards, before = engine.shards, engine.paused
    used = shards.params if shards.stages is None else shards.stages.used[chunk]
    kept = (_is_kept(*shards.places[p]) for p in used if p.requires_grad)
    engine.adds = not (before or engine.micro_batches.last) and all(kept)
    engine.paused = before or engine.adds
    try:
        yield
    finally:
        engine.paused, engine.adds = before, False


def _is_kept(bucket: BucketState, position: int) -> bool:
    """Whether p.grad is where the bucket keeps gradients, and autograd adds to it there."""
    if bucket.stage.shards or position not in bucket.has:
        return False
    return bucket.params[position].grad is bucket.grad_views[position]


def _wide_room(bucket: BucketState, position: int) -> tuple[Tensor, bool]:
    """Where the caller writes a gradient, or adds it to those that are there: whether he adds.

    From now on it is there. The hook of the parameter, with p.grad = None, says that no other comes
    (where torch calls it then: otherwise the bucket is sent at the end of the backward).
    """
    bucket.copies.make()
    bucket.open_grad()
    add = position in bucket.has
    bucket.has.add(position)
    bucket.seen.add(position)
    return bucket.grad_view(position), add


def _fires(weight: Tensor) -> bool:
    """Whether this backward gives weight a .grad."""
    try:
        accumulate = torch.autograd.graph.get_gradient_edge(weight).node
        return torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # torch.autograd.grad of a leaf
        return False
