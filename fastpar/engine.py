"""The data-parallel engine: flat buffers, hooks, and one collective per bucket while backward runs.

Stage 0: every rank holds all parameters and all gradients; each bucket of gradients is all-reduced.

[Note: when a bucket is launched]
A bucket is ready when each of its parameters had its hook in this backward. Ready buckets are
launched in index order, bucket i only after i - 1: hooks fire in another order under torch.compile
and for other inputs, and ranks that issue collectives in different orders add up different buckets.
The first backward only learns: it launches at its end. What is not ready at the end of a backward
is launched then, and everything is waited for, so that p.grad holds the mean when backward returns.
Reentrant checkpoints run a backward inside a backward; their parameters can fire several times with
partial sums, so once one is seen all launches wait for the end of the outermost backward.

[Note: who used a parameter]
A parameter that no rank used must keep p.grad None (an optimizer skips it), but one that only
other ranks used has a gradient. Each bucket carries one element per parameter, 1 where this rank
has a gradient; it is read back only by ranks that had none, so the usual step never waits
(test_unused_parameters_match_one_process).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpar.buffers import FlatBuffers
from fastpar.layout import inventory
from fastpar.mesh import Mesh, all_gather


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    bucket_mb: float = 25.0,
    first_bucket_mb: float = 1.0,
    grad_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> nn.Module:
    """Make the ranks of mesh train model together; an ordinary training loop stays as it was.

    After backward() the gradients are the mean over the ranks (the convention of torch's DDP), in
    p.grad, or in p.main_grad where grad_dtype differs from the parameter's. Several backward()
    calls before a step add up as in one process; each of them communicates unless it runs under
    engine_of(model).no_sync(), where the sums stay local until a backward outside of it, finish(),
    or fastpar.AdamW.step().

    Args:
        model: on mesh.device; its parameters become contiguous views of flat buffers, with the
            values of rank 0. Buffers and frozen parameters are copied from rank 0 too, once.
        bucket_mb: cap of the gradients that one collective sends; first_bucket_mb: of the first.
        grad_dtype: of the gradient buffer, e.g. torch.float32 under bf16 parameters.
        deterministic: sum in rank order (all-to-all, local sum, all-gather), so that the bits do
            not depend on bucket sizes; costs a second gradient buffer and part of the overlap.
    Returns:
        The same module.
    Ranks: all, with the same model and arguments.
    Wire: 2 * (dp - 1) / dp * bytes of the gradient buffer per rank and reduction.
    Streams: collectives run beside the compute stream, which waits for them at the end of
        backward; the host does not wait (except for gloo, and where a parameter was unused).
    Raises:
        ValueError: no trainable parameter; a dtype, device or sharing of memory that flat buffers
            cannot hold; parallelized twice; models that differ between ranks.
    """
    Engine(
        model,
        mesh,
        bucket_mb=bucket_mb,
        first_bucket_mb=first_bucket_mb,
        grad_dtype=grad_dtype,
        deterministic=deterministic,
    )
    return model


def engine_of(model: nn.Module) -> Engine:
    """The engine that parallelize() attached to the parameters of model."""
    for parameter in model.parameters():
        engine = engine_of_parameter(parameter)
        if engine is not None:
            return engine
    raise ValueError(
        f"engine_of: expected a module that went through fastpar.parallelize, got "
        f"model={type(model).__name__} without an engine; copies and loaded pickles have none"
    )


def engine_of_parameter(parameter: Tensor) -> Engine | None:
    """The engine of one parameter, None if it has none."""
    handle = getattr(parameter, "_fastpar_engine", None)
    return handle.engine if handle is not None else None


class _Handle:
    """Link from a parameter to its engine. Copies and pickles of it are empty."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict) -> _Handle:
        return _Handle()

    def __reduce__(self) -> tuple:
        return (_Handle, ())


class _ExposedTime:
    """Time in which this rank waits for communication, per step; never blocks the host on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._steps: deque[list] = deque([[]], maxlen=8)
        self._known: float | None = None

    def start_step(self) -> None:
        self._steps.append([])

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        if self._on_gpu:
            # Between the two events the compute stream does nothing but wait for the collectives.
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._steps[-1].append((start, end))
        else:
            begin = time.perf_counter()
            yield
            self._steps[-1].append((time.perf_counter() - begin) * 1e3)

    def last_ms(self) -> float | None:
        """Of the newest step whose waits are over."""
        for entries in filter(None, reversed(self._steps)):
            if not self._on_gpu:
                return sum(entries)
            if all(end.query() for _, end in entries):
                self._known = sum(start.elapsed_time(end) for start, end in entries)
                break
        return self._known


class Engine:
    """Reduces the gradients of one model; made by parallelize(). See the notes above.

    Reentrant activation checkpoints work but lose the overlap; if no parameter at all lies outside
    of them, the reduction happens in finish(), which fastpar.AdamW.step() calls.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        bucket_mb: float,
        first_bucket_mb: float,
        grad_dtype: torch.dtype | None,
        deterministic: bool,
    ) -> None:
        for name, p in model.named_parameters():
            if engine_of_parameter(p) is not None:
                raise ValueError(
                    f"parallelize: expected a model without an engine, got parameter '{name}' of "
                    "an earlier fastpar.parallelize; call it once"
                )
        options = f"{bucket_mb=} {first_bucket_mb=} {grad_dtype=} {deterministic=}"
        mesh.check_same("parallelize", [options, *inventory(model)])
        self.mesh = mesh
        self.deterministic = deterministic
        self.buffers = FlatBuffers(
            model,
            device=mesh.device,
            world_size=mesh.dp_size,
            bucket_bytes=bucket_mb * 2**20,
            first_bucket_bytes=first_bucket_mb * 2**20,
            grad_dtype=grad_dtype,
        )
        self.layout = self.buffers.layout
        for flat in self.buffers.param_buckets:  # a bucket at a time: little extra memory
            mesh.broadcast_([flat])
        mesh.broadcast_([*self.buffers.frozen, *model.buffers()])
        # The mean on the wire where the backend has it: no pass over the gradients for it.
        average = not deterministic and mesh.dp_size > 1 and mesh.can_average()
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM

        self._synchronize = True  # False under no_sync()
        self._exposed = _ExposedTime(mesh.device)
        self.n_reductions = 0  # since parallelize(); names the step in errors
        self._reduced = False  # since the last optimizer step
        self._unreduced = False  # there are sums that only this rank knows
        self._step_ended = True
        self._learned = self._reentrant = False
        self._root = self._task = -1  # graph tasks of autograd: outermost, last seen
        self._nested_tasks: set[int] = set()
        self._works: list[tuple[dist.Work, Tensor | None]] = []
        self._missing: list[tuple[int, int, int]] = []  # (bucket, position in it, parameter)
        self._reset_launches()
        me = weakref.ref(self)  # parameters own the engine, not the hooks: no cycle through C++
        for i, p in enumerate(self.buffers.params):
            p._fastpar_engine = _Handle(self)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(functools.partial(_call_hook, me, i))

    # Backward

    def _on_grad(self, i: int) -> None:
        """Post-accumulate hook: the gradient of parameter i is final for this graph."""
        self.buffers.store(i)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._enter_backward(task)
        bucket = self.layout.slots[i].bucket
        if bucket < self._next:
            raise RuntimeError(
                "Engine: expected one gradient per backward for parameter "
                f"'{self.buffers.name(i)}', got another after bucket {bucket} was sent; "
                "use checkpoint(..., use_reentrant=False)"
            )
        if task in self._nested_tasks:
            self._reentrant = self._unreduced = True
            return
        if i in self._fired:
            return
        self._fired.add(i)
        self._pending[bucket] -= 1
        if self._synchronize and self._learned and not self._reentrant and self.mesh.dp_size > 1:
            while self._next < len(self._pending) and not self._pending[self._next]:
                self._launch(self._next)

    def _enter_backward(self, task: int) -> None:
        self._task = task
        if task == self._root or task in self._nested_tasks:
            return
        if _inside_backward_of_a_function():
            self._nested_tasks.add(task)
            return
        if self._next:
            raise RuntimeError(
                "Engine: expected backward to run to its end, got a new one after an earlier "
                f"stopped with {self._next} of {len(self._pending)} buckets sent on rank "
                f"{self.mesh.rank}; the ranks are out of step: restart from a checkpoint"
            )
        self._reset_launches()  # an earlier backward may have stopped before it sent anything
        self._root = task
        if self._step_ended:
            self._exposed.start_step()
            self._step_ended = False
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_backward_end(self) -> None:
        self._root = self._task = -1
        self._nested_tasks.clear()
        self._learned = self._unreduced = True
        if self._synchronize:
            self._reduce()
        else:
            self._reset_launches()

    # Communication

    def _launch(self, index: int) -> None:
        """Start the collective of one bucket. Buffers live as long as the engine."""
        flat, used = self.buffers.grad_buckets[index], self.buffers.used[index]
        used.fill_(1.0)
        for position, i in enumerate(self.layout.buckets[index].slots):
            if not self.buffers.collect(i):
                used[position] = 0.0
                self._missing.append((index, position, i))
        group = self.mesh.dp_group
        with self._blame("starting", index):
            if self.deterministic:
                received = torch.empty_like(flat)
                work = dist.all_to_all_single(received, flat, group=group, async_op=True)
                self._works.append((work, received))
            else:
                work = dist.all_reduce(flat, op=self._op, group=group, async_op=True)
                self._works.append((work, None))
        self._next = index + 1

    def _reduce(self) -> None:
        """Launch what is left, wait for everything: afterwards gradients are means over ranks."""
        self.buffers.check()
        if self.mesh.dp_size > 1:
            for index in range(self._next, len(self._pending)):
                self._launch(index)
            with self._exposed.measure():
                self._wait()
            for index, position, i in self._missing:
                if self.buffers.used[index][position].item() > 0:
                    self.buffers.adopt(i)
        self._reset_launches()
        self.n_reductions += 1
        self._reduced, self._unreduced = True, False

    def _wait(self) -> None:
        gathers = []
        for index, (work, received) in enumerate(self._works):
            with self._blame("waiting for", index):
                work.wait()
                if received is not None:
                    gathers.append(self._sum_in_rank_order(index, received))
            if received is None and self._op == dist.ReduceOp.SUM:
                self.buffers.grad_buckets[index].div_(self.mesh.dp_size)
        for index, work in enumerate(gathers):
            with self._blame("waiting for", index):
                work.wait()

    def _sum_in_rank_order(self, index: int, received: Tensor) -> dist.Work:
        """received[r] is rank r's version of my shard: ((r0 + r1) + r2) + ..., then all-gather."""
        parts = received.view(self.mesh.dp_size, -1)
        half = received.dtype in (torch.bfloat16, torch.float16)
        total = parts[0].float() if half else parts[0]
        for part in parts[1:]:
            total.add_(part)
        bucket = self.layout.buckets[index]
        start, stop = (x - bucket.start for x in bucket.shard(self.mesh.dp_rank))
        flat = self.buffers.grad_buckets[index]
        flat[start:stop].copy_(total.div_(self.mesh.dp_size))
        return all_gather(flat, flat[start:stop], group=self.mesh.dp_group, async_op=True)

    def _reset_launches(self) -> None:
        self._next = 0  # buckets below it are launched
        self._pending = [len(b.slots) for b in self.layout.buckets]
        self._fired: set[int] = set()
        self._works.clear()
        self._missing.clear()

    @contextlib.contextmanager
    def _blame(self, action: str, index: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"Engine: expected every rank to take part, got an error on rank {self.mesh.rank} "
                f"while {action} bucket {index} of step {self.n_reductions} ({error}); another "
                "rank stopped or skipped a collective: its own message says why"
            ) from error

    # Public

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up locally and do not communicate."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def finish(self) -> None:
        """Reduce gradients that only this rank knows (after no_sync); else nothing. Ranks: all."""
        if self._unreduced:
            self._reduce()

    def before_step(self) -> None:
        """finish(), and take part in the others' reduction if this rank had no backward at all."""
        if self._unreduced or not self._reduced:
            self._reduce()

    def after_step(self) -> None:
        """The optimizer has used the gradients: the next backward begins a new step."""
        self._reduced = False
        self._step_ended = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for main gradients too. By default no memory is written."""
        self.buffers.zero_grad(set_to_none)
        self._unreduced = False

    def grad_of(self, p: Tensor) -> Tensor | None:
        """The gradient of one parameter: p.grad, or p.main_grad where it is valid."""
        return self.buffers.grad_of(p)

    def grads(self) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter, reduced gradient) in registration order, for parameters that have one."""
        self.finish()
        slots = self.layout.slots
        order = sorted(range(len(slots)), key=lambda i: slots[i].registered)
        params = [self.buffers.params[i] for i in order]
        return [(p, grad) for p in params if (grad := self.grad_of(p)) is not None]

    @property
    def exposed_comm_ms(self) -> float | None:
        """Time of the last step in which this rank waited for communication.

        From the first backward after an optimizer step on: waits for buckets, and
        all_reduce_scalars(). On a GPU it is measured by events on the compute stream, and is the
        newest known step's. None until one is known.
        """
        return 0.0 if self.mesh.dp_size == 1 else self._exposed.last_ms()

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Sum a small vector over the ranks: the one control all-reduce of a step.

        Args:
            values: fp32 or fp64, on mesh.device; loss, token count, flags.
        Returns:
            A new tensor, the same bits on every rank.
        Ranks: all, in the same order relative to backward passes.
        """
        if values.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"all_reduce_scalars: expected fp32 or fp64, got dtype={values.dtype}; "
                "pack the values with torch.tensor([...], dtype=torch.float64)"
            )
        total = values.detach().clone()
        if self.mesh.dp_size == 1:
            return total
        with self._exposed.measure():
            try:
                if self.deterministic:
                    parts = total.new_empty((self.mesh.dp_size, *total.shape))
                    all_gather(parts.view(-1), total.view(-1), group=self.mesh.dp_group)
                    total = functools.reduce(torch.add, parts)
                else:
                    dist.all_reduce(total, group=self.mesh.dp_group)
            except RuntimeError as error:
                raise RuntimeError(
                    f"Engine.all_reduce_scalars: expected every rank to take part, got an error on "
                    f"rank {self.mesh.rank} in step {self.n_reductions} ({error}); another rank "
                    "stopped or skipped a collective: its own message says why"
                ) from error
        return total

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Raise unless every rank holds the same bits in every parameter. Ranks: all.

        Wire: one broadcast of all parameters, a bucket at a time.
        """
        if self.mesh.dp_size == 1:
            return
        first = n = len(self.layout.slots)
        for bucket, mine in zip(self.layout.buckets, self.buffers.param_buckets):
            theirs = mine.clone()
            self.mesh.broadcast_([theirs])
            for i in bucket.slots:
                slot = self.layout.slots[i]
                part = slice(slot.start - bucket.start, slot.stop - bucket.start)
                a, b = (x[part].view(torch.uint8) for x in (mine, theirs))
                if i < first and not torch.equal(a, b):
                    first = i
        found = torch.tensor([first], device=self.mesh.device)
        everyone = found.new_empty(self.mesh.dp_size)
        all_gather(everyone, found, group=self.mesh.dp_group)
        wrong = [(i, rank) for rank, i in enumerate(everyone.tolist()) if i < n]
        if wrong:
            i, rank = min(wrong)
            raise RuntimeError(
                "Engine.check_replicas: expected the same bits on every rank, got a difference on "
                f"rank {rank} in parameter '{self.buffers.name(i)}' after step "
                f"{self.n_reductions}; something changed it on one rank only"
            )

    def describe(self) -> str:
        """Buckets in launch order, with what they hold and what they send."""
        world_size = self.mesh.dp_size
        sizes = [flat.numel() * flat.element_size() for flat in self.buffers.grad_buckets]
        how = "all-to-all + rank-order sum + all-gather" if self.deterministic else "all-reduce"
        parameters = sum(slot.spec.numel for slot in self.layout.slots)
        wire = 2 * (world_size - 1) / world_size * sum(sizes)
        lines = [
            f"engine: stage 0, dp={world_size}, {how if world_size > 1 else 'no communication'}, "
            f"{parameters:,} trained parameters, {len(sizes)} buckets, "
            f"{wire / 2**20:.1f} MiB on the wire per rank and step",
            "bucket  dtype     params      MiB  parameters",
        ]
        for bucket, size, flat in zip(self.layout.buckets, sizes, self.buffers.grad_buckets):
            names = [self.buffers.name(bucket.slots[0]), self.buffers.name(bucket.slots[-1])]
            lines.append(
                f"{bucket.index:6d}  {str(flat.dtype).removeprefix('torch.'):8s}  "
                f"{len(bucket.slots):6d}  {size / 2**20:7.2f}  {' .. '.join(dict.fromkeys(names))}"
            )
        return "\n".join(lines)


def _call_hook(engine_ref: weakref.ref[Engine], i: int, p: nn.Parameter) -> None:
    engine = engine_ref()
    if engine is not None:
        engine._on_grad(i)


def _inside_backward_of_a_function() -> bool:
    """Whether this hook runs in a backward that an autograd.Function's backward has started."""
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
