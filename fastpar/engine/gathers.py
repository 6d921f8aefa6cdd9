"""When the units of a model are gathered and freed: forward hooks, backward gates, prefetch.

A unit is a block of the model: an element of a ModuleList or Sequential. Parameters outside all
blocks, parameters that several blocks use, and torch's RNN cells belong to the root unit, which is
needed from the beginning of a forward to the end of its backward.

[Note: order of gathers]
Every rank must launch the same gathers in the same order, or a block is filled with the values of
another. A pass (forward, forward without gradients, backward) launches in the order of the last
pass of its kind, `prefetch` units ahead of use; the first pass launches in the order of the
modules. A rank that skips a unit still launches its gather, when it reaches a later unit or the end
of the pass. At stages 1 and 2 all gathers follow a step, in the order of the modules. A hash of the
launches goes into the control exchange, which compares it.

A forward of a unit waits for all of its weights; its code may use them directly. Its submodules
have hooks only for calls from outside: while the unit runs they are away. Code compiled inside a
unit runs without them; outside units they break the graph, so once torch.compile was called they
stay in place.

When a unit is freed (stage 3): after its forward, except the last unit's, which backward needs
next; in backward bucket by bucket, when all parameters of the bucket have their gradients. In a
recomputation (activation checkpointing) hooks gather but do not free, because the unit's backward
follows. The start of a unit's backward is detected by gates: hooks on the autograd nodes of its
outputs, which stay in place if an output is changed in place. A unit stays until the end of
backward if its outputs have no node or are parameters, or if a parameter was used while it was
absent (absent.py), also through an evaluation in between. A submodule called from outside its unit
counts as the unit. The backward of a graph made by a backward (create_graph=True) has no gates and
would use freed memory: it is refused.

Hooks of other code see whole parameters: in hooks of a unit and of the modules inside it, because
the engine's hooks run first before a forward and last after it; in hooks of modules outside units
because a use gathers what is absent. Only a pre-hook registered after parallelize() with
prepend=True runs earlier, and reads nan.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from fastpar.engine.absent import Hook
from fastpar.engine.bucket import DIRECT, BucketState
from fastpar.engine.shards import Shards

ROOT = 0  # index of the root unit


class _Pass:
    """The order of one kind of pass, see [Note: order of gathers]."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.launched: list[int] = []
        self.next = 0  # index into recorded

    def begin(self) -> None:
        self.launched, self.next = [], 0


class Gathers:
    """When the units of a model are gathered and freed.

    Args:
        units: modules of each unit, the root's first.
        shards: starts and completes the gather of a bucket.
        engine: is called when a pass begins, which may raise; its `lends` says what forwards get.
    """

    early = True  # zero_grad() launches gathers; False: the next forward does
    part: object = 0  # the chunk of the model that runs: each has its own order of gathers

    def __init__(self, units: list[list[nn.Module]], shards: Shards, engine: Any) -> None:
        buckets = [[b for b in shards.buckets if b.spec.unit == i] for i in range(len(units))]
        self._shards, self._engine, self.buckets = shards, weakref.proxy(engine), buckets
        self._flats = [{b.flat.untyped_storage()._cdata for b in unit} for unit in buckets]
        self.frees, self.prefetch = shards.stage.frees_parameters, shards.settings.parallel.prefetch
        self._passes: defaultdict[tuple[str, object], _Pass] = defaultdict(_Pass)
        self._pass = _Pass()  # between passes nothing is launched ahead of use
        of_units = [{b.spec.part for b in unit} for unit in buckets]
        for chunk in set().union(*of_units):
            order = [n for n, its in enumerate(of_units) if its and (n == ROOT or chunk in its)]
            for name in ("forward", "evaluation"):
                self._passes[name, chunk].recorded = order
            self._passes["backward", chunk].recorded = [n for n in order[-2::-1] if n != ROOT]
        self.passes_since_step: set[str] = set()
        self.entered: set[int] = set()  # units that a forward with gradients used since a step
        self._ever: set[int] = set()  # the same, in all steps
        self._depth = 0
        self._inside: set[int] = set()  # units whose forward runs
        self._done: set[BucketState] = set()  # not needed any more in this backward
        self._opened: list[nn.Module] = []  # submodules called while their unit was not gathered
        self._stay: set[int] = set()  # units that are whole until the end of backward
        self._parts: list[_PartHooks] = []
        me = weakref.ref(self)
        _all.add(self)
        self._gates = [Hook(me, Gathers.before_backward, index) for index in range(len(units))]
        for index, modules in enumerate(units):
            mine = {p for bucket in buckets[index] for p in bucket.params}
            kind = _PartHook if index else RootHook
            for module in modules:
                parts, last = _PartHooks(), module is modules[-1]
                before = Hook(me, Gathers.before_forward, index, parts)
                module.register_forward_pre_hook(before, prepend=True)
                after = Hook(me, Gathers.after_module, index, last, parts)
                module.register_forward_hook(after, always_call=index == ROOT)
                for part in module.modules():
                    if part not in modules and not mine.isdisjoint(part.parameters()):
                        opens = kind(me, Gathers.before_part, index)
                        parts.add(part, opens, kind(me, Gathers.after_part, index))
                self._parts.append(parts)

    # Stages 1 and 2

    def launch_early(self) -> None:
        """Between a step and a forward: launch the gathers that need not wait."""
        if self.early and not self._shards.storage.steps_later:  # a launch would wait for the step
            self.launch_stale()

    def launch_stale(self, stop: int | None = None) -> None:
        """Start to gather what a step has changed, in the order of use, up to unit `stop`."""
        for buckets in () if self.frees else self.buckets[:stop]:
            for bucket in reversed(buckets):
                if not bucket.live and bucket.gathering is None:
                    bucket.launch_gather()

    # Stage 3

    def begin(self, name: str) -> None:
        """Begin a pass."""
        self._drop(range(len(self.buckets)))  # launched by a backward that stopped
        if self.frees:
            self._engine.before_gathers(name)
        self._pass = self._passes[name, self.part]
        self._pass.begin()
        for known in (self._opened, self._inside, self._done):
            known.clear()
        for hooks in self._parts:  # of units that failed
            hooks.put_back()
        self.passes_since_step.add(name)

    def end(self, *, frees: bool = False) -> None:
        """End a pass: launch what this rank skipped, and remember the order; frees: all units."""
        now = self._pass
        self._drop(now.launched)
        self._skip(now.recorded[now.next :])
        if not self._shards.is_gathered:  # else nothing was launched
            now.recorded = now.launched
        self._pass = _Pass()
        self._done.clear()
        for index in range(len(self.buckets)) if frees else ():
            self.release(index)

    def end_backward(self) -> None:
        """End a backward: at stage 3 free everything."""
        self._stay.clear()
        if self.frees:
            self.end(frees=True)

    def need(self, index: int) -> None:
        """Gather the unit, which is used now, and prefetch."""
        self._shards.keep(self.buckets[index])
        if not self.frees:
            self.launch_stale(index + 1 if self._shards.storage.steps_later else None)
        elif not self._is_live(index) and not self._is_launched(index):
            now = self._pass
            rest = now.recorded[now.next :]
            if index in rest:
                self._skip(rest[: rest.index(index)])
                now.next += rest.index(index) + 1
            self._launch(index)
        if self.frees and self._is_launched(index):
            launched = self._pass.launched
            last = len(launched) - 1 - launched[::-1].index(index)
            self._drop({*launched[:last]} - {*launched[last:]} - self._inside)
        for bucket in self.buckets[index]:
            bucket.finish_gather()
        if self.frees:
            self._prefetch(index)

    def use(self, p: nn.Parameter) -> bool:
        """Gather an absent parameter whose values are used, until the end of the pass and of its
        backward; False: no pass runs."""
        in_backward = torch._C._current_graph_task_id() != -1
        bucket = self._shards.bucket_of(p)
        if not self._depth and not in_backward:
            bucket.show()
            return bucket.shown
        index = bucket.spec.unit
        self._done.discard(bucket)
        self.need(index)
        if not in_backward:
            self._note_use(index)
            if torch.is_grad_enabled():
                self._stay.add(index)
            if self._engine.lends:
                bucket.expects.add(DIRECT)
                bucket.lend()
        bucket.show()
        return True

    def _note_use(self, index: int) -> None:
        if torch.is_grad_enabled():
            self.entered.add(index)
            self._ever.add(index)

    def skipped(self) -> set[int]:
        """Units that no forward since the last step used, but an earlier one did."""
        return self._ever - self.entered - {ROOT}

    def release(self, index: int) -> None:
        """Free the unit, at stage 3, unless it has to stay."""
        for bucket in self.buckets[index] if self.frees else ():
            bucket.finish_gather()
            if index not in self._stay:
                self._shards.free(bucket)

    def release_bucket(self, bucket: BucketState) -> None:
        """Free a bucket whose gradients are complete in this backward."""
        if self.frees and bucket.spec.unit != ROOT:
            self._done.add(bucket)
            bucket.finish_gather()
            self._shards.free(bucket)

    def after_step(self) -> None:
        """Forget the step: all parameters are stale."""
        self._stay.clear()
        for bucket in self._shards.buckets:
            bucket.kept = False
            bucket.hides = bucket.stage.shards
        self.passes_since_step.clear()
        self.entered.clear()

    def participate(self) -> None:
        """Launch what the other ranks launch, on a rank without a batch in this step, or without a
        backward."""
        for name in ("forward", "backward") if self.frees else ():
            if name not in self.passes_since_step:
                self.begin(name)
                self.end()
        self.launch_stale()

    def _skip(self, units: Iterable[int]) -> None:
        """Launch units that other ranks use, and free them."""
        for index in units:
            if not self._is_live(index) and not self._is_launched(index):
                self._launch(index)
                self.release(index)

    def _drop(self, units: Iterable[int]) -> None:
        """Free those of the units that were launched ahead and not used."""
        for index in units:
            if self._is_launched(index):
                self.release(index)

    def _prefetch(self, index: int) -> None:
        now = self._pass
        if now.next < len(now.recorded) and now.recorded[now.next] == index:
            now.next += 1  # it was gathered already
        last = {*now.launched[-self.prefetch - 1 :]} - self._inside - {index}
        ahead = sum(map(self._is_launched, last))
        while ahead < self.prefetch and now.next < len(now.recorded):
            following = now.recorded[now.next]
            if self._is_launched(following):
                break
            now.next += 1
            if not self._is_live(following):
                self._launch(following)
                ahead += 1

    def _launch(self, index: int) -> None:
        self._pass.launched.append(index)
        buckets = self.buckets[index]
        for bucket in (
            buckets if self._pass is self._passes["backward", self.part] else reversed(buckets)
        ):
            if not bucket.live and bucket not in self._done:
                bucket.launch_gather()

    def _is_live(self, index: int) -> bool:
        return all(bucket.live or bucket in self._done for bucket in self.buckets[index])

    def _is_launched(self, index: int) -> bool:
        return any(bucket.gathering is not None for bucket in self.buckets[index])

    # Hooks

    def before_forward(self, index: int, parts: _PartHooks, module: nn.Module, args: tuple) -> None:
        """Hook: a module of the unit is called."""
        if self._in_a_transform(index):
            return
        in_backward = torch._C._current_graph_task_id() != -1
        if index == ROOT and not in_backward:
            self._depth += 1
            if self._depth == 1:
                self.begin("forward" if torch.is_grad_enabled() else "evaluation")
                self._engine.before_forward(torch.is_grad_enabled())
        if not in_backward:
            self._note_use(index)
            self._inside.add(index)
        self._stay_last(module)
        parts.take_away()
        self.need(index)
        self._provide(index, in_backward)

    def _provide(self, index: int, in_backward: bool) -> None:
        """Give a unit's modules what they compute with: outputs of nodes, or parameters."""
        if in_backward or not self._engine.lends:
            for bucket in self.buckets[index]:
                bucket.show()
        elif self.frees or index == ROOT:
            for bucket in self.buckets[index] if self.frees else self._shards.buckets:
                bucket.lend()

    def _in_a_transform(self, index: int) -> bool:
        """At stage 3: whether a transform of torch.func runs the unit, inside of gathered()."""
        if not self.frees or not torch._C._are_functorch_transforms_active():
            return False
        if not self._shards.is_gathered:
            raise RuntimeError(
                "Engine: with zero_stage=3 a transform of torch.func (grad, vjp, vmap) ran the "
                "model where this rank holds only shards of it; call it inside "
                "`with fastpar.engine_of(model).gathered():`, on all ranks"
            )
        self._shards.keep(self.buckets[index])  # for the derivative, which has no gates
        return True

    def _stay_last(self, module: nn.Module) -> None:
        """Move our hooks behind those that were added after them."""
        hooks: Any = module._forward_hooks  # an OrderedDict
        if hooks and not self._is_mine(next(reversed(hooks.values()))):
            for key in [key for key, hook in hooks.items() if self._is_mine(hook)]:
                hooks.move_to_end(key)

    def _is_mine(self, hook: Any) -> bool:
        return isinstance(hook, Hook) and hook.is_of(self)

    def after_module(
        self, index: int, last: bool, parts: _PartHooks, module: nn.Module, args: tuple, output: Any
    ) -> None:
        """Hook: a module of the unit has returned, or the root has failed."""
        failed = output is None and sys.exc_info()[0] is not None
        try:
            if self._in_a_transform(index):
                return
            parts.put_back()
            self._after(index, last, output)
        except RuntimeError:
            if not failed:  # the forward's own error is raised; torch would warn of this one
                raise

    def _after(self, index: int, last: bool, output: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        with_grad = torch.is_grad_enabled()
        gated, shown = self._look_at(index, output) if self.frees else (True, False)
        if not in_backward:
            self._inside.discard(index)
            for bucket in self.buckets[index]:
                bucket.finish_gather()
                if self.frees and index not in self._stay:
                    bucket.take_back()
            if self._shards.storage.steps_later and index != ROOT:
                self.launch_stale(index + 2)  # hidden by the device's queued work
            if index == ROOT:
                self._depth = max(0, self._depth - 1)  # 0: another pre-hook failed before ours
                if self._depth == 0:
                    for bucket in self._shards.buckets:  # of units that failed
                        bucket.take_back()
                    self.end(frees=not with_grad)
            elif with_grad and (shown or (last and not gated)):
                self._stay.add(index)
            elif last and not shown:
                newest = self._passes["forward", self.part].recorded[-1:]
                if not (with_grad and [index] == newest):  # backward needs it next
                    self.release(index)

    def _look_at(self, index: int, output: Any) -> tuple[bool, bool]:
        """Put gates on an output; returns whether there are any, and whether it is a parameter."""
        gated, shown, flats = False, False, self._flats[index]
        for x in _tensors(output):
            shown = shown or (x.layout == torch.strided and x.untyped_storage()._cdata in flats)
            # A view changed in place gets another node, and the gradient passes its base's.
            for y in (x, x._base if x._is_view() else None):
                if torch.is_grad_enabled() and y is not None and y.grad_fn is not None:
                    y.grad_fn.register_prehook(self._gates[index])
                    gated = True
                    hooks = y._backward_hooks
                    if hooks:  # of the unit's own code, which may use its parameters
                        others = dict(hooks)
                        hooks.clear()
                        y.register_hook(self._gates[index])
                        hooks.update(others)  # run after the gate; autograd ignores move_to_end()
        return gated, shown

    def before_part(self, index: int, part: nn.Module, args: tuple) -> None:
        """Hook: a submodule is called, from outside its unit if the unit is not gathered."""
        if self._in_a_transform(index):
            return
        self._stay_last(part)
        in_backward = torch._C._current_graph_task_id() != -1
        if not self._is_live(index):
            self.need(index)
            if not in_backward:
                self._note_use(index)
                if index != ROOT:
                    self._opened.append(part)
        if in_backward or self.frees:
            self._provide(index, in_backward)

    def after_part(self, index: int, part: nn.Module, args: tuple, output: Any) -> None:
        """Hook: the submodule has returned."""
        if self._opened and self._opened[-1] is part:
            self._opened.pop()
            self._after(index, True, output)

    def before_backward(self, index: int, grads: Any) -> None:
        """Gate: the gradient of an output of the unit is there."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Engine: zero_stage=3 does not support backward with create_graph=True, whose "
                "graph would use freed parameters; use zero_stage=2"
            )
        self._engine.before_unit_backward()
        self.need(index)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of an output, also in dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif type(output) in (tuple, list):  # tree_iter() takes as long as a small op
        for x in output:
            yield from _tensors(x)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name, None))
    elif output is not None:
        for x in tree_iter(output):
            yield from _tensors(x) if x is not output else ()


def may_be_compiled() -> bool:
    """Whether torch.compile was called in this process."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    patch = getattr(getattr(dynamo, "TorchPatcher", None), "patch", None)  # runs at the first call
    calls = getattr(patch, "cache_info", None)
    return dynamo is not None and (calls is None or calls().misses > 0)


_all: weakref.WeakSet[Gathers] = weakref.WeakSet()


def _inside_a_unit() -> bool:
    """While torch.compile traces: whether the code belongs to a unit's forward."""
    return any(gathers._inside - {ROOT} for gathers in _all)


_inside_a_unit._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _PartHooks:
    """The hooks of a unit's submodules, which are away while the unit runs."""

    def __init__(self) -> None:
        self._all: list[tuple[OrderedDict[int, Any], int, Hook]] = []  # where, key, hook
        self._are_away = False

    def add(self, part: nn.Module, before: Hook, after: Hook) -> None:
        """Register the hooks of a submodule."""
        first = part.register_forward_pre_hook(before, prepend=True).id
        last = part.register_forward_hook(after).id
        self._all.append((part._forward_pre_hooks, first, before))  # type: ignore[arg-type]
        self._all.append((part._forward_hooks, last, after))  # type: ignore[arg-type]

    def take_away(self) -> None:
        """The unit begins. Compiled code has guards on hooks, so then they stay."""
        if not (self._are_away or may_be_compiled()):
            self._are_away = True
            for hooks, key, _ in self._all:
                hooks.pop(key, None)

    def put_back(self) -> None:
        """The unit has returned, or a new pass begins."""
        if self._are_away:
            self._are_away = False
            for hooks, key, hook in self._all:
                hooks[key] = hook
            for hooks, key, _ in self._all[::2]:  # before a forward
                hooks.move_to_end(key, last=False)


class _PartHook(Hook):
    """A hook of a submodule of a unit; compiled with it."""

    gathers_weights = True  # see fastpar.nn.modules.has_hooks
    _torchdynamo_disable = False

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling() and _inside_a_unit():
            return None
        return super().__call__(*args)


class RootHook(_PartHook):
    """A hook of a module outside all units, whose parameters are whole in a forward."""

    def __call__(self, *args: Any) -> Any:
        return None if torch.compiler.is_compiling() else super().__call__(*args)


# Which modules form a unit


def find_units(
    model: nn.Module,
    units: Sequence[nn.Module] | type | tuple[type, ...] | None,
    *,
    merge_bytes: float,
    starts: Sequence[nn.Module] = (),
) -> list[list[nn.Module]]:
    """The modules of each unit in registration order; the first unit is the root.

    Neighbours are merged into one unit while their parameters fit into merge_bytes; those in
    `starts` begin a unit.

    Raises:
        ValueError: a module that is not in the model, or inside another unit.
    """
    order = dict.fromkeys(model.modules())
    if units is None:
        chosen = _elements(model)
    elif isinstance(units, type | tuple):
        chosen = [m for m in order if isinstance(m, units) and m is not model]
    else:
        chosen = list(units)
    parts = {part for m in chosen for part in m.modules() if part is not m}
    for module in chosen:
        if module not in order or module is model:
            raise ValueError(
                f"parallelize: units contains a {type(module).__name__} that is not inside the "
                "model; pass modules of model.modules()"
            )
        if module in parts and units is not None:
            raise ValueError(
                f"parallelize: units contains a {type(module).__name__} inside another unit; "
                "leave the inner ones out"
            )
    merged, free, outer = [[model]], 0.0, {*chosen} - parts
    for module in filter(outer.__contains__, order):
        size = sum(p.nbytes for p in module.parameters())
        if size and size <= free and module not in starts:
            merged[-1].append(module)
            free -= size
        elif size:
            merged.append([module])
            free = merge_bytes - size
    return merged


def _elements(module: nn.Module) -> list[nn.Module]:
    elements = []
    for child in module.children():
        listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        # Cells run once per time step, perhaps more often on one rank than on another.
        if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.RNNCellBase):
            elements.append(child)
        else:
            elements.extend(_elements(child))
    return elements


def unit_of_parameters(units: list[list[nn.Module]]) -> dict[nn.Parameter, int]:
    """The unit of each parameter of the model; the root if several units share it."""
    units_of: dict[nn.Parameter, int] = {}
    inner: set[nn.Module] = set()
    for index in (*range(1, len(units)), ROOT):
        for part in [part for module in units[index] for part in module.modules()]:
            if index != ROOT or part not in inner:
                inner.add(part)
                for p in part.parameters(recurse=False):
                    units_of[p] = index if units_of.get(p, index) == index else ROOT
    return units_of
