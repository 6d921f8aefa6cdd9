"""EngineOptimizer: everything of an optimizer except the update, and its checks.

How ranks agree: a rank of a sharded engine holds only its pieces of the gradients. Norm, clip
factor and overflow come from bins that the engine's control exchange sums over the shards; bins are
integers, so all ranks get the same bits, and those of one process. The exchange also decides which
parameters have a gradient: all ranks step the same ones, and count the steps of parameters of which
they own no element.

torch.compile: a compiled training step runs step() and zero_grad() uncompiled, between its graphs:
they are a few kernel calls already, and tracing their bookkeeping would only add guards. torch's
own decorator for this imports torch._dynamo at the first call, which takes 1.4 s and over 100 MB in
processes that never compile (test_a_step_does_not_import_the_compiler); uncompiled() checks for it
first.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import numbers
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpar.engine.absent import engines_of
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.engine.optimizers import engines_made, refuse_scaler
from fastpar.kernels.global_norm import (
    NORM_WORDS,
    GlobalNorm,
    global_norm,
    norm_bins,
    norm_from_bins,
    norm_of_rows,
)
from fastpar.kernels.lists import are_usual, goes_at_once, rows_of
from fastpar.optim.state import (
    add_master,
    entry_block,
    kept_entries,
    master_entry,
    settle,
)


def number(caller: str, name: str, value: Any) -> float:
    """The value of an option that is a number or a tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{caller}: expected a number or a tensor of one element, got {name} of "
                f"shape={list(value.shape)}; use a group for each value"
            )
        return float(value)
    if not isinstance(value, numbers.Real):
        raise ValueError(
            f"{caller}: expected {name} to be a number, got {name}={value!r}; convert it, or omit "
            "it for the default"
        )
    return float(value)


def pair(caller: str, name: str, value: Any) -> tuple[Any, Any]:
    """The two numbers of an option such as betas."""
    entries = tuple(value) if isinstance(value, Iterable) else ()
    if isinstance(value, str) or len(entries) != 2:
        raise ValueError(
            f"{caller}: expected {name} to be two numbers, got {name}={value!r}; pass a tuple of "
            "two, or omit it for the default"
        )
    return entries


def check_ranges(caller: str, options: dict[str, tuple[Any, float, float]]) -> None:
    """Refuse a value outside low <= value < high, of name -> (value, low, high); 0 may be high."""
    for name, (given, low, high) in options.items():
        value = number(caller, name, given)
        if not (low <= value < high or value == high == 0.0):
            relation = "<=" if high == 0.0 else "<"
            raise ValueError(
                f"{caller}: expected {low} <= {name} {relation} {high}, got {name}={value}; "
                "correct the option of this group"
            )


def check_plain(caller: str, group: dict[str, Any], i: int, *, pieces: bool) -> None:
    """Refuse parameters without memory of their own: DTensors, sparse tensors; and, unless pieces,
    those of FSDP, of which each rank holds a shard."""
    for position, p in enumerate(group["params"]):
        if is_traceable_wrapper_subclass(p):
            raise ValueError(
                f"{caller}: expected plain tensors, got {where(group, i, position)} of "
                f"type={type(p).__name__}; instead of FSDP2's fully_shard use fastpar.parallelize("
                "model, mesh, zero_stage=3), or use torch.optim with it"
            )
        if not pieces and (hasattr(p, "_is_flat_param") or getattr(p, "_fsdp_flattened", False)):
            clips = ", or clip with the FSDP model's clip_grad_norm_()" if caller == "AdamW" else ""
            raise ValueError(
                f"{caller}: expected whole parameters{' with max_grad_norm' if clips else ''}, got "
                f"{where(group, i, position)}, which FSDP has sharded; instead of FSDP use "
                f"fastpar.parallelize(model, mesh, zero_stage=3){clips}"
            )
        if p.layout is not torch.strided:
            raise ValueError(
                f"{caller}: expected dense parameters, got {where(group, i, position)} of layout="
                f"{p.layout}; pass a parameter made of its to_dense()"
            )


def check_same_groups(
    caller: str, groups: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> None:
    """Refuse saved groups of other sizes."""
    differs = []
    if len(groups) != len(saved):
        differs = [f"{len(groups)} parameter groups, got {len(saved)}"]
    for i, (group, other) in enumerate(zip(groups, saved)):
        mine, theirs = len(group["params"]), len(other["params"])
        if mine != theirs:
            differs.append(f"{mine} parameters in group {i}, got {theirs}")
    if differs:
        raise ValueError(
            f"{caller}: expected {differs[0]}; load the state that was saved with this model and "
            "these groups"
        )


def where(group: dict[str, Any], i: int, position: int) -> str:
    """The name of a parameter in errors."""
    names = group.get("param_names")
    name = f" ('{names[position]}')" if names else ""
    return f"parameter {position} of group {i}{name}"


def scalar(value: float | Tensor, device: torch.device) -> float | Tensor:
    """A number, or an fp32 tensor [] on the device that a kernel reads."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.device.type == "cpu" and (device.type != "cpu" or value.dtype != torch.float32):
        return value.item()
    if device.type == "cpu":  # for a kernel that is called later, when a schedule may change it
        return value.reshape(()).clone()
    return value.to(device, torch.float32).reshape(())


def check_host(optimizer: Any, engine: Any) -> None:
    """Refuse an optimizer that cannot step on the host if the engine offloads its state."""
    if engine is not None and engine.shards.storage.steps_later and not optimizer.steps_on_host:
        name = type(optimizer).__name__
        raise ValueError(
            f"{name}: offload={engine.shards.storage.where!r} needs an optimizer that steps on the "
            f"host, but {name} computes on whole matrices; use fastpar.AdamW, or drop offload"
        )


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile from tracing the method; see the top of this file."""

    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is None or not hasattr(compiler, "disable"):  # absent, or being imported
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(compiler.disable(method))  # 40 us
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch without its decorator for the compiler."""
    return getattr(method, "__wrapped__", method)


class Row(NamedTuple):
    """A parameter in a step, and the piece of it that this rank updates."""

    param: Tensor
    piece: Tensor  # the parameter itself, or this rank's elements of it
    grad: Tensor  # of the piece
    group: int
    position: int  # among all parameters of the optimizer
    start: int  # the piece's first element
    engine: Engine | None


class Rows:
    """Rows, kept as columns: a step of many small tensors is as long as making them.

    Attributes: the fields of Row, a sequence each.
    """

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        self._columns = columns
        self.params, self.pieces, self.grads, self.groups, self.positions, *_ = columns
        self.owners = columns[-1]
        self._read: Tensor | None = None

    def table(self, *, zero_grad: bool = False) -> Tensor | None:
        """rows_of() the pieces, which will be written, then of the gradients, which zero_grad
        writes too. None: this is no eager call on plain tensors."""
        if self._read is None and len(self):
            both = [*self.pieces, *self.grads]
            if goes_at_once(both):
                self._read = rows_of(both, len(both) if zero_grad else len(self))
        return self._read

    def have_usual_grads(self, *, zero_grad: bool = False) -> bool:
        """Whether the table's gradients are contiguous fp32, bf16 or fp16 of one device."""
        table = self.table(zero_grad=zero_grad)
        return table is not None and are_usual(table, len(self))

    @classmethod
    def of(cls, rows: Rows | Iterable[Row]) -> Rows:
        """The same rows."""
        return rows if isinstance(rows, Rows) else cls([*zip(*rows)] or [()] * len(Row._fields))

    def __len__(self) -> int:
        return len(self.params)

    def __iter__(self) -> Iterator[Row]:
        return map(Row._make, zip(*self._columns))


class Members(NamedTuple):
    """The parameters of an optimizer, in the order of its groups."""

    params: list[Tensor]
    owners: list[Engine | None]
    groups: list[int]
    engines: list[Engine]  # each once
    sizes: list[int]  # of the groups
    engines_made: int  # when this was found


class SavedState:
    """What checkpoints ask of an optimizer: the entries of its state, and loading them.

    Attributes:
        name: of the optimizer, for errors.
    """

    master_weights: bool | str = False
    state: Any
    param_groups: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The name of its class."""
        return type(self).__name__

    def settle(self) -> None:
        """Wait for parts of the state that still change."""
        settle(self)  # type: ignore[arg-type]

    def entry_block(self, name: str) -> int:
        """Elements of the parameter per element of an entry; 0: every rank has all of it."""
        return entry_block(name)

    def master_entry(self, p: Tensor) -> str | None:
        """The entry of the fp32 master of a parameter; None: it has none."""
        return master_entry(p.dtype, self.master_weights)

    def _convert(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, where: str, copy: bool
    ) -> dict[str, Any]:
        """Convert a saved, checked state to this optimizer's form; p may be this rank's piece.

        Args:
            where: names the parameter in errors.
            copy: False: moments that have this form already may be returned as they are.
        Raises:
            ValueError: a master that is not this parameter's.
        """
        moments = self._convert_moments(saved, p, group, copy=copy)
        state: dict[str, Any] = {**kept_entries(saved, p), **moments}
        caller = f"{self.name}.load_state_dict"
        add_master(state, p, self.master_weights, saved, caller=caller, where=where)
        return state

    def _check_entries(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], where: str
    ) -> None:
        """Refuse the state of another parameter, by the name of its first wrong entry."""
        caller = f"{self.name}.load_state_dict"
        advice = "load the state that was saved with this model, in the order of its parameters"
        for forms in self._required(p, group):
            if not any(saved.keys() >= set(form) for form in forms):
                raise ValueError(
                    f"{caller}: expected {forms[0][0]} for {where}, got entries={sorted(saved)}; "
                    f"{advice}"
                )
        for name, shape in self.entry_shapes(p).items():
            got = getattr(saved.get(name), "shape", torch.Size())
            one = name == "step" and got.numel() == 1  # [1] up to torch 2.0
            if name in saved and got != shape and not one:
                raise ValueError(
                    f"{caller}: expected {name} of shape {list(shape)} for {where}, got shape="
                    f"{list(got)}; {advice}"
                )

    def check_saves(self) -> None:
        """Raise ValueError if a checkpoint would lack a part of the state."""

    def check_saved(self, p: Tensor, saved: dict[str, Tensor], *, where: str) -> None:
        """Check the whole shapes of a parameter's entries; for checkpoints.

        Raises:
            ValueError: an entry is missing or has another shape.
        """
        self._check_entries(saved, p, self._group_of(p), where)

    @torch.no_grad()
    def load_piece(
        self, p: Tensor, target: Tensor, saved: dict[str, Tensor], *, where: str
    ) -> None:
        """Load this rank's part of a saved state, in any form.

        The old state's memory is reused if it fits, as captured graphs refer to it.

        Args:
            target: this rank's piece of p, with its new values.
            saved: tensors that the optimizer may keep.
        """
        new = self._convert(saved, target, self._group_of(p), where=where, copy=False)
        old = self.state[p]
        for name, value in new.items():
            mine = old.get(name)
            same = isinstance(mine, Tensor) and isinstance(value, Tensor)
            if same and (mine.shape, mine.dtype) == (value.shape, value.dtype):
                if mine.data_ptr() != value.data_ptr():
                    mine.copy_(value)
            else:
                old[name] = value
        for name in old.keys() - new.keys():
            del old[name]

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        known: dict[Tensor, dict[str, Any]] = self.__dict__.get("_groups", {})
        if not any(known.get(p) is g for g in self.param_groups):  # the groups have changed
            known = self._groups = {q: g for g in self.param_groups for q in g["params"]}
        return known[p]

    # What a subclass defines

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        """Required parts of a saved state: for each the alternative forms, with their entries."""
        raise NotImplementedError

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        """The entries of a saved state besides its step and its master; see _convert."""
        raise NotImplementedError

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        raise NotImplementedError


class EngineOptimizer(SavedState, torch.optim.Optimizer):
    """An optimizer that knows engines, clips by the global norm and skips overflows.

    Attributes:
        max_grad_norm: of the constructor; infinity only measures.
        grad_norm: fp32 tensor [], of the last step, before clipping, after division by grad_scale
            and by the engine's count of tokens; None if it was not needed: no max_grad_norm, and
            no loss scale or one whose overflows found_inf reports.
        grad_scale: the loss scale, divisor of gradients; 1 by default.
        found_inf: tensor of one element, nonzero if the gradients are known to be not finite.
            torch.amp.GradScaler sets both around step(); a training loop may do so too, on all
            ranks, whose flags are added.
        skipped: whether the last step changed nothing because its gradients were not finite, which
            happens only after grad_scale or found_inf was set. Reading it on a GPU waits for the
            step.
    """

    steps_engines = True  # see fastpar/engine/optimizers.py
    steps_on_host = False  # True: prepare() returns its kernel calls; see fastpar/axes/offload.py
    zero_grad_in_step = False
    grad_scale: float | Tensor = 1.0
    found_inf: Tensor | None = None
    grad_norm: Tensor | None = None
    _found: Tensor | None = None  # flag of the last step, on the device

    def set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        """Check and set it; call before super().__init__()."""
        name = type(self).__name__
        if max_grad_norm is not None and not number(name, "max_grad_norm", max_grad_norm) > 0:
            raise ValueError(
                f"{name}: expected max_grad_norm > 0 or None, got "
                f"max_grad_norm={max_grad_norm}; None turns clipping off"
            )
        self.max_grad_norm = max_grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the last step changed nothing because its gradients were not finite."""
        return self._found is not None and bool(self._found.item())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; checks its options and parameters, also for the constructor."""
        caller = type(self).__name__
        for name in self._not_in_groups:
            if name in param_group:
                raise ValueError(
                    f"{caller}: {name} is an option of the optimizer, got {name}="
                    f"{param_group[name]} in a group; use one optimizer for each {name}, and "
                    "parallelize(zero_stage=1) instead of ZeroRedundancyOptimizer"
                )
        plain(torch.optim.Optimizer.add_param_group)(self, param_group)
        group = self.param_groups[-1]
        try:
            pieces = self.steps_on_host and self.max_grad_norm is None  # element by element
            check_plain(caller, group, len(self.param_groups) - 1, pieces=pieces)
            self._check_options(group, caller)
            for p in group["params"]:
                check_host(self, engine_of_parameter(p))
                self._check_parameter(p, group)
            self._check_memory()
        except ValueError:
            self.param_groups.pop()
            raise
        alone = self.__dict__.setdefault("_alone", set())  # parameters without an engine
        for p in group["params"]:
            (alone.add if engine_of_parameter(p) is None else alone.discard)(p)

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like torch's, for main gradients and shards too: of this optimizer's parameters."""
        params, owners, *_ = self.members()
        if not set_to_none or torch.autograd._profiler_enabled():
            if None in owners:
                plain(torch.optim.Optimizer.zero_grad)(self, set_to_none)
        else:
            for p, owner in zip(params, owners):
                if owner is None:
                    p.grad = None
        for engine in self.engines():
            engine.zero_grad(set_to_none, of=self)

    def engines(self) -> list[Engine]:
        """The engines of the parameters, each once."""
        return self.members().engines

    def members(self) -> Members:
        """The parameters with their engines; found anew when the groups or engines change."""
        params = [p for g in self.param_groups for p in g["params"]]
        sizes = [len(g["params"]) for g in self.param_groups]
        known: Members | None = self.__dict__.get("_known_members")
        if (
            known is None
            or (known.sizes, known.engines_made) != (sizes, engines_made())
            or not all(map(operator.is_, params, known.params))
        ):
            owners = engines_of(params)
            groups = [i for i, size in enumerate(sizes) for _ in range(size)]
            engines = [e for e in dict.fromkeys(owners) if e is not None]
            known = Members(params, owners, groups, engines, sizes, engines_made())
            self._known_members = known
        return known

    # The step

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on all groups; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_capture()
        engines, rows, factor, found_inf = self.begin_step()
        for engine in engines:
            rows = engine.shards.storage.step(self, rows, factor, found_inf)
        self._update(rows, factor, found_inf)
        for engine in engines:
            engine.after_step()
        return loss

    @uncompiled
    @torch.no_grad()
    def step_rows(self, rows: list[Row]) -> None:
        """The device's part of a step, for gradients that no other rank contributes to.

        For captured graphs: does not call engines. Sets grad_norm.
        """
        engines = list({id(row.engine): row.engine for row in rows if row.engine}.values())
        factor, found_inf = self._factor(Rows.of(rows), [], engines)
        self._update(rows, factor, found_inf)

    def begin_step(self) -> tuple[list[Engine], Rows, Tensor | None, Tensor | None]:
        """Finish the engines' reductions and agree with the other ranks on this step.

        Sets grad_norm and skipped. No host synchronization.

        Returns:
            The engines, whose after_step() the caller calls; the rows; the factor of their
            gradients; the flag under which nothing may change.
        Ranks: all, for every engine.
        Raises:
            RuntimeError: a sparse gradient; an optimizer older than the engine; GradScaler with
                gradients that it does not see.
        """
        params, owners, groups, engines, *_ = self.members()
        if engines:
            self._check_age()
        if self.found_inf is not None:
            self._refuse_scaler(engines)
        for engine in engines:
            engine.before_step(self)
        n = len(params)
        pieces: Sequence[Tensor] = params
        grads: Sequence[Any]
        starts: Sequence[int] = [0] * n
        if all(e.shards.are_stepped_in_place() for e in engines):
            grads = [p.grad for p in params]
        elif len(engines) == 1 and None not in owners:
            pieces, grads, starts = engines[0].shards.columns(params)
        else:
            of = {e: e.shards.pieces() for e in engines}
            each = [(p, p.grad, 0) if e is None else of[e][p] for p, e in zip(params, owners)]
            pieces, grads, starts = map(list, zip(*each))
        rows = Rows((params, pieces, grads, groups, range(n), starts, owners))
        if any(map(operator.is_, grads, itertools.repeat(None))):
            rows = Rows.of(row for row in rows if row.grad is not None)
        if not rows.have_usual_grads(zero_grad=self.zero_grad_in_step):
            for grad in rows.grads:
                if grad.layout != torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__}.step: expected dense gradients, got layout="
                        f"{grad.layout}; build the embedding with sparse=False"
                    )
        measures = self._scaled or self.max_grad_norm is not None
        bins = [self._exchange(e, rows if measures else None) for e in engines]
        for engine in engines:
            if without := engine.without_grad():
                rows = Rows.of(row for row in rows if row.param not in without)
        factor, found_inf = self._factor(rows, [b for b in bins if b is not None], engines)
        return engines, rows, factor, found_inf

    def _check_age(self) -> None:
        alone: set[Tensor] = self.__dict__.get("_alone", set())
        for i, group in enumerate(self.param_groups if alone else ()):
            for position, p in enumerate(group["params"]):
                if p in alone and engine_of_parameter(p) is not None:
                    raise RuntimeError(
                        f"{type(self).__name__}.step: {where(group, i, position)} was parallelized "
                        "after the optimizer was built; build the optimizer after "
                        "fastpar.parallelize"
                    )

    @property
    def _scaled(self) -> bool:
        """Whether there is a loss scale: only then a step may be skipped."""
        return "grad_scale" in self.__dict__ or self.found_inf is not None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler reads this in step(), before it looks at p.grad."""
        self._refuse_scaler(self.engines())
        return True

    def _refuse_scaler(self, engines: list[Engine]) -> None:
        refuse_scaler(self.name, engines)
        saw_none = not isinstance(self.found_inf, Tensor | None)
        if saw_none or any(engine.shards.has_main_grads for engine in engines):
            raise RuntimeError(
                f"{type(self).__name__}.step: GradScaler does not see main gradients, which are "
                "not in p.grad; parallelize without grad_dtype, or set grad_scale from a "
                "DynamicLossScale"
            )

    def _exchange(self, engine: Engine, rows: Rows | None) -> Tensor | None:
        """The control exchange of one engine; returns the bins of all its shards, if needed.

        Replicated elements count on one rank only, but overflows count on any.
        """
        if rows is None:
            return engine.exchange(None)
        mine = (p for group in self.param_groups for p in group["params"])
        bins = engine.shards.storage.norm_bins(mine)
        if not engine.shares:
            engine.exchange(None)
            return bins
        if bins is not None:
            return engine.exchange(bins)
        grads, params = rows.grads, rows.params
        if not all(map(operator.is_, rows.owners, itertools.repeat(engine))):
            owned = [row for row in rows if row.engine is engine]
            grads, params = [row.grad for row in owned], [row.param for row in owned]
        counted = None if engine.shards.counts_all else [*map(engine.shards.counts, params)]
        none = torch.zeros(NORM_WORDS, dtype=torch.int64, device=engine.mesh.device)
        return engine.exchange(norm_bins(grads, counted=counted, out=none))

    def _factor(
        self, rows: Rows, bins: list[Tensor], engines: list[Engine]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The factor of gradients, and the flag under which nothing may change.

        Args:
            bins: of the sharded engines' gradients, over all ranks.
        """
        self.grad_norm = self._found = None
        limit, scaled, tokens = self.max_grad_norm, self._scaled, self._tokens(engines)
        if not rows:
            return None, None
        device = engines[0].mesh.device if engines else rows.grads[0].device
        loss_scale = scalar(self.grad_scale, device) if scaled else None
        if tokens is not None:
            tokens = tokens.to(device, torch.float32).reshape(())
            loss_scale = tokens if loss_scale is None else tokens * loss_scale
        known = self.found_inf
        if known is not None:
            known = known.reshape(()).to(device, torch.float32)
            for engine in engines:
                if engine.shares:  # a rank that skips alone would have other weights
                    known = engine.all_reduce_scalars(known)
        if limit is None and not bins and (known is not None or not scaled):
            self._found = known
            if loss_scale is None:
                return None, None
            return torch.ones((), device=device, dtype=torch.float32) / loss_scale, known
        max_norm = None if limit == math.inf else limit
        parts = {e for e in engines if e.steps_pieces}
        norm = None
        table = None if parts or bins else rows.table(zero_grad=self.zero_grad_in_step)
        if table is not None and are_usual(table, len(rows)):
            own, like = table[len(rows) :], rows.grads[0]
            norm = norm_of_rows(own, like, max_norm=max_norm, loss_scale=loss_scale)
        if norm is None:
            whole = [row.grad for row in rows if row.engine not in parts] if parts else rows.grads
            norm = _norm(whole, bins, device, max_norm=max_norm, loss_scale=loss_scale)
        self.grad_norm = norm.norm
        factor = None if limit == math.inf and loss_scale is None else norm.grad_scale
        if scaled:
            self._found = norm.found_inf if known is None else norm.found_inf.maximum(known)
        return factor, self._found

    def _tokens(self, engines: list[Engine]) -> Tensor | None:
        """The engine's count of tokens, by which gradients are divided."""
        found = [engine.control.token_scale for engine in engines]
        if len(found) > 1 and any(t is not None for t in found):
            raise RuntimeError(
                f"{type(self).__name__}.step: counting tokens needs one engine, got {len(found)} "
                "engines; build one optimizer for each model"
            )
        return found[0] if found else None

    # State

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with whole tensors. Ranks: all, if parameters are sharded or split."""
        with self._whole_state():
            return plain(torch.optim.Optimizer.state_dict)(self)

    @contextlib.contextmanager
    def _whole_state(self) -> Iterator[None]:
        """Make self.state whole inside, on the CPU, for parameters of sharded engines."""
        self.settle()
        mine, whole = self.state, {}
        for p in itertools.chain.from_iterable(g["params"] for g in self.param_groups):
            engine = engine_of_parameter(p)
            if engine is not None:
                engine.shards.settle()
            if engine is not None and engine.shares:
                whole[p] = {
                    name: x.cpu() if isinstance(x, Tensor) else x
                    for name, value in mine.get(p, {}).items()
                    for x in [engine.shards.full(value, p, block=self.entry_block(name))]
                }
        if not whole:
            yield
            return
        self.state = defaultdict(dict, {**mine, **{p: s for p, s in whole.items() if s}})
        try:
            yield
        finally:
            self.state = mine

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer or of torch's; nothing changes if it is refused.

        torch's own method would cast fp32 moments of 16-bit parameters to 16 bits.
        """
        caller = f"{type(self).__name__}.load_state_dict"
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        saved_groups = [{**g} for g in state_dict["param_groups"]]
        check_same_groups(caller, self.param_groups, saved_groups)
        groups: list[dict[str, Any]] = []
        state: defaultdict[Any, Any] = defaultdict(dict)
        left = dict(state_dict["state"])
        for i, (mine, saved) in enumerate(zip(self.param_groups, saved_groups)):
            values = {k: copy.deepcopy(v) for k, v in saved.items() if k != "params"}
            group = {**self.defaults, **values, "params": mine["params"]}
            if "param_names" in mine:
                group.setdefault("param_names", mine["param_names"])
            self._check_options(group, caller)
            groups.append(group)
            for position, (p, key) in enumerate(zip(group["params"], saved["params"])):
                self._check_parameter(p, group)
                saved_state = left.pop(key, None)
                if not saved_state:
                    continue
                place = where(group, i, position)
                self._check_entries(saved_state, p, group, place)
                target, engine = p, engine_of_parameter(p)
                if engine is not None and engine.steps_pieces:
                    target = engine.shards.piece(p).param.detach()
                    saved_state = {
                        n: engine.shards.shard_of(x, p, block=self.entry_block(n))
                        for n, x in saved_state.items()
                    }
                state[p] = self._convert(saved_state, target, group, where=place, copy=True)
        state.update(left)
        for name in self._in_state_dict & state_dict.keys():
            setattr(self, name, state_dict[name])
        self.__setstate__({"state": state, "param_groups": groups})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        own = ("master_weights", "max_grad_norm", "grad_norm", "grad_scale", "found_inf", "_found")
        kept = {n: self.__dict__[n] for n in (*own, *self._attributes) if n in self.__dict__}
        return {**super().__getstate__(), **kept}

    # What a subclass defines

    _not_in_groups: tuple[str, ...] = ("max_grad_norm", "master_weights")
    _attributes: tuple[str, ...] = ()  # kept by copies and pickles
    _in_state_dict: frozenset[str] = frozenset()  # attributes that state dicts may have

    def _check_options(self, group: dict[str, Any], caller: str) -> None:
        raise NotImplementedError

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _check_memory(self) -> None:
        """Refuse parameters that the kernels cannot update in place."""

    def _check_capture(self) -> None:
        """Refuse a step that a CUDA graph cannot capture."""

    def _update(
        self, rows: Rows | list[Row], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update the rows; gradients are multiplied by factor, nothing changes under found_inf."""
        raise NotImplementedError


def _norm(
    whole: Sequence[Tensor],
    bins: list[Tensor],
    device: torch.device,
    *,
    max_norm: float | None,
    loss_scale: float | Tensor | None,
) -> GlobalNorm:
    """The norm of gradients on one or several devices and of bins, on the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad, where in zip(whole, [grad.device for grad in whole]):
        by_device.setdefault(where, []).append(grad)
    lists = list(by_device.values())
    if len(lists) == 1 and not bins:
        return global_norm(lists[0], max_norm=max_norm, loss_scale=loss_scale)
    parts = [b.to(device) for b in (*bins, *map(norm_bins, lists))]
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return norm_from_bins(total, max_norm=max_norm, loss_scale=loss_scale)
