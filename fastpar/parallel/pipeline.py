"""fastpar.pipeline_step: the micro-batches of one optimizer step through the stages of a pipeline.

    F of micro-batch i:  receive the stream -> forward of this rank's parts -> send the stream
    B of micro-batch i:  receive its gradient -> backward -> send the gradient of what was received

[Note: order] Every schedule runs the backward passes of a stage in the order of the micro-batches,
so that sums over them are those of one process. A message's tag is its micro-batch. Receives are
posted one operation ahead; the gradient of the stream is sent as soon as autograd has it, before
the backward, and the reductions in it, come to their end: the first stage of a tied table waits
for it while the last one waits for the first's part of the sum.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm.handles import Handle, started
from fastpar.parallel.engine import Engine, engine_of
from fastpar.pipeline.schedules import Kind, Op, make_schedule
from fastpar.pipeline.stages import Stages

SCHEDULES = ("gpipe", "1f1b")  # those that need neither chunks nor a split backward


def pipeline_step(
    model: nn.Module,
    idx: Tensor,
    targets: Tensor,
    *,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    reduction: str = "mean",
    rng_keys: Sequence[Tensor] | None = None,
    target: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Tensor:
    """The forwards and backward passes of one optimizer step; optimizer.step() comes after it.

    Works with pp=1 too, as a loop over the micro-batches.

    Args:
        model: went through parallelize().
        idx, targets: [B, T] of this rank's dp place, the same on all of its stages.
        micro_batches: equal slices of B that go through the stages one behind another.
        schedule: "1f1b" holds as many micro-batches as there are stages, "gpipe" all of them.
        reduction: gradients are those of the "mean" of the micro-batches' mean losses, or of the
            "sum" of the losses of all tokens (with engine.count_tokens).
        rng_keys: of dropout, one a micro-batch; None: drawn from torch's generator of the first
            stage, as one process would.
        target: what is differentiated instead of a micro-batch's part of the loss: a loss scale.
    Returns:
        That mean or sum, fp64 [] without gradient, the same on every stage.
    Ranks: all, with the same arguments but idx and targets.
    Wire: the stream [B, T, C], and its gradient back, a boundary.
    Raises:
        ValueError: on every rank, micro_batches that do not divide B; an unknown schedule or
            reduction; other targets or keys than one a token and one a micro-batch.
    """
    _check(idx, targets, micro_batches, schedule, reduction, rng_keys)
    engine, many = engine_of(model), micro_batches
    gpt: Any = model
    keys = gpt.draw_keys(many, idx.device) if rng_keys is None else torch.stack([*rng_keys])
    if rng_keys is None and keys is not None:
        engine.mesh.broadcast_([keys], "pp", "tp")
    each = [None] * many if keys is None else list(keys)
    step = _Step(gpt, engine, idx.chunk(many), targets.chunk(many), each, reduction, target)
    ops = make_schedule(schedule, engine.mesh.size("pp"), many).ops
    return step.run(ops[engine.mesh.rank_in("pp")])


@torch.no_grad()
def pipeline_loss(
    model: nn.Module, idx: Tensor, targets: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """The loss alone, without gradients: for validation. Works with pp=1 too.

    Args:
        model, idx, targets, reduction: as in pipeline_step; model.eval() leaves dropout out.
    Returns:
        fp64 [], the same on every stage.
    Ranks: all. Wire: the stream [B, T, C], a boundary.
    Raises:
        ValueError: as pipeline_step.
    """
    _check(idx, targets, 1, SCHEDULES[0], reduction, None)
    gpt: Any = model
    step = _Step(gpt, engine_of(model), [idx], [targets], [None], reduction)
    return step.run([Op(Kind.FORWARD, 0, 0)])


def _check(
    idx: Tensor,
    targets: Tensor,
    micro_batches: int,
    schedule: str,
    reduction: str,
    rng_keys: Sequence[Tensor] | None,
) -> None:
    """What one stage alone would refuse while the others wait for its message."""
    if schedule not in SCHEDULES:
        raise ValueError(
            f"pipeline_step: expected schedule to be one of {', '.join(SCHEDULES)}, got "
            f"schedule={schedule!r}; choose one of these"
        )
    if micro_batches < 1 or idx.shape[0] % micro_batches:
        raise ValueError(
            f"pipeline_step: expected micro_batches to divide the {idx.shape[0]} rows of the batch,"
            f" got micro_batches={micro_batches}; choose a divisor"
        )
    if idx.dim() != 2 or targets.shape != idx.shape:
        raise ValueError(
            "pipeline_step: expected idx [B, T] and targets of its shape, got "
            f"idx={list(idx.shape)} targets={list(targets.shape)}; pass one target a token"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"pipeline_step: expected reduction mean or sum, got reduction={reduction!r}; choose "
            "one of these"
        )
    if rng_keys is not None and len(rng_keys) != micro_batches:
        raise ValueError(
            f"pipeline_step: expected rng_keys for {micro_batches} micro-batches, got "
            f"{len(rng_keys)}; pass one for each, or none"
        )


class _Step:
    """One step on one rank; see [Note: order]."""

    def __init__(
        self,
        model: Any,
        engine: Engine,
        idx: Sequence[Tensor],
        targets: Sequence[Tensor],
        keys: Sequence[Tensor | None],
        reduction: str,
        target: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> None:
        self.model, self.engine, self.keys, self.target = model, engine, keys, target
        self.idx, self.targets = idx, targets
        self.stages: Stages | None = engine.shards.stages
        self.first = self.stages is None or self.stages.first
        self.last = self.stages is None or self.stages.last
        self.reduction = reduction
        self.loss = torch.zeros((), dtype=torch.float64, device=idx[0].device)
        self.held: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.posted: dict[Op, tuple[Tensor, Handle]] = {}
        self.sent: deque[Handle] = deque()

    def run(self, ops: Sequence[Op]) -> Tensor:
        """The loss, on every stage."""
        with contextlib.ExitStack() as hooks:
            for p in self._summed_each_time():
                hooks.callback(p.register_hook(self._joined).remove)
            for op, following in zip(ops, [*ops[1:], None]):
                received = self._received(op)
                self._post(following)
                if op.kind is Kind.FORWARD:
                    self._forward(op.micro, received)
                else:
                    self._backward(op.micro, received)
        while self.sent:
            self.sent.popleft().wait()
        if self.stages is not None:
            self.stages.onward.broadcast(self.loss, self.stages.onward.world_size - 1)
        return self.loss

    def _forward(self, micro: int, stream: Tensor | None) -> None:
        given: dict[str, Any] = {}
        if self.stages is not None:
            given = {"parts": self.stages.parts, "stream": stream}
        if stream is not None:
            stream.requires_grad_(torch.is_grad_enabled())
        targets = self.targets[micro] if self.last else None
        out = self.model(
            self.idx[micro],
            targets,
            rng_key=self.keys[micro],
            reduction=self.reduction,
            **given,
        )
        if self.last:
            part = out / len(self.idx) if self.reduction == "mean" else out
            self.loss += part.detach()
            out = self.target(part)
        else:
            assert self.stages is not None
            self._send(self.stages.onward, out.detach(), +1, micro)
        if torch.is_grad_enabled():
            self.held[micro] = stream, out

    def _backward(self, micro: int, grad: Tensor | None) -> None:
        settings = self.engine.settings
        stream, out = self.held.pop(micro)
        each = settings.accumulate == "shard" and settings.stage.frees_gradients
        self.engine.begin_micro_batch(last=each or micro == len(self.idx) - 1)
        if stream is not None:
            stages = self.stages
            assert stages is not None

            def send(x: Tensor) -> None:
                assert x.grad is not None
                self._send(stages.back, x.grad, -1, micro)
                x.grad = None

            stream.register_post_accumulate_grad_hook(send)
        self._micro = micro
        torch.autograd.backward(out, grad)

    # Messages

    def _received(self, op: Op) -> Tensor | None:
        self._post(op)
        if op not in self.posted:
            return None
        x, handle = self.posted.pop(op)
        handle.wait()
        return x

    def _post(self, op: Op | None) -> None:
        """Begin to receive what an operation needs, if it needs a message."""
        stages = self.stages
        if op is None or stages is None or op in self.posted:
            return
        forward = op.kind is Kind.FORWARD
        if self.first if forward else self.last:
            return
        group, by = (stages.onward, -1) if forward else (stages.back, +1)
        x = self.model.new_stream(self.idx[op.micro])
        handle = group.recv(x, group.rank + by, async_op=True, tag=op.micro)
        self.posted[op] = x, started(handle)

    def _send(self, group: Any, x: Tensor, by: int, micro: int) -> None:
        handle = group.send(x.contiguous(), group.rank + by, async_op=True, tag=micro)
        self.sent.append(started(handle))
        while len(self.sent) > 4:
            self.sent.popleft().wait()

    # Tied tables

    def _summed_each_time(self) -> Sequence[Tensor]:
        """Deterministic: see pipeline/stages.py, [Note: a table on two stages]."""
        if self.stages is None or not self.engine.settings.deterministic:
            return ()
        return list(self.stages.tied)

    def _joined(self, grad: Tensor) -> Tensor:
        assert self.stages is not None
        pair = self.stages.pair
        assert pair is not None
        if self.first:
            other = torch.empty_like(grad, memory_format=torch.contiguous_format)
            pair.recv(other, 1, tag=self._micro)
            return grad + other
        self.sent.append(started(pair.send(grad.contiguous(), 0, async_op=True, tag=self._micro)))
        return torch.zeros_like(grad)
