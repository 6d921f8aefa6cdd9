"""A backward in two halves: the input's gradient at once, the parameters' gradients later.

    input_gradient()     autograd runs; what parameters get is set aside, and the engine knows
                         nothing of it; weights of linear layers wait (kernels/weight_gradients.py)
    weight_gradients()   the rest is computed, and everything goes into the buckets, as one
                         backward of the engine

So all of a micro-batch's gradients come to the engine at once, in the order of the micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.kernels.weight_gradients import WeightGradients
from fastpar.parallel.engine import Engine


class SplitBackward:
    """Of one micro-batch and one chunk of a pipeline's rank.

    Args:
        params: trained ones that the chunk uses.
    """

    def __init__(self, engine: Engine, chunk: int, params: Sequence[nn.Parameter]) -> None:
        self._engine, self._chunk, self._params = engine, chunk, params
        self._queue = WeightGradients(set(params))
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """The forward runs inside."""
        return self._queue.collect()

    def input_gradient(self, out: Tensor, grad: Tensor | None) -> None:
        """autograd.backward of out, without the gradients that wait. Ranks: all of dp."""
        with self._engine_paused(), self._gathering("backward"), self._set_aside():
            torch.autograd.backward(out, grad)

    @torch.no_grad()
    def weight_gradients(self, kept: dict[Tensor, Tensor]) -> None:
        """The rest, as the engine's next backward. Ranks: all of dp.

        Args:
            kept: gradients of parameters that an earlier chunk completes: those of this chunk are
                added there, or taken from there.
        """
        engine, shards = self._engine, self._engine.shards
        if engine.gathers is not None:
            engine.gathers.part = "weights"  # needs no parameters
        engine.begin_backward()
        for p, grad in self._aside:
            if shards.places[p][0].spec.part != self._chunk:
                kept[p] = kept[p] + grad if p in kept else grad
                continue
            self._give(p, kept.pop(p) + grad if p in kept else grad)
        self._aside.clear()
        for weight, compute in self._queue.run():
            bucket, position = shards.places[weight]  # type: ignore[index]
            self._give(bucket.params[position], compute(bucket.room_for(position)))
        engine.end_backward()

    def _give(self, p: nn.Parameter, grad: Tensor) -> None:
        engine = self._engine
        bucket, position = engine.shards.places[p]
        if bucket.take(position, grad):
            engine.reducer.launch_ready()

    @contextlib.contextmanager
    def _engine_paused(self) -> Iterator[None]:
        self._engine.paused = True
        try:
            yield
        finally:
            self._engine.paused = False

    @contextlib.contextmanager
    def _gathering(self, name: str) -> Iterator[None]:
        gathers = self._engine.gathers
        if gathers is not None:
            gathers.part = self._chunk
            gathers.begin(name)
        yield
        if gathers is not None:
            gathers.end_backward()

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Gradients go to no p.grad; what is there stays as it is."""

        def store(p: Any) -> None:
            if p.grad is not None:  # autograd comes here for those that wait, too
                self._aside.append((p, p.grad))
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
