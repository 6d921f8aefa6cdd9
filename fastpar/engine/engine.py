"""The engine of a parallelized model: its hooks, and the order of events in a step.

    hook (here) -> bucket.py -> gradients.py -> shards.py -> optimizer -> gathers.py

README.md lists the steps. The engine owns these parts and the phase of the step; the parts do not
know the engine.

[Note: micro-batches]
Backward passes before a step accumulate. Each is reduced into the shard; under no_sync(), with
accumulate="full" and in a micro-batch that is not the last one, this rank keeps its whole
gradients instead. In deterministic mode both kinds of sums are pairwise trees over the
micro-batches, and so is the sum over ranks: equal micro-batches give the same bits however they are
split. All ranks must have the same number of micro-batches, and a gradient is complete with the
last one. Without begin_micro_batch() each backward is a micro-batch. With it, a micro-batch may
have any number of forwards and backward passes: those of a pipeline's schedule, or several losses.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes import every
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import StepReport
from fastpar.engine.absent import Hook, Link, engine_of_parameter
from fastpar.engine.bucket import NODE, ON_DEVICE, BucketState
from fastpar.engine.control import Control
from fastpar.engine.debug import Debug, InputCheck, check_replicas
from fastpar.engine.gathers import ROOT, Gathers, RootHook
from fastpar.engine.gradients import (
    STEP_PHASES,
    MicroBatches,
    PartialGradients,
    Reducer,
    StepPhase,
)
from fastpar.engine.optimizers import refuse_after_failure
from fastpar.engine.shards import Shards
from fastpar.kernels.op import in_transform

_MIB = 2**20


def _nothing() -> None:
    """No backward runs."""


class Engine:
    """Reduces gradients and gathers parameters of one model; made by parallelize().

    Args:
        units: modules that are gathered together, the root's first; see gathers.py.
        control_group: all ranks of the mesh, None if there is one.
        mesh: the user's; the mesh of the shards counts cp ranks as dp.
    Attributes:
        shards: the buckets and parameters on this rank.
        shares: whether this rank holds less than whole parameters and gradients.
        steps_pieces: whether optimizers step pieces, or memory elsewhere, instead of p with p.grad.
        report: StepReport of the last step, None before it.
        tp_report: which layers are split along tp, and why; print it.
        graph_task: autograd's number of the backward that runs, or that stopped; -1: none.
    """

    paused = False  # its hooks do nothing; see optim/graphs.py
    on_phase: Callable[[str], None] = staticmethod(lambda name: None)  # see comm/recorder.py

    def __init__(
        self,
        shards: Shards,
        units: list[list[nn.Module]],
        control_group: Collectives | None,
        mesh: Mesh,
        debug: Debug,
    ) -> None:
        self.shards, self.settings, self.stage = shards, shards.settings, shards.stage
        self.mesh, self.control_group, self.debug = mesh, control_group, debug
        self.input_checks: list[InputCheck] = []
        self.log, self.buckets, self.declared = shards.log, shards.buckets, shards.declared
        self.shares, by_unit = shards.shares, self.settings.by_unit
        self.steps_pieces = self.shares or by_unit
        on_cpu = self.mesh.device.type == "cpu"
        self.reducer = Reducer(shards.buckets, self.settings, self.log, on_cpu=on_cpu)
        self.gathers = Gathers(units, shards, self) if by_unit else None
        self.partials = PartialGradients(shards)
        self._last_bucket = shards.buckets[-1].spec.index
        copy = shards.ranks_of_copy()
        stages = shards.stages
        n_params = len(shards.params) if stages is None else stages.n_params
        where = self.mesh.rank_in("pp"), self.mesh.size("pp")
        self.control = Control(control_group, n_params, copy, self.mesh.device, *where)
        self.micro_batches = MicroBatches(
            self.settings.accumulate, self.settings.parallel.grad_accum_steps or 1
        )
        self.report: StepReport | None = None
        self.tp_report = ""
        self._phase = StepPhase.EMPTY
        self.graph_task = -1
        # The callback at the end of a backward; autograd holds it until the end or a failure.
        self._running: Callable[[], object] = _nothing
        self._spent: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that used the gradients
        self._second = False  # a further optimizer steps other parameters after the same backward
        self._cleared: set[nn.Parameter] = set()  # gradients set to None by hand since the step
        me = weakref.ref(self)  # parameters own the engine, not the hooks: no cycle through C++
        for p in shards.params:
            p._fastpar_engine = Link(self)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(Hook(me, Engine._on_grad))
            hides = self.settings.grad_dtype not in (None, p.dtype)
            if self.shares or self.settings.deterministic or hides:  # p.grad must be None before
                p.register_hook(Hook(me, Engine.before_unit_backward))
        shards.connect(Hook(me, Engine.on_node))
        model = shards.model()
        if self.gathers is None and model is not None:
            model.register_forward_pre_hook(RootHook(me, Engine._lend_all), prepend=True)
            model.register_forward_hook(RootHook(me, Engine._take_back_all), always_call=True)

    @property
    def lends(self) -> bool:
        """Whether modules get the nodes' outputs."""
        return torch.is_grad_enabled() and not (in_transform() or self.shards.is_gathered)

    def _lend_all(self, *args: Any) -> None:
        """Hook, without gathers: the model is called."""
        if self.lends:
            for bucket in self.buckets:
                bucket.lend()

    def _take_back_all(self, *args: Any) -> None:
        """Hook, without gathers: the model has returned or failed."""
        for bucket in self.buckets:
            bucket.take_back()

    @property
    def phase(self) -> StepPhase:
        """Of the step; a backward that stopped has not changed it."""
        return self._phase if self._running() is None else StepPhase.BACKWARD

    def _enter(self, phase: StepPhase) -> None:
        """Change the phase; raises RuntimeError if it may not follow the present one."""
        if phase is not StepPhase.STEPPED:
            self._check_ended()
        if phase not in STEP_PHASES[self.phase]:
            possible = " or ".join(sorted(f"'{x.value}'" for x in STEP_PHASES[self.phase]))
            raise RuntimeError(
                f"Engine: the step cannot go from '{self.phase.value}' to '{phase.value}', only to "
                f"{possible}; a backward or step ran inside of another, or this is a bug of fastpar"
            )
        self._phase = phase

    def _check_ended(self) -> None:
        if self.phase is StepPhase.STEPPING:
            refuse_after_failure()

    # Backward

    def _on_grad(self, p: nn.Parameter) -> None:
        """Post-accumulate hook: the gradient of p is final for this backward."""
        bucket, position = self.shards.places[p]
        if p.data_ptr() != bucket.views[position].data_ptr():
            self.shards.check()
        if torch._C._current_graph_task_id() != self.graph_task:
            self.before_unit_backward(fired=p)
        self._take(bucket, {position: p.grad}, by_hook=True)

    def on_node(self, bucket: BucketState, grads: tuple[Tensor | None, ...]) -> None:
        """Backward of a bucket's node: all gradients of its uses in forwards."""
        self.before_unit_backward()
        self._take(bucket, dict(enumerate(grads)))

    def _take(self, bucket: BucketState, grads: dict[int, Tensor | None], **how: bool) -> None:
        self.reducer.check_collects(bucket, grads)
        if bucket.take(grads, **how):  # all are there
            if self.gathers is not None:
                self.gathers.release_bucket(bucket)
            self.reducer.launch_ready()

    def before_unit_backward(self, grad: Any = None, fired: Any = None) -> None:
        """Called before a unit's backward and for gradients: begins a backward if none runs."""
        task = torch._C._current_graph_task_id()
        if self.paused or task == self.graph_task:
            return
        if self.phase is StepPhase.BACKWARD:
            raise RuntimeError(
                "Engine: a backward ran inside of another, as with reentrant activation "
                "checkpoints; use checkpoint(..., use_reentrant=False)"
            )
        self._begin_backward(task, fired)
        end = functools.partial(self.end_backward)
        self._running = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _begin_backward(self, task: int, fired: Any) -> None:
        """Begin a backward, which has this number in autograd."""
        self.reducer.check_rests(self.mesh.rank)
        stopped = self.graph_task != -1  # an earlier backward, before it sent anything
        self._forget_cleared(fired)
        self.reducer.reset()
        # The gradients of the stopped one, without marks, were missed by a module's zero_grad().
        left = stopped and self.stage.shards and self.phase is StepPhase.EMPTY
        for bucket in self.buckets if left else ():
            bucket.zero_grad(True)
        self._check_ended()
        self.graph_task = task
        self.log.timer.begin()
        written = {bucket for bucket in self.buckets if bucket.written}
        self.partials.split()
        skipped: set[int] = set()
        if self.gathers is not None:
            self.gathers.begin("backward")
            skipped = self.gathers.skipped()
        self.micro_batches.begin_backward()
        part, last = self.micro_batches.part, self.micro_batches.last
        alone = part is not None and not (last and not self.settings.reduces_each)
        active = [b for b in self.buckets if b.spec.part == part] if alone else self.buckets
        for bucket in active:
            others = part not in (None, bucket.spec.part)
            bucket.begin_backward(skipped=bucket.spec.unit in skipped or others)
            if self.settings.deterministic and not others:
                bucket.set_aside(anew=bucket in written)
        self.reducer.begin_backward(active, last=last, final=self.micro_batches.final)

    def end_backward(self) -> None:
        """End a backward: all its gradients are there."""
        self._enter(StepPhase.LOCAL)
        self.graph_task, self._running = -1, _nothing
        if self.gathers is not None:
            self.gathers.end_backward()
        if self.micro_batches.last:
            self._reduce()
            return
        for bucket in self.reducer.active:
            if self.settings.deterministic:
                bucket.keep_local()
            bucket.mark(hidden=self.stage.shards or self.settings.deterministic)
        self.reducer.reset()

    def _reduce(self) -> None:
        """Reduce all gradients to means over the ranks."""
        self.shards.forget_norms()
        self.shards.check()
        active = self.reducer.active
        for bucket in active:  # in step() they are still hidden: no backward lifted them
            if bucket.marks.hidden:
                bucket.marks.lift()
        self.reducer.finish()
        if not self.stage.shards:
            self.partials.sum()
        for bucket in active:
            bucket.mark(hidden=self.stage.shards)
        self.log.n_reductions += not self.log.timer.off
        self._enter(StepPhase.REDUCED)

    # Forward

    def before_gathers(self, name: str) -> None:
        """A pass of the whole model is about to gather; see control.py, [Note: begin]."""
        self._say_begin("a forward without gradients" if name == "evaluation" else f"a {name}")

    def before_forward(self, with_grad: bool) -> None:
        """A forward of the whole model begins."""
        if with_grad:
            self._check_unchanged()
            self.log.timer.begin()

    def _say_begin(self, what: str) -> None:
        self._check_ended()
        with self.log.naming(f"beginning {what} after", self._last_bucket):
            self.control.begin(what, self.micro_batches.finished)

    # The optimizer's side

    def before_step(self, optimizer: object = None) -> None:
        """Reduce gradients, also on a rank that had no backward. Ranks: all.

        Raises:
            RuntimeError: another optimizer has stepped the same parameters with these gradients.
        """
        self._forget_cleared()
        if optimizer in (None, *self._spent) or self.phase is not StepPhase.STEPPED:
            self._spent.clear()
        for other in self._spent:
            self._refuse_shared(optimizer, other)
        self._second = bool(self._spent)
        if optimizer is not None:
            self._spent.add(optimizer)
        if not self._second:
            self.log.timer.begin()
            if self.gathers is not None:
                self.gathers.participate()
        for bucket in () if self.stage.frees_parameters else self.buckets:
            bucket.finish_gather()
        if self._second:
            return
        if self.phase is not StepPhase.REDUCED:
            self._reduce()
        if self.stage.frees_parameters:
            self._say_begin("a step")
        self.partials.check()
        self.partials.sum()
        if self.shards.is_gathered:
            self.shards.save_writes()
        self.shards.storage.send_rest()

    def _refuse_shared(self, optimizer: Any, other: Any) -> None:
        theirs = {p for group in other.param_groups for p in group["params"]}
        for p in (p for group in optimizer.param_groups for p in group["params"] if p in theirs):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: parameter '{self.shards.name_of(p)}' was "
                f"already stepped by {type(other).__name__} with the same gradients; give each "
                "parameter to one optimizer only"
            )

    def reduce_rest(self) -> None:
        """Reduce gradients that only this rank has, if there are any. Ranks: all."""
        self._forget_cleared()
        if self.phase is StepPhase.LOCAL:
            self._reduce()
        self.partials.sum()

    @property
    def can_measure(self) -> bool:
        """Whether the ranks that shard a replica have all gradients on their devices."""
        split = self.shards.declared is not None or self.shards.stages is not None
        return not split and self.shards.storage is ON_DEVICE

    def has_whole_norms(self) -> bool:
        """Whether the ranks of a replica together have all gradients, reduced and final. Ranks:
        all, if some are not reduced yet."""
        if not (self.can_measure and self.stage.shards):
            return False
        self.reduce_rest()
        return self.phase is StepPhase.REDUCED and not self.control.counts_tokens

    def exchange(self, bins: Tensor | None) -> Tensor | None:
        """The control exchange: sum of all ranks' norm bins. Ranks: all, once per step."""
        if bins is None and self.control.has_nothing_to_say:
            self.control.skip()
            return None
        waiting = self.log.timer.waiting() if self.control_group else contextlib.nullcontext()
        with self.log.naming("in the control exchange after", self._last_bucket), waiting:
            return self.control.exchange(
                bins,
                hashes=self.log.hashes,
                backwards=self.micro_batches.begun,
                used=[i in b.seen for b in self.buckets for i in range(len(b.params))],
                cleared=sorted(self.shards.index[p] for p in self._cleared),
                second=self._second,
            )

    def without_grad(self) -> set[Tensor]:
        """After exchange(): the parameters without a gradient on any rank. Waits for the device if
        this rank has none for some."""
        if not self.stage.shards:  # p.grad is None, or the main gradient is not used
            return {
                p for b in self.buckets if b.casts for i, p in enumerate(b.params) if i not in b.has
            }
        return {
            b.params[i]
            for b in self.buckets
            if len(b.seen) < len(b.params)
            for i in set(range(len(b.params))) - b.seen
            if not self.control.used_anywhere(self.shards.index[b.params[i]])
        }

    def begin_step_of_pieces(self) -> None:
        """An optimizer that knows no engine steps this rank's pieces until after_step()."""
        self._enter(StepPhase.STEPPING)

    def after_step(self) -> None:
        """End a step: the next backward begins a new one."""
        before = self.phase
        self._enter(StepPhase.STEPPED)
        for bucket in self.buckets:
            bucket.expects.discard(NODE)
        self.make_stale()
        if self.gathers is not None and self.shards.is_gathered:
            self.shards.gather_again()
        self.micro_batches.end_step()
        self._cleared.clear()
        if before is not StepPhase.STEPPED and not (self._second or self.log.timer.off):
            self.end_step()

    def make_stale(self) -> None:
        """Forget the passes since the last step; parameters that are gathered are out of date."""
        self.log.hashes = [0, 0]
        if self.gathers is not None:
            for bucket in self.buckets:
                bucket.finish_gather()
                bucket.make_stale()
            self.gathers.after_step()

    def end_step(self, *, in_graph: bool = False) -> None:
        """Count and report a step; in_graph: that a graph has made."""
        self.log.n_steps += 1
        self.report = self.log.timer.end_step(in_graph=in_graph)
        if self.debug.check_replicas:
            self.check_replicas()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, the work of a step becomes a CUDA graph: the host measures, reads and compares
        nothing. Before and after, there is no gradient, and parameters are stale."""
        self.log.timer.graph_bytes = 0
        self.log.timer.off = self.control.captured = True
        try:
            yield
        finally:
            self.log.timer.off = self.control.captured = False

    # Zeroed and cleared gradients

    def zero_grad(
        self, set_to_none: bool = True, *, of: torch.optim.Optimizer | None = None
    ) -> None:
        """Like torch's, for main gradients and shards too; drops counts and contributions.

        By default no memory is written, except in buckets that keep other gradients.

        Args:
            of: zero only gradients of this optimizer's parameters; default: all of this engine's.
        """
        self.shards.forget_norms()
        if of is None:
            for bucket in self.buckets:
                bucket.zero_grad(set_to_none)
        else:
            if self._spent:
                self._spent.add(of)
            params = [p for group in of.param_groups for p in group["params"]]
            whole = {*map(id, params)} >= self.shards.ids
            some = dict.fromkeys(self.buckets) if whole else self.shards.by_bucket(params)
            for bucket, positions in some.items():
                bucket.zero_grad(set_to_none, positions)
        if not all(bucket.zeroed for bucket in self.buckets):
            self.control.doubt()
            return
        self._end_of_gradients()
        if self.gathers is not None:
            self.gathers.launch_early()

    def _end_of_gradients(self) -> None:
        """All gradients were zeroed: forget the step so far."""
        self.control.forget(early=self.micro_batches.begun == 0)
        self._enter(StepPhase.EMPTY)
        self.micro_batches.forget()
        self.partials.forget()
        self._spent.clear()
        self._cleared.clear()

    def _forget_cleared(self, fired: Tensor | None = None) -> None:
        """Notice p.grad = None and zero_grad() of a module, which do not call the engine."""
        changed = False
        for bucket in self.buckets:
            found, cleared = bucket.forget_cleared(fired)
            changed = changed or found
            self._cleared.update(bucket.params[i] for i in cleared)
        if changed:
            self.shards.forget_norms()
        if changed and all(bucket.empty for bucket in self.buckets):
            reduced, begun = self.phase is StepPhase.REDUCED, self.micro_batches.begun
            self._end_of_gradients()
            if not reduced:  # other ranks may have some left
                self.micro_batches.begun = begun

    def _check_unchanged(self) -> None:
        """Refuse gradients that changed after count_tokens() or contribute()."""
        for bucket in self.buckets if self.control.has_values else ():
            if bucket.written and bucket.shows_grad:
                raise RuntimeError(
                    f"Engine: p.grad of '{bucket.name(0)}' or another parameter was changed in "
                    "place after count_tokens() or contribute(); zero gradients with the "
                    "optimizer's zero_grad()"
                )

    # For the training loop

    def begin_micro_batch(self, *, last: bool, part: int | None = None) -> None:
        """Begin a micro-batch: the forwards and backward passes up to the next call or step().

        For loops in which one micro-batch has several backward passes; see [Note: micro-batches].
        Ranks: all.

        Args:
            last: its backward passes reduce gradients; those of other micro-batches stay on the
                rank, whatever accumulate says. If none is the last, the step reduces them.
            part: the chunk of a pipeline that gets gradients.
        """
        if self.phase is StepPhase.BACKWARD:
            raise RuntimeError(
                "Engine.begin_micro_batch: called during a backward; call it before the forwards "
                "of the micro-batch"
            )
        self.micro_batches.begin(last, part)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate on this rank and reduce no gradients."""
        micro = self.micro_batches
        before, micro.synchronize = micro.synchronize, False
        try:
            yield
        finally:
            micro.synchronize = before

    def contribute(self, values: Tensor) -> None:
        """Add numbers (loss, flags), equally many on every rank, to this step's control exchange.

        Afterwards control.contributed holds their sums over the ranks, fp64 [k]. zero_grad()
        before the step drops them.
        """
        self._note(self.control.contribute, values)

    def count_tokens(self, n: int | Tensor) -> None:
        """Divide gradients by the tokens of all ranks, of which this rank has n.

        For losses that are sums over valid tokens. Call it once per micro-batch (with 0 on a rank
        without tokens), after zero_grad(), which drops earlier counts. fastpar's optimizers divide
        on the device.
        """
        self._note(self.control.count_tokens, n)

    def _note(self, how: Callable[[Any], None], what: Any) -> None:
        self._forget_cleared()
        self._check_unchanged()
        self.partials.check()
        how(what)
        for bucket in self.buckets:
            bucket.accept()

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Sum a small vector over the ranks, outside of a step (validation). Ranks: all.

        Args:
            values: fp32 or fp64, on mesh.device; loss, token count, flags.
        Returns:
            A new tensor, the same bits on every rank.
        """
        with self.log.naming("summing scalars after", self._last_bucket), self.log.timer.waiting():
            return self.control.sum(values)

    # Gradients and parameters

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Make all parameters whole inside; see Shards.gathered. Ranks: all."""
        if self.stage.frees_parameters and not self.shards.is_gathered:
            self._say_begin("state_dict() or gathered()")
        with self.shards.gathered():
            yield

    def grads(self) -> list[tuple[nn.Parameter, Tensor]]:
        """(parameter, whole reduced gradient) in registration order. Ranks: all.

        Stage 0: of parameters with a gradient on this rank; other stages: of all.
        """
        self.reduce_rest()
        shards, grads, slots = self.shards, [], self.shards.layout.slots
        for i in sorted(range(len(slots)), key=lambda i: slots[i].registered):
            p = shards.params[i]
            if (grad := shards.piece(p).grad) is not None:
                grads.append((p, shards.full(grad, p) if shards.shares else grad))
        return grads

    # Reports and checks

    @property
    def sharing(self) -> str:
        """The layout of the model, for messages."""
        text = f"zero_stage={self.stage.number}, tp={self.mesh.tp_size}"
        return text if self.shards.stages is None else f"{text}, pp={self.mesh.size('pp')}"

    def memory(self) -> dict[str, int]:
        """Bytes allocated on this rank, by kind; without optimizer state and activations."""
        shards = self.shards
        names = "parameters", "parameter shards", "gradients", "gradient shards"
        kinds = Counter(dict.fromkeys(names, 0))
        for bucket in shards.buckets:
            if bucket.separate:  # memory of its own, at stage 3 empty while the unit is not used
                kinds["parameters"] += bucket.flat.untyped_storage().nbytes()
                kinds["parameter shards"] += bucket.shard.nbytes
            else:
                kinds["parameters"] += bucket.flat.nbytes
            for kind, x in (("gradients", bucket.grad), ("gradient shards", bucket.grad_shard)):
                if x is not None:
                    kinds[kind] += x.nbytes
        kinds.update(shards.storage.memory())
        kinds["partial sums"] = sum(bucket.tree_bytes for bucket in shards.buckets)
        for axis in every():
            kinds.update(axis.memory(shards))
        kinds["frozen parameters"] = sum(p.nbytes for p in shards.frozen)
        return dict(kinds)

    def describe(self) -> str:
        """Text: the engine, memory and wire, a table of buckets, and the schedule."""
        shards, settings, report = self.shards, self.settings, self.report
        ranks = shards.mesh.dp_size
        parameters = sum(slot.spec.numel for slot in shards.layout.slots)
        reduce = shards.buckets[0].groups.reduce
        how = f"{reduce.transport} ({reduce.why})" if reduce is not None else "no communication"
        memory = self.memory().items()
        lines = [
            f"engine: stage {shards.stage.number}, dp={ranks}, {settings.n_shards} shards, {how}, "
            f"{parameters:,} trained parameters, {len(shards.buckets)} buckets"
            + (", deterministic" if settings.deterministic else ""),
            *(line for axis in every() for line in axis.describe(shards)),
            "memory: " + ", ".join(f"{kind} {n / _MIB:.1f} MiB" for kind, n in memory if n),
            *([] if report is None else [f"last step: {report.wire_bytes / _MIB:.1f} MiB sent"]),
            "bucket  unit  dtype     params      MiB  shard MiB  parameters",
        ]
        for bucket in shards.buckets:
            spec, dtype = bucket.spec, str(bucket.grad_dtype).removeprefix("torch.")
            size = spec.numel * bucket.grad_dtype.itemsize / _MIB
            names = dict.fromkeys((bucket.name(0), bucket.name(len(bucket.params) - 1)))
            unit = "root" if spec.unit == ROOT else str(spec.unit)
            unit = unit if shards.stage.shards else "-"
            lines.append(
                f"{spec.index:6d}  {unit:>4s}  {dtype:8s}  {len(bucket.params):6d}  {size:7.2f}  "
                f"{size / spec.n_shards:9.2f}  {' .. '.join(names)}"
            )
        return "\n".join([*lines, "schedule: " + "; ".join(self._schedule())])

    def _schedule(self) -> Iterator[str]:
        """The collectives of a step, in their order."""
        shards = self.shards
        stage, dp, n_shards = shards.stage, shards.mesh.dp_size, shards.settings.n_shards
        span = f"buckets 0 to {len(shards.buckets) - 1}"
        if dp > 1:
            if stage.frees_parameters:
                ahead = shards.settings.parallel.prefetch
                yield f"all-gather each unit before its forward and backward, {ahead} ahead"
            tree = ", sums in a fixed tree" * shards.settings.deterministic
            op = "reduce-scatter" if stage.shards else "all-reduce"
            copies = f", then all-reduce each shard with its {dp // n_shards} replicas"
            copies *= stage.shards and dp > n_shards
            yield f"{op} {span} while backward runs{tree}{copies}"
        declared = shards.declared
        if declared is not None and any(declared.is_partial(p) for p in shards.params):
            when = "the last backward" if stage.shards else "each backward"
            yield f"all-reduce partial gradients along tp after {when}"
        several = shards.mesh.world_size > 1
        yield "one control exchange before the update" if several else "nothing to send"
        if dp > 1 and stage.gathers_after_step:
            yield f"all-gather {span} during the next forward"

    def check_replicas(self, optimizer: object = None, *, step: int | None = None) -> None:
        """Raise unless replicas hold the same bits. Ranks: all.

        Args:
            optimizer: of this engine; its state is compared too.
            step: for the message; default: the number of reductions since parallelize().
        """
        step = self.log.n_reductions if step is None else step
        check_replicas(self.shards, self.control_group, optimizer, step=step)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a model that went through parallelize().

    Raises:
        ValueError: no parameter of model has an engine.
    """
    for parameter in model.parameters():
        engine = engine_of_parameter(parameter)
        if engine is not None:
            return engine
    raise ValueError(
        f"engine_of: {type(model).__name__} has no engine; pass the module that "
        "fastpar.parallelize returned (copies and unpickled models have none)"
    )
