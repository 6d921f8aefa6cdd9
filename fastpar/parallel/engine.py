"""The engine of ZeRO stages 0 to 3: hooks, and one collective per bucket while backward runs.

    stage   while backward runs          after the step                  around a module
    0       all-reduce                   -                               -
    1, 2    reduce-scatter               all-gather, under the forward   wait for its buckets
    3       reduce-scatter               -                               all-gather, free

With shard_size the shards are those of a group of neighbours, and each reduced shard is averaged
with its copies in the other groups (HSDP).

[Note: when a bucket is launched]
A bucket is ready when each of its parameters had its hook in this backward. Ready buckets are
launched in index order, bucket i only after i - 1: hooks fire in another order under torch.compile
and for other inputs, and ranks that issue collectives in different orders add up different buckets.
A unit that this rank's forward skipped has no gradient: its buckets are ready from the beginning.
What is not ready at the end of a backward is launched then, and everything is waited for.
A backward inside of a backward (reentrant activation checkpoints) would bring a gradient in parts,
some of them after its bucket was sent: it is refused.

[Note: who used a parameter]
A parameter that no rank used is not stepped, but one that only other ranks used has a gradient. At
stage 0 each bucket carries one element per parameter, 1 where this rank has a gradient; it is read
back only by ranks that had none, so the usual step never waits. Sharded stages tell it in the
control exchange (test_unused_parameters_match_one_process).

[Note: several backward passes before a step]
They add up. Each is reduced into the shard, or, under no_sync() and accumulate="full", stays in the
whole gradients of this rank. In deterministic mode both kinds of sums are pairwise trees over the
micro-batches, and the ranks' sum is one too: equal micro-batches, however they are split, give the
same bits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm.handles import Handle
from fastpar.comm.mesh import Mesh
from fastpar.parallel.buffers import BucketState
from fastpar.parallel.control import Control
from fastpar.parallel.hooks import Hook, Link, inside_backward_of_a_function
from fastpar.parallel.partials import PartialGradients
from fastpar.parallel.shards import Groups, Settings, Shards
from fastpar.parallel.step_report import StepReport
from fastpar.sharding.layout import Layout
from fastpar.tensor.declared import Declared

IN_FLIGHT = 3  # caps of a bucket: bytes of gradient that may be under way at stages 2 and 3
_PATIENCE_S = 1.0  # see [Note: when a bucket is launched]


class Engine(Shards):
    """Reduces gradients and gathers parameters of one model; made by parallelize().

    Attributes:
        report: StepReport of the last step, None before it.
        tp_report: what is split along tp, and why; print it.
    """

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        groups: Groups,
        layout: Layout,
        buckets: list[BucketState],
        frozen: dict[nn.Parameter, str],
        homes: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]],
        declared: Declared | None,
        debug: Any,
    ) -> None:
        super().__init__(mesh, settings, groups, frozen, homes, declared)
        self.debug = debug
        self._pending: deque[tuple[BucketState, Handle, Tensor]] = deque()
        self._patient = True  # in this backward, see [Note: when a bucket is launched]
        self._replicating: list[tuple[BucketState, Handle, Tensor]] = []
        self._missing: list[tuple[BucketState, int]] = []
        self.use(layout, buckets)
        self.partials = None if declared is None else PartialGradients(self, declared)
        first = mesh.dp_rank // self.n_shards * self.n_shards
        n_copies = self.n_shards if self.zero_stage else 1
        copy = range(first * mesh.tp_size, (first + n_copies) * mesh.tp_size)
        self._control = Control(groups.control, len(self.params), copy, mesh.device)
        self.report: StepReport | None = None
        self.tp_report = ""

        self._synchronize = True  # False under no_sync()
        self._backwards = 0  # since the last step
        self._reduced = False  # since the last step
        self._unreduced = False  # there are sums that only this rank knows
        self._step_ended = True
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()  # that have stepped
        self._spent: weakref.WeakSet[Any] = weakref.WeakSet()  # those that need new gradients
        self._again = False  # one more steps with the same gradients
        self._cleared: set[nn.Parameter] = set()  # whose gradient was, by hand, since the last step
        self._task = -1  # the graph task of autograd of the backward that runs
        me = weakref.ref(self)  # parameters own the engine, not the hooks: no cycle through C++
        for p in self.params:
            p._fastpar_engine = Link(self)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(Hook(me, "_on_grad"))
            hides = settings.grad_dtype not in (None, p.dtype)
            if self.shares or settings.deterministic or hides:  # p.grad must be None before
                p.register_hook(Hook(me, "_before_grad"))

    def use(self, layout: Layout, buckets: list[BucketState]) -> None:
        """Work with these buckets from now on; no gradients are under way."""
        super().use(layout, buckets)
        self._reset_launches()

    # Backward

    def _before_grad(self, grad: Tensor) -> None:
        """Autograd is about to add to p.grad."""
        self._enter_backward(torch._C._current_graph_task_id())

    def _on_grad(self, p: nn.Parameter) -> None:
        """Post-accumulate hook: the gradient of p is final for this graph."""
        bucket, position = self._place[p]
        if p.data_ptr() != bucket.views[position].data_ptr():
            self.check()
        task = torch._C._current_graph_task_id()
        self._enter_backward(task, fired=p)
        index = bucket.spec.index
        if index < self._next:
            raise RuntimeError(
                "Engine: expected one gradient per backward for parameter "
                f"'{bucket.name(position)}', got another after bucket {index} was sent; "
                "use checkpoint(..., use_reentrant=False)"
            )
        bucket.take(position)
        if p in self._fired:
            return
        self._fired.add(p)
        self._waiting[index] -= 1
        if self._waiting[index]:
            return
        if self.gathers is not None:
            self.gathers.release_bucket(bucket)
        self._launch_ready()

    def _launch_ready(self) -> None:
        if self._will_reduce:
            for index in range(self._next, len(self.buckets)):
                if self._waiting[index]:
                    break
                self._launch(index)

    def _enter_backward(self, task: int, fired: Tensor | None = None) -> None:
        if task == self._task:
            return
        if inside_backward_of_a_function():
            raise RuntimeError(
                "Engine: expected one backward at a time, got a backward inside of a backward, as "
                "reentrant activation checkpoints run it; use checkpoint(..., use_reentrant=False)"
            )
        if self._next:
            raise RuntimeError(
                "Engine: expected backward to run to its end, got a new one after an earlier "
                f"stopped with {self._next} of {len(self.buckets)} buckets sent on rank "
                f"{self.mesh.rank}; the ranks are out of step: restart from a checkpoint"
            )
        stopped = self._task != -1  # an earlier backward, before it sent anything
        self._hear_cleared(fired)
        self._reset_launches()
        self._task = task
        self._timer.begin()
        self._step_ended = False
        if self.partials is not None:
            self.partials.split()
        for bucket in self.buckets:
            bucket.begin_backward(stopped=stopped and self.zero_stage > 0)
            if self.settings.deterministic:
                bucket.set_aside()
        self._backwards += 1
        full = self.settings.accumulate == "full"
        last = not full or self._backwards >= self.settings.grad_accum_steps
        self._will_reduce = self._synchronize and last and self.mesh.dp_size > 1
        if self.gathers is not None:
            self.gathers.begin("backward")
            skipped = self.gathers.skipped()
            for index, bucket in enumerate(self.buckets):
                if bucket.spec.unit in skipped:
                    self._waiting[index] = 0
        torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)

    def on_gate(self) -> None:
        """The backward of a unit begins."""
        self._enter_backward(torch._C._current_graph_task_id())

    def on_gathers(self, with_grad: bool) -> None:
        """A forward of the whole model begins to gather; see control.py, [Note: what begins]."""
        self._begin("a forward" if with_grad else "a forward without gradients")

    def _begin(self, what: str) -> None:
        with self._blame(f"beginning {what} after", self.buckets[-1]):
            self._control.begin(what)

    def on_pass(self, with_grad: bool) -> None:
        """A forward of the whole model begins."""
        if with_grad:
            self._hear_zeroed()
            self._timer.begin()

    def _on_backward_end(self) -> None:
        full = self.settings.accumulate == "full"
        last = not full or self._backwards >= self.settings.grad_accum_steps
        self._task = -1
        self._unreduced = True
        if self.gathers is not None and self.zero_stage == 3:
            self.gathers.end()
            for unit in range(len(self.gathers.buckets)):
                self.gathers.release(unit)
        if self._synchronize and last:
            self._reduce()
        else:
            for bucket in self.buckets:
                if self.settings.deterministic:
                    bucket.keep_local()
                bucket.mark(hidden=self.zero_stage > 0 or self.settings.deterministic)
            self._reset_launches()

    # Reductions

    def _launch(self, index: int) -> None:
        """Start the reduction of one bucket; its memory stays as it is until _finish()."""
        bucket = self.buckets[index]
        missing = bucket.fill_missing(flags=self.zero_stage == 0)
        self._missing.extend((bucket, position) for position in missing)
        bucket.add_local()
        target, grad = bucket.target(), bucket.grad
        assert grad is not None
        assert self.groups.reduce is not None
        wire_dtype = self.settings.reduce_dtype or grad.dtype
        wire = grad if grad.dtype == wire_dtype else grad.to(wire_dtype)
        self._note(0, index)
        with self._blame("starting", bucket):
            if self.zero_stage == 0:
                handle = self.groups.reduce.all_reduce(wire, mean=True, async_op=True, tag=index)
                target = wire
            else:
                handle = self.groups.reduce.reduce_scatter(
                    target, wire, mean=True, async_op=True, tag=index
                )
        assert handle is not None
        self._timer.add(handle, self._wire_bytes(wire, self.groups.reduce, self.zero_stage == 0))
        self._pending.append((bucket, handle, target))
        self._next += 1
        if self.zero_stage >= 2:
            self._limit_pending()

    def _limit_pending(self) -> None:
        """Free whole gradients that have been sent, so that few are alive; two in any case."""
        room = IN_FLIGHT * self.settings.bucket_mb * 2**20
        late = self.zero_stage == 3 and self.mesh.device.type == "cpu" and self._task != -1
        while len(self._pending) > 2 and self._patient:
            if sum(bucket.grad_bytes for bucket, _, _ in self._pending) <= room:
                return
            try:
                self._finish_oldest(_PATIENCE_S if late else None)
            except TimeoutError:
                self._patient = False

    def _finish_oldest(self, timeout_s: float | None = None) -> None:
        bucket, handle, target = self._pending[0]
        with self._blame("waiting for", bucket), self._timer.waiting():
            handle.wait(timeout_s)
        self._pending.popleft()
        replicate = self.groups.replicate
        if replicate is None:
            self._take_reduced(bucket, target)
            return
        bucket.free_grad()
        with self._blame("starting the copies' mean of", bucket):
            again = replicate.all_reduce(target, mean=True, async_op=True, tag=bucket.spec.index)
        assert again is not None
        self._timer.add(again, self._wire_bytes(target, replicate, True))
        self._replicating.append((bucket, again, target))

    def _take_reduced(self, bucket: BucketState, target: Tensor) -> None:
        if bucket.grad is not None and self.zero_stage == 0 and target is not bucket.grad:
            target = bucket.grad.copy_(target)  # another dtype on the wire
        bucket.add_reduced(target)

    def _reduce(self) -> None:
        """Launch what is left and wait for everything: afterwards gradients are means."""
        self.check()
        for bucket in self.buckets:  # in step() marks are still there, and are no gradients
            bucket.unmark()
        if self.mesh.dp_size > 1:
            for index in range(self._next, len(self.buckets)):
                self._launch(index)
            while self._pending:
                self._finish_oldest()
            for bucket, handle, target in self._replicating:
                with self._blame("waiting for the copies' mean of", bucket), self._timer.waiting():
                    handle.wait()
                self._take_reduced(bucket, target)
            self._replicating.clear()
        elif self.settings.deterministic:
            for bucket in self.buckets:
                bucket.fill_missing(flags=False)
                bucket.add_local()
                bucket.add_reduced(bucket.target())
        if self.zero_stage == 0:
            self._show_gradients()
            if self.partials is not None:
                self.partials.sum()
                self.partials.show()
        for bucket in self.buckets:
            bucket.mark(hidden=self.zero_stage > 0)
        self._reset_launches()
        self.n_reductions += 1
        self._reduced, self._unreduced = True, False

    def _show_gradients(self) -> None:
        """Stage 0: p.grad of what other ranks used, and of what was put aside for the tree."""
        if self.settings.deterministic:
            for bucket in self.buckets:
                for position in sorted(bucket.seen):
                    bucket.adopt(position)
        for bucket, position in self._missing:
            if bucket.used()[position].item() > 0:
                bucket.adopt(position)

    def _reset_launches(self) -> None:
        self._next = 0  # buckets below it are launched
        self._waiting = [len(b.params) for b in self.buckets]
        self._patient = True
        self._fired: set[nn.Parameter] = set()
        self._pending.clear()
        self._replicating.clear()
        self._missing.clear()
        self._will_reduce = False

    # The optimizer's side

    def before_step(self, optimizer: object = None) -> None:
        """Gradients are reduced, also those of other ranks if this one had no backward at all.

        Not once more for another optimizer with parameters of this engine, which steps with the
        same gradients.
        """
        self._hear_cleared()
        old = bool(self._spent) and not (self._reduced or self._unreduced)
        self._again = old and optimizer not in self._spent
        if not self._again:
            self._spent.clear()
        if optimizer is not None:
            self._optimizers.add(optimizer)
            self._spent.add(optimizer)
        if not self._again:
            self._timer.begin()
            self._step_ended = False
            if self.gathers is not None:
                self.gathers.participate()
        for bucket in self.buckets if self.zero_stage in (1, 2) else ():
            self.finish_gather(bucket)
        if self._again:
            return
        if self._unreduced or not self._reduced:
            self._reduce()
        if self.zero_stage == 3:
            self._begin("a step")
        if self.partials is not None:
            self.partials.check()
            self.partials.sum()

    def finish(self) -> None:
        """Reduce gradients that only this rank knows (after no_sync); else nothing. Ranks: all."""
        self._hear_cleared()
        if self._unreduced:
            self._reduce()
        if self.partials is not None:
            self.partials.sum()

    def exchange(self, bins: Tensor | None) -> Tensor | None:
        """The control exchange: norm bins of this rank's pieces -> of all. Ranks: all, once."""
        used = [i in bucket.seen for bucket in self.buckets for i in range(len(bucket.params))]
        alone = self.groups.control is None
        waiting = contextlib.nullcontext() if alone else self._timer.waiting()
        with self._blame("in the control exchange after", self.buckets[-1]), waiting:
            return self._control.exchange(
                bins,
                hashes=self._hashes,
                backwards=self._backwards,
                used=used,
                cleared=sorted(self._index[p] for p in self._cleared),
                again=self._again,
            )

    def has_grad(self, p: Tensor) -> bool:
        """After exchange(): whether any rank had a gradient. Waits only if this one had none."""
        bucket, position = self._place[p]  # type: ignore[index]
        if self.zero_stage == 0:
            return bucket.grad_of(position) is not None
        return position in bucket.seen or self._control.used_anywhere(self._index[p])  # type: ignore[index]

    @property
    def token_scale(self) -> Tensor | None:
        """After exchange(): gradients are to be divided by it, None without count_tokens()."""
        return self._control.token_scale

    def after_step(self) -> None:
        """The optimizer has used the gradients: the next backward begins a new step."""
        self._reduced = False
        if self.gathers is not None:
            for bucket in self.buckets:
                self.finish_gather(bucket)
                bucket.make_stale()
            self.gathers.after_step()
        self._backwards, self._hashes = 0, [0, 0]
        self._cleared.clear()
        if not self._step_ended:
            self.tree_ms = sum(bucket.take_tree_ms() for bucket in self.buckets)
            self.report = self._timer.end_step()
            self._step_ended = True
            if self.debug is not None and self.debug.check_replicas:
                self.check_replicas()

    def zero_grad(
        self, set_to_none: bool = True, *, of: torch.optim.Optimizer | None = None
    ) -> None:
        """As torch's, for main gradients and shards too; drops what was counted and contributed.

        By default no memory is written, except where a bucket keeps other gradients.

        Args:
            of: only the gradients of its parameters, all of this engine's are zeroed otherwise.
        """
        only = of is None
        if of is None:
            for bucket in self.buckets:
                bucket.zero_grad(set_to_none)
        else:
            only = of in self._optimizers and len(self._optimizers) == 1
            if self._spent:
                self._spent.add(of)
            mine: dict[BucketState, set[int]] = {}
            for group in of.param_groups:
                for p in filter(self._place.__contains__, group["params"]):
                    bucket, position = self._place[p]
                    mine.setdefault(bucket, set()).add(position)
            for bucket, positions in mine.items():
                bucket.zero_grad(set_to_none, positions)
            if self.partials is not None:
                self.partials.changed()
        if all(bucket.zeroed for bucket in self.buckets):
            only = True
            self._end_of_gradients()
        elif only:
            self._control.forget(early=self._backwards == 0)
        else:
            self._control.doubt()
        if self._step_ended and only and self.gathers is not None:
            self.gathers.launch_stale()

    def _end_of_gradients(self) -> None:
        """All were zeroed: a step that did not come is forgotten."""
        self._control.forget(early=self._backwards == 0)
        self._unreduced = self._reduced = False
        self._backwards = 0
        if self.partials is not None:
            self.partials.forget()
        self._spent.clear()
        self._cleared.clear()

    def _hear_cleared(self, fired: Tensor | None = None) -> None:
        """p.grad = None, and zero_grad() of a module, tell nobody: look for them."""
        heard = False
        for bucket in self.buckets:
            zeroed = bucket.zeroed
            cleared, everywhere = bucket.forget_cleared(fired)
            heard = heard or bool(cleared) or bucket.zeroed != zeroed
            if everywhere:
                self._cleared.update(bucket.params[position] for position in cleared)
        if heard and all(bucket.empty for bucket in self.buckets):
            backwards = 0 if self._reduced else self._backwards  # other ranks may have some left
            self._end_of_gradients()
            self._backwards = backwards

    def _hear_zeroed(self) -> None:
        """module.zero_grad(set_to_none=False) tells nobody where p.grad is what it should be."""
        self._hear_cleared()
        seen = [bucket for bucket in self.buckets if bucket.seen]
        if seen and self._control.told and all(bucket.became_zero() for bucket in seen):
            self._end_of_gradients()

    # Public

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up locally and do not communicate gradients."""
        before, self._synchronize = self._synchronize, False
        try:
            yield
        finally:
            self._synchronize = before

    def contribute(self, values: Tensor) -> None:
        """Add numbers (loss, flags), as many on every rank, to this step's control exchange.

        zero_grad() before the step drops them.
        """
        self._tell(self._control.contribute, values)

    @property
    def contributed(self) -> Tensor | None:
        """fp64 [k]: the sums over the ranks of what was contributed to the last step."""
        return self._control.contributed

    def count_tokens(self, n: int | Tensor) -> None:
        """This rank's losses are sums over n valid tokens: divide by the count of all ranks.

        Once per micro-batch, after zero_grad(), which drops what was counted for a step that did
        not come; fastpar's optimizers then divide gradients, on the device. A rank without any
        calls it with 0.
        """
        self._tell(self._control.count_tokens, n)

    def _tell(self, how: Callable[[Any], None], what: Any) -> None:
        self._hear_zeroed()
        how(what)
        for bucket in self.buckets:
            bucket.remember()

    def grad_of(self, p: Tensor) -> Tensor | None:
        """The gradient of one parameter: p.grad, or p.main_grad where it is valid; of its piece."""
        return self.piece(p).grad if p in self._place else p.grad

    def grads(self) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter, reduced gradient) in registration order. Ranks: all.

        Of parameters that have one on this rank (sharded stages: of all, zero where none has);
        whole tensors, whatever is shared out.
        """
        self.finish()
        found = []
        for i in sorted(range(len(self.params)), key=lambda i: self.layout.slots[i].registered):
            p = self.params[i]
            grad = self.piece(p).grad
            if grad is not None:
                found.append((p, self.full(grad, p) if self.shares else grad))
        return found


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
    link = getattr(parameter, "_fastpar_engine", None)
    return None if link is None else link.target
