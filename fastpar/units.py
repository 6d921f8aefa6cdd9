"""Which modules are gathered together, and when: forward hooks, backward gates, prefetch.

A unit is a block of the model: an element of a ModuleList or Sequential. Parameters outside of all
blocks, and those that several blocks share, belong to the root unit, which is needed from the
beginning of a forward to the end of its backward.

[Note: order of gathers]
Every rank must launch the same gathers in the same order, or one rank's block is filled with the
values of another. A pass of a kind (forward, forward without gradients, backward) launches in the
order of the last one, `prefetch` units ahead of use; the first in the order of the modules. A rank
that skips a unit launches its gather all the same when it comes to a later one, or at the end of
the pass, for the others' sake. At stages 1 and 2 all gathers follow a step, in the order of the
modules. What is launched goes into a hash, which the control exchange compares.

[Note: what a forward waits for]
A module waits for its own parameters, not for the rest of its unit, if the last pass of this kind
called it inside of the unit's forward; the unit waits at once for all others, which it may use
without a call. After its forward all are there. What is compiled runs without the modules' hooks:
where something is or was, units wait for all.

[Note: when a unit is freed]
Stage 3: after its forward, except the last one's, which backward needs next; in backward bucket by
bucket, when all of its parameters have their gradients. Hooks in a recomputation (activation
checkpointing) gather but do not free: the backward of the unit is about to begin. The gate, an
identity on the outputs of a unit, is what tells that its backward begins; a unit whose outputs show
no tensor to put it on stays until the end of backward. A part of a unit that is called from outside
of it counts as the unit; inside of it, it waits for its parameters and gathers nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fastpar.buffers import BucketState
from fastpar.hooks import Hook

if TYPE_CHECKING:
    from fastpar.engine import Engine

ROOT = 0  # index of the root unit


def find_units(
    model: nn.Module,
    units: Sequence[nn.Module] | type | tuple[type, ...] | None,
    *,
    merge_bytes: float,
) -> list[list[nn.Module]]:
    """The modules of each unit in registration order; the first is the root's.

    Neighbours are merged into one unit while their parameters fit into merge_bytes.

    Raises:
        ValueError: a module that is not in the model, or inside another unit.
    """
    if units is None:
        candidates = _elements(model)
    elif isinstance(units, type | tuple):
        candidates = [m for m in model.modules() if isinstance(m, units) and m is not model]
    else:
        candidates = list(units)
    inside = {id(m): i for i, m in enumerate(model.modules())}
    candidates = list({id(m): m for m in candidates}.values())
    parts = {id(part) for m in candidates for part in m.modules() if part is not m}
    for module in candidates:
        if id(module) not in inside or module is model:
            raise ValueError(
                f"parallelize: expected units inside the model, got units with a "
                f"{type(module).__name__} that is not; pass modules of model.modules()"
            )
        if id(module) in parts and units is not None:
            raise ValueError(
                "parallelize: expected units beside each other, got units with a "
                f"{type(module).__name__} inside another; leave the inner ones out"
            )
    found: list[list[nn.Module]] = [[model]]
    room = 0.0
    for module in sorted(candidates, key=lambda m: inside[id(m)]):
        if id(module) in parts:
            continue
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        if not size:
            continue
        if size <= room:
            found[-1].append(module)
            room -= size
        else:
            found.append([module])
            room = merge_bytes - size
    return found


def _elements(module: nn.Module) -> list[nn.Module]:
    found = []
    for child in module.children():
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            found.append(child)
        else:
            found.extend(_elements(child))
    return found


def unit_of_parameters(units: list[list[nn.Module]]) -> dict[nn.Parameter, int]:
    """The unit of each parameter of the model; the root's where units share one."""
    homes: dict[nn.Parameter, set[int]] = {}
    inner: set[int] = set()
    for index, modules in enumerate(units[1:], 1):
        for module in modules:
            for part in module.modules():
                inner.add(id(part))
                for p in part._parameters.values():
                    if p is not None:
                        homes.setdefault(p, set()).add(index)
    for part in units[ROOT][0].modules():
        if id(part) not in inner:
            for p in part._parameters.values():
                if p is not None:
                    homes.setdefault(p, set()).add(ROOT)
    return {p: next(iter(found)) if len(found) == 1 else ROOT for p, found in homes.items()}


class _Pass:
    """The order of one kind of pass, see [Note: order of gathers]."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.launched: list[int] = []
        self.next = 0  # in recorded
        self.called: set[int] = set()  # ids of parts of units, inside of them
        self.will_call: set[int] = set()  # by the last pass

    def begin(self) -> None:
        self.launched, self.next = [], 0
        self.will_call, self.called = self.called, set()


class Gathers:
    """When the units of a model are gathered and freed.

    Args:
        units: modules of each unit, the root's first; buckets: of each unit.
        engine: starts and completes the gather of a bucket, and hears of passes that begin.
    """

    def __init__(
        self,
        units: list[list[nn.Module]],
        buckets: list[list[BucketState]],
        *,
        stage: int,
        prefetch: int,
        engine: Engine,
    ) -> None:
        self.buckets, self.stage, self.prefetch = buckets, stage, prefetch
        self._engine = weakref.ref(engine)
        self._passes = {name: _Pass() for name in ("forward", "evaluation", "backward")}
        self._pass = self._passes["forward"]
        order = [index for index, mine in enumerate(buckets) if mine]
        self._passes["forward"].recorded = self._passes["evaluation"].recorded = order
        self._passes["backward"].recorded = [i for i in order[-2::-1] if i != ROOT]
        self.passes_since_step: set[str] = set()
        self.entered: set[int] = set()  # units that a forward with gradients used, since a step
        self._ever: set[int] = set()  # of all steps
        self._depth = 0
        self._inside: set[int] = set()  # units whose forward runs
        self._done: set[BucketState] = set()  # not needed any more in this backward
        self._opened: list[nn.Module] = []  # parts called while their unit was not there
        self._owners: dict[nn.Parameter, list[int]] = {}  # ids of parts: no cycle with the model
        me = weakref.ref(self)
        for index, modules in enumerate(units):
            for module in modules:
                last = module is modules[-1]
                module.register_forward_pre_hook(Hook(me, "before_forward", index))
                after = Hook(me, "after_module", index, last)
                module.register_forward_hook(after, always_call=index == ROOT)
            mine = {p for bucket in buckets[index] for p in bucket.params}
            for part in dict.fromkeys(p for m in modules for p in m.modules() if p not in modules):
                owned = [p for p in part._parameters.values() if p in mine]
                if owned:
                    part.register_forward_pre_hook(_PartHook(me, "before_part", index))
                    part.register_forward_hook(_PartHook(me, "after_part", index))
                for p in owned:
                    self._owners.setdefault(p, []).append(id(part))

    # Stages 1 and 2

    def launch_stale(self) -> None:
        """Start gathering everything that a step has changed, in the order of use."""
        if self.stage in (1, 2):
            for buckets in self.buckets:
                for bucket in reversed(buckets):
                    if not bucket.live and bucket.gathering is None:
                        self.engine.launch_gather(bucket)

    # Stage 3

    def begin(self, name: str) -> None:
        """A pass begins."""
        self._pass = self._passes[name]
        self._pass.begin()
        for known in (self._opened, self._inside, self._done):
            known.clear()
        self.passes_since_step.add(name)

    def end(self) -> None:
        """A pass is over: launch what this rank skipped, and remember the order."""
        now = self._pass
        self._drop_skipped(len(now.launched))
        for index in now.recorded[now.next :]:
            if not self._is_live(index):
                self._launch(index)
                self.release(index)
        now.recorded = now.launched
        now.next = len(now.recorded)
        self._done.clear()

    def need(self, index: int, *, calls: bool = False) -> None:
        """The unit is used now: gather it if it is not there, and prefetch.

        calls: wait only for what is not owned by parts that will be called.
        """
        if self.stage < 3:
            self.launch_stale()
        elif not self._is_live(index) and not self._is_launched(index):
            now = self._pass
            rest = now.recorded[now.next :]
            if index in rest:
                for skipped in rest[: rest.index(index)]:
                    if not self._is_live(skipped) and not self._is_launched(skipped):
                        self._launch(skipped)
                        self.release(skipped)
                now.next += rest.index(index) + 1
            self._launch(index)
        if self.stage == 3 and self._is_launched(index):
            launched = self._pass.launched
            self._drop_skipped(len(launched) - 1 - launched[::-1].index(index))
        for bucket in self.buckets[index]:
            if not (calls and bucket.gathering and self._will_be_called(bucket)):
                self.engine.finish_gather(bucket)
        if self.stage == 3:
            self._prefetch(index)

    def _enter(self, index: int) -> None:
        if torch.is_grad_enabled():
            self.entered.add(index)
            self._ever.add(index)

    def skipped(self) -> set[int]:
        """Units that no forward since the last step used, but one before did."""
        return self._ever - self.entered - {ROOT}

    def _will_be_called(self, bucket: BucketState) -> bool:
        """Whether each parameter belongs to a part that will wait for it."""
        parts = self._pass.will_call
        return all(any(owner in parts for owner in self._owners.get(p, ())) for p in bucket.params)

    def release(self, index: int) -> None:
        """The unit is not needed for now."""
        for bucket in self.buckets[index] if self.stage == 3 else ():
            self.engine.finish_gather(bucket)
            bucket.make_stale()

    def release_bucket(self, bucket: BucketState) -> None:
        """A part of a unit is not needed any more in this backward."""
        if self.stage == 3 and bucket.spec.unit != ROOT:
            self._done.add(bucket)
            self.engine.finish_gather(bucket)
            bucket.make_stale()

    def participate(self) -> None:
        """This rank had no batch, the others a forward and a backward: launch what they launch."""
        if self.stage == 3 and "forward" not in self.passes_since_step:
            for name in ("forward", "backward"):
                self.begin(name)
                for index in list(self._pass.recorded):
                    if not self._is_live(index) and not self._is_launched(index):
                        self._launch(index)
                    if index != self.last_forward():
                        self.release(index)
                self._pass.next = len(self._pass.recorded)
                self.end()
        self.launch_stale()

    def _drop_skipped(self, stop: int) -> None:
        """Units that were launched ahead of others and not used."""
        launched = self._pass.launched
        for index in set(launched[:stop]) - set(launched[stop:]) - self._inside:
            if self._is_launched(index):
                self.release(index)

    def _prefetch(self, index: int) -> None:
        now = self._pass
        if now.next < len(now.recorded) and now.recorded[now.next] == index:
            now.next += 1  # it was live already
        last = set(now.launched[-self.prefetch - 1 :]) - self._inside - {index}
        ahead = sum(self._is_launched(i) for i in last)
        while ahead < self.prefetch and now.next < len(now.recorded):
            following = now.recorded[now.next]
            if self._is_launched(following):
                break
            now.next += 1
            if not self._is_live(following):
                self._launch(following)
                ahead += 1

    @property
    def engine(self) -> Engine:
        """Whose parameters these are."""
        engine = self._engine()
        assert engine is not None
        return engine

    def _launch(self, index: int) -> None:
        self._pass.launched.append(index)
        buckets = self.buckets[index]
        for bucket in buckets if self._pass is self._passes["backward"] else reversed(buckets):
            if not bucket.live and bucket not in self._done:
                self.engine.launch_gather(bucket)

    def _is_live(self, index: int) -> bool:
        return all(bucket.live or bucket in self._done for bucket in self.buckets[index])

    def _is_launched(self, index: int) -> bool:
        return any(bucket.gathering is not None for bucket in self.buckets[index])

    def last_forward(self) -> int:
        """The unit that is gathered last in a forward with gradients, -1 before the first."""
        recorded = self._passes["forward"].recorded
        return recorded[-1] if recorded else -1

    # Hooks

    def before_forward(self, index: int, module: nn.Module, args: tuple) -> None:
        """A module of the unit is called."""
        if self._engine() is None:
            return
        in_backward = torch._C._current_graph_task_id() != -1
        if index == ROOT and not in_backward:
            self._depth += 1
            if self._depth == 1:
                self.begin("forward" if torch.is_grad_enabled() else "evaluation")
                self.engine.on_pass(torch.is_grad_enabled())
        if self.stage:
            if not in_backward:
                self._enter(index)
                self._inside.add(index)
            self.need(index, calls=not in_backward and not _may_be_compiled(module))

    def after_module(
        self, index: int, last: bool, module: nn.Module, args: tuple, output: Any
    ) -> Any:
        """A module of the unit has returned, or the root has failed."""
        if self._engine() is None:
            return output
        failed = output is None and sys.exc_info()[0] is not None
        try:
            return self._after(index, last, output)
        except RuntimeError:
            if not failed:  # the forward's own error says more, and torch would warn of this one
                raise
            return None

    def _after(self, index: int, last: bool, output: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        with_grad = torch.is_grad_enabled()
        gates = _Gates(self, index)
        if with_grad:
            output = gates.apply(output)
        if not in_backward:
            self._inside.discard(index)
            for bucket in self.buckets[index]:
                self.engine.finish_gather(bucket)
            if index == ROOT:
                self._depth -= 1
                if self._depth == 0 and self.stage:
                    self.end()
                    if not with_grad:
                        self.release(ROOT)
            elif last and not (with_grad and (index == self.last_forward() or not gates.n)):
                self.release(index)
        return output

    def before_part(self, index: int, part: nn.Module, args: tuple) -> None:
        """A module inside of the unit is called; from outside of it if the unit is not there."""
        engine = self._engine()
        if engine is None:
            return
        if index in self._inside:
            self._pass.called.add(id(part))
            for p in part._parameters.values():
                if p in self._owners:
                    engine.finish_gather(engine.bucket_of(p))
        if self._is_live(index) or (index in self._inside and self._is_launched(index)):
            return
        self.need(index)
        if torch._C._current_graph_task_id() == -1:
            self._enter(index)
            if index != ROOT:
                self._opened.append(part)

    def after_part(self, index: int, part: nn.Module, args: tuple, output: Any) -> Any:
        """The module has returned."""
        if not self._opened or self._opened[-1] is not part:
            return output
        self._opened.pop()
        return self._after(index, True, output)

    def before_backward(self, index: int) -> None:
        """The gradient of an output of the unit is there."""
        self.engine.on_gate()
        if self.stage == 3:
            self.need(index)


class _Gate(torch.autograd.Function):
    """Identity whose backward tells that the backward of a unit begins."""

    @staticmethod
    def forward(ctx: Any, gathers: Gathers, index: int, x: Tensor) -> Tensor:
        ctx.gathers, ctx.index = weakref.ref(gathers), index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gathers = ctx.gathers()
        if gathers is not None:
            gathers.before_backward(ctx.index)
        return None, None, grads[0]


class _Gates:
    """Puts gates on the tensors of an output, whatever they are wrapped in; n: how many."""

    def __init__(self, gathers: Gathers, index: int) -> None:
        self.gathers, self.index, self.n = gathers, index, 0

    def apply(self, output: Any) -> Any:
        return tree_map(self._leaf, output)

    def _leaf(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            self.n += 1
            return _Gate.apply(self.gathers, self.index, x)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
            gated = {name: self.apply(value) for name, value in fields.items()}
            if any(gated[name] is not value for name, value in fields.items()):
                x = copy.copy(x)
                for name, value in gated.items():
                    object.__setattr__(x, name, value)  # frozen ones too
        return x


def _may_be_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has seen any code, or will see this; see the note on waiting."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and (
        dynamo.counters["frames"]["total"] > 0
        or any(
            m._compiled_call_impl is not None
            or type(m).__name__ == "OptimizedModule"
            or hasattr(m.__dict__.get("forward"), "_torchdynamo_orig_callable")
            for m in module.modules()
        )
    )


class _PartHook(Hook):
    """Of a module inside of a unit, compiled with it."""

    _torchdynamo_disable = False

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() else super().__call__(*args)
