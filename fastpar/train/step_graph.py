"""A whole step as one CUDA graph: the micro-batches of cuda_graphs.py, the norm, AdamW's update.

    tokens, dropout keys, learning rates, loss scale    filled before a replay
        forward and backward of each micro-batch        gradients into the buckets
        norm, clip factor, overflow flag
        AdamW's update, its step counters
    loss and norm                                       read after it

[Note: one rank] The graph has what a rank does alone. Where others take part, in the reduction of
gradients and in the exchange of a step, the host starts collectives, times them by events and may
wait for them; then micro-batches are captured, each alone (why_micro_batches).

[Note: what is told] The engine hears of a replay that a step took time, and no more: a step begins
and ends without gradients, so that its phases and buckets are after one what they were before.

[Note: first steps] All of them are steps of the run, in the memory of the graph: two as ever, which
make the optimizer's state and prove kernels; one under the capture check; from the next one on the
graph is replayed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.optim.adamw import AdamW
from fastpar.optim.base import EngineOptimizer, Row
from fastpar.parallel.engine import Engine
from fastpar.train.capture_check import CaptureCheck
from fastpar.train.cuda_graphs import (
    HookCheck,
    MicroBatchGraphs,
    capture,
    check_device,
    has_graphs,
    place_of,
    recording,
)
from fastpar.train.journal import to_device

_CHECKED = 3  # the step that runs under the capture check


def why_micro_batches(model: nn.Module, engine: Engine, optimizer: EngineOptimizer) -> str:
    """Why only micro-batches can be captured and not the whole step; "" where the step can."""
    if getattr(model, "experts", None) is not None:
        return "the counts of experts go through the exchange of a step"
    if engine.mesh.world_size > 1:
        return "the host starts what ranks send"
    if engine.settings.deterministic:
        return "the host adds micro-batches up in a tree"
    if type(optimizer) is not AdamW:
        return f"{type(optimizer).__name__} reads its numbers on the host"
    return ""


def captured(
    compute: Callable[..., Tensor],
    model: nn.Module,
    engine: Engine,
    optimizer: EngineOptimizer,
    asked: bool | None,
) -> tuple[Callable[..., Tensor], StepGraph | None, str]:
    """(what computes a micro-batch, the graph of whole steps, in words what is captured, or "").

    asked: whether to capture; None: whole steps, where that can be.
    """
    why = why_micro_batches(model, engine, optimizer)
    if not asked and (asked is False or why or not has_graphs(engine.mesh.device)):
        return compute, None, ""
    if why:
        return MicroBatchGraphs(compute, model, engine), None, f"of a micro-batch, as {why}"
    return compute, StepGraph(compute, model, engine, optimizer), "of a whole step"


class StepGraph:
    """Calls run a step of compute(*inputs, scale), which runs a forward and backward of model and
    returns the loss, and of the optimizer, whose gradients it leaves at None.

    Args:
        compute: takes the tensors of a micro-batch and the loss scale, a tensor or None.
        engine: of the model, one for which why_micro_batches() knows no reason.
    Attributes:
        loss: fp64 [], sum over the micro-batches of the last step; norm: of its gradients, if the
            optimizer measures it.
    Raises:
        ValueError: no GPU; micro-batches of other shapes than the first step's; hooks of others
            than the engine.
        RuntimeError: a parameter without a gradient; what the capture check finds.
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        model: nn.Module,
        engine: Engine,
        optimizer: EngineOptimizer,
    ) -> None:
        self._device = device = engine.mesh.device
        check_device(device)
        self._compute, self._model, self._engine = compute, model, engine
        self._optimizer, self._hooks = optimizer, HookCheck(model, engine)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.norm = torch.zeros((), device=device, dtype=torch.float32)
        self._found = torch.zeros((), device=device, dtype=torch.float32)
        self._scale = torch.ones((), device=device, dtype=torch.float32)
        self._lrs = torch.zeros(len(optimizer.param_groups), device=device, dtype=torch.float32)
        self._batches: list[list[Tensor]] = []
        self._scaled = False  # by a loss scale
        self._steps = 0
        self._replay: Callable[[], None] | None = None

    def why_not(self, batches: Sequence[tuple[Tensor, ...]], scale: float | None) -> str:
        """Why this step cannot be the graph's, before anything has changed; "" where it can."""
        try:
            self.fill(batches, scale)
            if self._steps == _CHECKED - 1:
                with CaptureCheck(self._static()):
                    self._forwards()
        except (ValueError, RuntimeError) as error:
            return str(error).partition("; ")[0]
        return ""

    def __call__(self, batches: Sequence[tuple[Tensor, ...]], scale: float | None) -> Tensor:
        """The loss, valid until the next call, as grad_norm of the optimizer is."""
        self.fill(batches, scale)
        return self.run()

    def run(self) -> Tensor:
        """A step of what fill() was given."""
        if self._scaled:
            self._optimizer.grad_scale = self._scale
        log = self._engine.log
        log.timer.begin()
        self._steps += 1
        if self._steps < _CHECKED:
            self._region()
        elif self._steps == _CHECKED:
            with CaptureCheck(self._static()):
                self._region()
        else:
            if self._replay is None:
                self._replay = capture(self._region, self._forwards, None).replay
            self._replay()
        log.n_reductions += 1
        self._engine.report = log.timer.end_step()
        return self.loss

    def fill(self, batches: Sequence[tuple[Tensor, ...]], scale: float | None) -> None:
        """Take the inputs of a step over; raises ValueError where they are no step of the graph."""
        self._hooks.refuse()
        if not self._batches:
            self._batches = [[place_of(x, self._device) for x in batch] for batch in batches]
            self._scaled = scale is not None
        shapes, got = ([[x.shape for x in batch] for batch in b] for b in (self._batches, batches))
        if shapes != got or self._scaled != (scale is not None):
            raise ValueError(
                "train: expected every step like the first one with cuda_graphs, got micro-batches "
                f"of {[list(s) for s in got[0]]}, {len(got)} of them, where the first had "
                f"{[list(s) for s in shapes[0]]}, {len(shapes)} of them; pad them to one shape, or "
                "leave --cuda-graphs out"
            )
        for places, batch in zip(self._batches, batches):
            for place, x in zip(places, batch):
                place.copy_(x)
        if scale is not None:
            self._scale.fill_(scale)
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        self._lrs.copy_(
            to_device(torch.tensor(lrs, dtype=torch.float32, device="cpu"), self._device)
        )

    def _region(self) -> None:
        """A step, by what the host does in every step and the graph holds."""
        self.loss.zero_()
        for j in range(len(self._batches)):
            with recording(self._engine, adds=j > 0) as fired:
                self.loss.add_(self._backward(j))
            missing = set(self._engine.shards.params).difference(fired)
            if missing:
                bucket, position = self._engine.shards.places[missing.pop()]
                raise RuntimeError(
                    "StepGraph: expected a gradient of every parameter, got none of "
                    f"'{bucket.name(position)}'; use all parameters in every forward, or train "
                    "without CUDA graphs"
                )
        optimizer = self._optimizer
        with self._on_device():
            optimizer.step_rows(self._rows())
        # Nothing that is made here may be used after the next replay.
        if optimizer.grad_norm is not None:
            optimizer.grad_norm = self.norm.copy_(optimizer.grad_norm)
        if optimizer._found is not None:
            optimizer._found = self._found.copy_(optimizer._found)

    def _forwards(self) -> None:
        """Before a capture, on the stream beside: what changes nothing."""
        with recording(self._engine, adds=None):
            self._backward(0)

    def _backward(self, j: int) -> Tensor:
        return self._compute(*self._batches[j], self._scale if self._scaled else None)

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        for i, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                bucket, position = self._engine.shards.places[p]
                grad = bucket.grad_views[position]
                rows.append(Row(p, p, grad, i, len(rows), 0, self._engine))
        return rows

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """The kernel reads what changes from step to step."""
        kept: list[dict[str, Any]] = []
        for group, lr in zip(self._optimizer.param_groups, self._lrs):
            kept.append({n: group[n] for n in ("lr", "capturable")})
            group.update(lr=lr, capturable=True)
        try:
            yield
        finally:
            for group, options in zip(self._optimizer.param_groups, kept):
                group.update(options)

    def _static(self) -> list[Tensor]:
        state = [x for s in self._optimizer.state.values() for x in s.values()]
        mine = [self.loss, self.norm, self._found, self._scale, self._lrs]
        grads = [bucket.grad for bucket in self._engine.buckets]
        inputs = [x for batch in self._batches for x in batch]
        known = [*self._model.parameters(), *self._model.buffers(), *mine, *inputs]
        return [*known, *(x for x in (*state, *grads) if isinstance(x, Tensor))]
