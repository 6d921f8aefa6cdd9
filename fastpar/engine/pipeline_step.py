"""fastpar.pipeline_step: the micro-batches of one optimizer step through the stages of a pipeline.

    F of micro-batch i:  receive the stream -> forward of a chunk's parts -> send the stream
    B of micro-batch i:  receive its gradient -> backward -> send the gradient of what was received

Order: every schedule runs the backward passes of a stage in the order of the micro-batches, so that
sums over them are those of one process. A message's tag is the receiving stage and its micro-batch.
Receives are posted one operation ahead. The gradient of the stream is sent as soon as autograd has
it, before the backward and its reductions end: the first stage of a tied table waits for it while
the last one waits for the first's part of the sum. No rank waits for a send.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes.pipeline.schedules import Kind, Op, Schedule, check_name, make_schedule
from fastpar.axes.pipeline.stages import Stages
from fastpar.comm.collectives import Handle, started
from fastpar.comm.recorder import BACKWARD, FORWARD
from fastpar.comm.watchdog import in_place
from fastpar.engine.engine import Engine, engine_of


def pipeline_step(
    model: nn.Module,
    idx: Tensor,
    targets: Tensor,
    *,
    micro_batches: int = 1,
    schedule: str | None = None,
    reduction: str = "mean",
    rng_keys: Sequence[Tensor] | None = None,
    target: Callable[[Tensor], Tensor] = lambda loss: loss,
    positions: Tensor | None = None,
) -> Tensor:
    """Run the forwards and backward passes of one optimizer step; then call optimizer.step().

    Works with pp=1 too, as a loop over the micro-batches.

    Args:
        model: went through parallelize().
        idx, targets: [B, T] of this dp rank, the same on all its ranks of pp, tp and cp.
        micro_batches: number of equal slices of B, which go through the stages one after another.
        schedule: a schedule with the same placement of stages as parallelize()'s: "gpipe" and
            "1f1b" share one. Default: parallelize()'s.
        reduction: gradients of the "mean" of the micro-batches' mean losses, or of the "sum" of all
            tokens' losses (with engine.count_tokens).
        rng_keys: keys of dropout, one per micro-batch. Default: drawn from torch's generator on the
            first stage, as one process would.
        target: maps a micro-batch's part of the loss to what is differentiated (a loss scale).
        positions: [B, T], of packed documents: see GPT.forward.
    Returns:
        The mean or sum, fp64 [] without gradient, the same on every stage.
    Ranks: all, with the same arguments except idx and targets.
    Wire: the stream [B, T, C] and its gradient, per stage boundary.
    Raises:
        ValueError: on every rank: micro_batches that do not divide B; an unknown schedule or one
            with another placement; an unknown reduction; targets, positions or keys of another
            shape or number.
    """
    _check("pipeline_step", idx, targets, micro_batches, reduction, rng_keys, positions)
    engine, many = engine_of(model), micro_batches
    for check in engine.input_checks:
        check.look(model, (), {"idx": idx, "targets": targets})
    ops = _schedule(engine, many, schedule)
    gpt: Any = model
    keys = gpt.draw_keys(many, idx.device) if rng_keys is None else torch.stack([*rng_keys])
    if rng_keys is None and keys is not None:
        engine.mesh.broadcast_([keys], "pp", "cp", "tp")
    each = [{"rng_key": None if keys is None else keys[i]} for i in range(many)]
    if positions is not None:
        each = [{**one, "positions": part} for one, part in zip(each, positions.chunk(many))]
    return PipelineStep(
        gpt, engine, ops, idx.chunk(many), targets.chunk(many), each, reduction, target
    ).run(ops.ops[engine.mesh.rank_in("pp")])


def _schedule(engine: Engine, micro_batches: int, name: str | None) -> Schedule:
    """The schedule of this step."""
    stages = engine.shards.stages
    if name is not None:
        check_name(name, caller="pipeline_step")
    if stages is None:
        return make_schedule("1f1b", 1, micro_batches)
    placed, name = stages.schedule, name or stages.schedule.name
    chunks = placed.chunks if name in ("interleaved", placed.name) else None
    found = make_schedule(name, placed.ranks, micro_batches, chunks, caller="pipeline_step")
    here, there = ([s.owner(i) for i in range(s.stages)] for s in (placed, found))
    if here != there:
        raise ValueError(
            f"pipeline_step: schedule={name!r} places stages in another way than "
            f"parallelize()'s schedule={placed.name!r} ({placed.chunks} per rank); pass "
            f"pipeline=Pipeline(schedule={name!r}) to parallelize()"
        )
    return found


@torch.no_grad()
def pipeline_loss(
    model: nn.Module, idx: Tensor, targets: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """The loss without gradients, for validation. Works with pp=1 too.

    Args:
        model, idx, targets, reduction: as in pipeline_step; model.eval() leaves dropout out.
    Returns:
        fp64 [], the same on every stage.
    Ranks: all. Wire: the stream [B, T, C], per stage boundary.
    Raises:
        ValueError: as pipeline_step.
    """
    _check("pipeline_loss", idx, targets, 1, reduction, None, None)
    gpt: Any = model
    engine = engine_of(model)
    schedule = _schedule(engine, 1, None)
    step = PipelineStep(gpt, engine, schedule, [idx], [targets], [{}], reduction)
    return step.run([Op(Kind.FORWARD, chunk, 0) for chunk in range(schedule.chunks)])


def _check(
    caller: str,
    idx: Tensor,
    targets: Tensor,
    micro_batches: int,
    reduction: str,
    rng_keys: Sequence[Tensor] | None,
    positions: Tensor | None,
) -> None:
    """Check on all ranks what one stage alone would refuse while others wait for its message."""
    if not isinstance(micro_batches, int) or micro_batches < 1 or idx.shape[0] % micro_batches:
        raise ValueError(
            f"{caller}: expected micro_batches to divide the {idx.shape[0]} rows of the batch,"
            f" got micro_batches={micro_batches}; choose a whole number that divides them"
        )
    if idx.dim() != 2 or targets.shape != idx.shape:
        raise ValueError(
            f"{caller}: expected idx [B, T] and targets of the same shape, got "
            f"idx={list(idx.shape)} targets={list(targets.shape)}; pass one target per token"
        )
    if positions is not None and positions.shape != idx.shape:
        raise ValueError(
            f"{caller}: expected positions of idx's shape {list(idx.shape)}, got positions="
            f"{list(positions.shape)}; pass one position per token"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"{caller}: expected reduction mean or sum, got reduction={reduction!r}; choose "
            "one of these"
        )
    if rng_keys is not None and len(rng_keys) != micro_batches:
        raise ValueError(
            f"{caller}: expected rng_keys for {micro_batches} micro-batches, got "
            f"{len(rng_keys)}; pass one for each, or none"
        )


@dataclass
class PipelineStep:
    """One step on one rank; options: arguments of the forward of each micro-batch."""

    model: Any
    engine: Engine
    schedule: Schedule
    idx: Sequence[Tensor]
    targets: Sequence[Tensor]
    options: Sequence[dict[str, Any]]
    reduction: str
    target: Callable[[Tensor], Tensor] = lambda loss: loss

    def __post_init__(self) -> None:
        self.stages: Stages | None = self.engine.shards.stages
        self.rank = self.engine.mesh.rank_in("pp")
        self.exact = self.stages is not None and self.engine.settings.deterministic
        drops = self.options[0].get("rng_key") is not None
        self.pairs = self.exact and drops and getattr(self.model, "needs_pairs", False)
        self.loss = torch.zeros((), dtype=torch.float64, device=self.idx[0].device)
        self.held: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.posted: dict[Op, tuple[Tensor, Handle]] = {}
        self.sent: list[Handle] = []

    def run(self, ops: Sequence[Op]) -> Tensor:
        """Run the operations; returns the loss, on every stage."""
        final = [op for op in ops if op.kind is Kind.BACKWARD][-1:]
        with contextlib.ExitStack() as hooks:
            for p in self.stages.tied if self.stages is not None and self.exact else ():
                hooks.callback(p.register_hook(self._joined).remove)
            for op, following in zip(ops, [*ops[1:], None]):
                self.engine.on_phase(FORWARD if op.kind is Kind.FORWARD else BACKWARD)
                received = self.receive(op)
                self._post(following)
                self.do(op, received, final=op in final)
        for handle in self.sent:
            handle.wait()
        if self.stages is not None:
            links = next(iter(self.stages.links.values()))
            links.broadcast(self.loss, self.schedule.owner(self.schedule.stages - 1)[0])
        return self.loss

    def do(self, op: Op, received: Tensor | None, *, final: bool) -> None:
        """Run one operation."""
        if self.engine.gathers is not None:
            self.engine.gathers.part = op.chunk
        if op.kind is Kind.FORWARD:
            self._forward(op, received)
        else:
            last = final or self.engine.settings.reduces_each
            self.engine.begin_micro_batch(last=last, part=op.chunk if self.stages else None)
            self._backward(op, received)

    def _forward(self, op: Op, stream: Tensor | None) -> None:
        given: dict[str, Any] = {}
        stage, micro = self.schedule.stage_of(self.rank, op.chunk), op.micro
        if self.stages is not None:
            parts = self.stages.parts[op.chunk]
            if stream is not None and self._has_pair(parts.start):
                stream = torch.stack([stream, torch.zeros_like(stream)])
            given = {"parts": parts, "stream": stream, **({"pairs": True} if self.pairs else {})}
        if stream is not None:
            stream.requires_grad_(torch.is_grad_enabled())
        last = stage == self.schedule.stages - 1
        targets = self.targets[micro] if last else None
        out = self.model(
            self.idx[micro], targets, **self.options[micro], reduction=self.reduction, **given
        )
        if last:
            part = out / len(self.idx) if self.reduction == "mean" else out
            self.loss += part.detach()
            out = self.target(part)
        else:
            sent = out[0] if self._has_pair(given["parts"].stop) else out
            self._send(True, sent.detach(), stage + 1, micro)
        if torch.is_grad_enabled():
            self.held[op[1:]] = stream, out

    def _backward(self, op: Op, grad: Tensor | None) -> None:
        stage, (stream, out) = self.schedule.stage_of(self.rank, op.chunk), self.held.pop(op[1:])
        if stream is not None:

            def send(x: Tensor) -> None:
                assert x.grad is not None
                self._send(False, x.grad, stage - 1, op.micro)
                x.grad = None

            stream.register_post_accumulate_grad_hook(send)
        self._micro = op.micro
        self._scale_losses(op.micro)
        torch.autograd.backward(out, grad)

    def _scale_losses(self, micro: int) -> None:
        """Set the scale of the experts' losses, which the backward of a loss would set."""
        losses = getattr(self.model, "experts", None)
        if losses is None:
            return
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        loss = torch.ones((), dtype=dtype, device=self.loss.device, requires_grad=True)
        part = loss / len(self.idx) if self.reduction == "mean" else loss
        (scale,) = torch.autograd.grad(self.target(part), loss)
        cp: Any = getattr(self.model, "cp", None)
        if cp is not None:  # the sum over cp ranks multiplies a gradient by their number
            scale = scale * cp.size
        mean = self.reduction == "mean"
        losses.scale = scale / (self.targets[micro] != -100).sum() if mean else scale

    # Messages

    def _has_pair(self, part: int) -> bool:
        """Whether the stream before this part has two gradients: models/gpt.py, take_over()."""
        return self.pairs and part > 1

    def receive(self, op: Op) -> Tensor | None:
        """Wait for the input of an operation; None: it needs no message."""
        stage = self.schedule.stage_of(self.rank, op.chunk)
        self._post(op)
        if op not in self.posted:
            return None
        x, handle = self.posted.pop(op)
        what = "activations" if op.kind is Kind.FORWARD else "the gradient"
        with in_place(f"receiving {what} for stage {stage} of micro-batch", op.micro):
            handle.wait()
        return x

    def _post(self, op: Op | None) -> None:
        """Begin to receive the input of an operation, if it needs a message."""
        if op is None or op in self.posted:
            return
        forward, stage = op.kind is Kind.FORWARD, self.schedule.stage_of(self.rank, op.chunk)
        before = stage - 1 if forward else stage + 1
        if not 0 <= before < self.schedule.stages:
            return
        by = self.schedule.owner(before)[0]
        assert self.stages is not None
        x = self.model.new_stream(self.idx[op.micro])
        if not forward and self._has_pair(self.stages.parts[op.chunk].stop):
            x = x.new_empty(2, *x.shape)
        group = self.stages.links[forward, self.rank > by]
        tag = stage * len(self.idx) + op.micro
        self.posted[op] = x, started(group.recv(x, by, async_op=True, tag=tag))

    def _send(self, forward: bool, x: Tensor, stage: int, micro: int) -> None:
        to = self.schedule.owner(stage)[0]
        assert self.stages is not None
        group, tag = self.stages.links[forward, to > self.rank], stage * len(self.idx) + micro
        handle = started(group.send(x.contiguous(), to, async_op=True, tag=tag))
        self.sent = [*(h for h in self.sent if not h.is_completed()), handle]

    # Tied tables: see axes/pipeline/stages.py, "A table on two stages"

    def _joined(self, grad: Tensor) -> Tensor:
        assert self.stages is not None
        pair = self.stages.pair
        assert pair is not None
        if self.stages.first:
            other = torch.empty_like(grad, memory_format=torch.contiguous_format)
            pair.recv(other, 1, tag=self._micro)
            return grad + other
        self.sent.append(started(pair.send(grad.contiguous(), 0, async_op=True, tag=self._micro)))
        return torch.zeros_like(grad)
