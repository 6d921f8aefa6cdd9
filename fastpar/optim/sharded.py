"""fastpar.Sharded: any elementwise optimizer, on sharded parameters.

    opt = fastpar.Sharded(torch.optim.RAdam, model.parameters(), lr=1e-3, max_grad_norm=1.0)

An optimizer is elementwise if the update of an element depends only on that element's history: SGD,
Adam, RAdam, Lion. It may then step pieces of tensors, as ranks of ZeRO and tensor parallelism hold
them, with the result of one process. LAMB, Shampoo, Adafactor and Muon need whole tensors; Prodigy
needs the whole model.

An optimizer does not say whether it is elementwise, so the constructor tries: it steps two tensors
whole, and in halves as two ranks would, and compares the bits of values and state after each of 32
steps ([Note: trial]). Where ranks have whole parameters it steps twice with other random numbers.
The trial also shows the entries of the state: like the tensor (cut as it is), or others (the same
on all ranks). Entries that it does not show are refused when they appear and when they are loaded.
torch.optim's own elementwise classes are known: of these it looks at the entries only.

The inner optimizer is built once; each step shows its parameters this rank's memory (Tensor.data).
Its entries in `state` are the same tensors as ours, beside masters and averages, which it does not
see.

One thread: torch's CPU kernels round 16-bit sums differently in whole vectors and in the rest at
the end, and each thread's range of a tensor has an end. So 16-bit weights without masters are
stepped by one thread on a CPU: pieces begin at multiples of 256 elements, so their ends are the
tensor's. Slices of tp may end anywhere: there 16-bit weights without masters (with torch's fused
kernels fp32 ones too) may differ by a rounding from those of one process.

[Note: trial] Halves are one-dimensional, begin at whole vectors and get gradients of other sizes,
signs and zeros than their neighbours: a norm, a mean, a shape, another parameter or a random number
that an update depends on gives other bits. The learning rate is 0.1, not the user's, which may be 0
at first. What the trial cannot show: what begins after its 32 steps, or at gradients of a size that
it does not try (0, 0.001, 1 and 1000; in fp16 30).
"""

from __future__ import annotations

import contextlib
import copy as copy_module
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.engine.engine import engine_of_parameter
from fastpar.kernels.adamw import store_values, values_of
from fastpar.optim.base import EngineOptimizer, Row, Rows
from fastpar.optim.state import (
    COUNTS,
    HALF,
    OF_WEIGHTS,
    add_master,
    check_master_weights,
    whole_shape,
)

_SHAPES, _STEPS = ((32, 32), (16, 32)), 32  # of the trial
_TRIAL = threading.Lock()  # it seeds generators that all threads share
_OURS = {"master_weight", "master_remainder", *OF_WEIGHTS, *COUNTS} - {"step"}
# Without LBFGS, SparseAdam, Adafactor and Muon.
_NAMES = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Adagrad Adadelta ASGD Rprop"
_KNOWN = frozenset(getattr(torch.optim, name) for name in _NAMES.split())


class Entry(NamedTuple):
    """One entry of the state, as the trial found it."""

    like: bool  # it has the parameter's elements; else it is the same on all ranks
    shape: torch.Size
    dtype: torch.dtype | None  # None: the dtype that is stepped
    on_device: bool
    kind: type  # Tensor, or the type of a number


class Trial(NamedTuple):
    """What some options do, besides the entries."""

    first: set[str]  # entries after one step
    counts: list[str]  # options of the group that a step changes


class Sharded(EngineOptimizer):
    """An elementwise optimizer of torch's interface, at any ZeRO stage and tensor parallelism.

    The inner optimizer is built once and steps this rank's piece of each parameter (at stage 0
    without tp the whole one). Groups, learning rate schedules, hooks and state dicts work as the
    inner optimizer's.

    Args:
        inner: a subclass of torch.optim.Optimizer, or a function with its arguments.
        params: parameters, named parameters, or groups with the inner optimizer's options.
        max_grad_norm: as in fastpar.AdamW. During the step the scaled gradients are a copy: 4
            bytes per element that this rank steps.
        master_weights: the inner optimizer steps fp32 copies of 16-bit parameters; "remainder"
            keeps only the 16 bits that bf16 lacks.
        options: the inner optimizer's: lr and so on.
    Attributes:
        inner: the optimizer; its parameters are this rank's pieces.
        grad_norm, grad_scale, found_inf, skipped: as in fastpar.AdamW; with a loss scale, step()
            waits on the host to know whether it overflowed.
    Ranks: all ranks of the model's mesh call step(), and state_dict() at zero_stage >= 1 or with
        tp > 1.
    State: the inner optimizer's entries of this rank's elements, and master_weight or
        master_remainder. state_dict() is whole on every rank, and without masters it is the inner
        optimizer's, which can load it; load_state_dict() takes either's. Saver writes only entries
        of parameters: it refuses optimizers that count in options of groups or keep state
        elsewhere.
    Raises:
        ValueError: an inner optimizer that is not elementwise, with sharded or split parameters,
            also in a later step, which may then be half done; errors of the inner optimizer; the
            state of another model or optimizer.
        RuntimeError: sparse gradients; the model was parallelized after the optimizer was built.
    """

    _attributes = "inner", "_make", "_given", "_pieces", "_built", "_entries", "_trials", "_unknown"
    _built = False
    _unknown: str | None = None  # an entry that is not as in the trial

    def __init__(
        self,
        inner: Callable[..., torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        max_grad_norm: float | None = None,
        master_weights: bool | str = False,
        **options: Any,
    ) -> None:
        check_master_weights("Sharded", master_weights)
        self.master_weights = master_weights
        self.set_max_grad_norm(max_grad_norm)
        self._make, self._given = inner, options
        self._entries: dict[str, Entry] = {}
        self._trials: dict[str, Trial] = {}
        self._pieces: list[list[Tensor]] = []  # the inner optimizer's parameters, by group
        self.inner = self._build([_square()])
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise ValueError(
                "Sharded: expected a class of optimizers, got an object of "
                f"{type(self.inner).__name__}; pass the class and its options, as in "
                "fastpar.Sharded(torch.optim.RAdam, params, lr=1e-3)"
            )
        super().__init__(params, dict(self.inner.defaults))
        groups = [self._pieces_of(group) for group in self.param_groups]
        self.inner = self._build(groups)
        self._after_building()

    @property
    def _name(self) -> str:
        return type(self.inner).__name__

    def _build(self, groups: list[Any]) -> torch.optim.Optimizer:
        built = self._make(groups, **self._given)
        built._fastpar_inner = True  # type: ignore[attr-defined]  # it steps pieces: comm/mesh.py
        return built

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also to the inner optimizer."""
        super().add_param_group(param_group)
        if not self._built:
            return
        try:
            group = self._pieces_of(self.param_groups[-1])
            self.inner.add_param_group(group)
            self._after_building()
        except Exception:
            self.param_groups.pop()
            for groups in (self._pieces, self.inner.param_groups):
                del groups[len(self.param_groups) :]
            raise

    def _pieces_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with a parameter of the inner optimizer for each of ours."""
        pieces: list[Tensor] = []
        for p in group["params"]:
            engine = engine_of_parameter(p)
            piece = p if engine is None else engine.shards.piece(p).param
            pieces.append(torch.nn.Parameter(piece.detach().to(self._stepped_dtype(p))))
        self._pieces.append(pieces)
        names = group.get("param_names")
        return {**_options(group), "params": list(zip(names, pieces)) if names else list(pieces)}

    def _after_building(self) -> None:
        kept = [group["params"] for group in self.inner.param_groups]
        if [list(map(id, xs)) for xs in kept] != [list(map(id, xs)) for xs in self._pieces]:
            raise ValueError(
                f"Sharded: expected {self._name} to keep its groups of "
                f"{[len(xs) for xs in self._pieces]} parameters, got {[len(xs) for xs in kept]}; "
                "make the groups before they are passed"
            )
        self._built = True
        self._pull()
        for p, x in self._pairs():
            if x.dtype != p.dtype:
                x.data = x.data.new_empty(0)  # until a step shows it the master

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for group, pieces in zip(self.param_groups, self._pieces):
            yield from zip(group["params"], pieces)

    def _check_options(self, group: dict[str, Any], caller: str) -> None:
        self._build([{**_options(group), "params": [_square()]}])
        self._learn(group)

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.dtype == torch.float16 and self.master_weights == "remainder":
            raise ValueError(
                "Sharded: expected fp16 parameters with master_weights=True, got 'remainder', "
                "which works for bf16 only; pass master_weights=True"
            )

    def _stepped_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float32 if p.dtype in HALF and self.master_weights else p.dtype

    # The trial

    def _refusal(self, why: object, params: Iterable[Tensor]) -> ValueError:
        engines = _engines(params)
        if not _shares(engines):
            return ValueError(
                f"Sharded: {self._name} would step each rank otherwise, as {why}; use an "
                "optimizer without random numbers, or one rank"
            )
        return ValueError(
            f"Sharded: {self._name} is not elementwise, as {why}, so it cannot run with "
            f"{engines[0].sharing}; use an elementwise optimizer (fastpar.AdamW, or fastpar.Muon, "
            "which gathers matrices), or zero_stage=0 without tp"
        )

    def _learn(self, group: dict[str, Any]) -> Trial:
        """What a trial of the group's options shows; see "The trial" above."""
        kinds = {(p.device.type, self._stepped_dtype(p)): p.device for p in group["params"]}
        options = {k: v for k, v in _options(group).items() if not k.endswith("lr")}
        key = repr((options, sorted(kinds, key=repr), _shares(_engines(group["params"]))))
        if key not in self._trials:
            trial = Trial(set(), [])
            for kind, dtype in sorted(kinds, key=repr):
                device = torch.device("cpu") if kind == "meta" else kinds[kind, dtype]
                trial = self._try(group, device, dtype)
            self._trials[key] = trial
        return self._trials[key]

    def _try(self, group: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Trial:
        engines = _engines(group["params"])
        shares, part = _shares(engines), "a tensor"
        runs: list[int | None] = [None]  # of whole tensors, or of one half of each
        if not _is_known(self.inner) and any(e.mesh.world_size > 1 for e in engines):
            runs += [0, 1] if shares else [None]
        if shares:
            part = "a part of a tensor"
        try:
            inner, first, before = self._step_runs(_options(group), runs, device, dtype)
            x = inner.param_groups[0]["params"][0]
            kept = {n: v for n, v in inner.state.get(x, {}).items() if v is not None}
            entries = {name: _entry(value, x) for name, value in kept.items()}
            for name, entry in entries.items() if shares else ():
                if entry.kind not in (Tensor, bool, int, float):
                    raise NotElementwise(f"it keeps a {entry.kind.__name__} as '{name}'")
        except NotElementwise as why:
            raise self._refusal(why, group["params"]) from None
        except Exception as error:
            raise ValueError(
                f"Sharded: {self._name} cannot step {part} ({error}); use an elementwise "
                "optimizer, or torch.optim's own with zero_stage=0 and without tp"
            ) from error
        self._entries.update(entries)
        after = _options(inner.param_groups[0])
        return Trial(first & entries.keys(), [n for n, v in before.items() if v != repr(after[n])])

    def _step_runs(
        self, options: dict[str, Any], runs: list[int | None], device: torch.device,
        dtype: torch.dtype,
    ) -> tuple[torch.optim.Optimizer, set[str], dict[str, str]]:  # fmt: skip
        """Step the tensors of the trial in each run; returns the first one's optimizer, its entries
        after one step, and its options as they were before.

        Raises:
            NotElementwise: another run has other bits.
        """
        if isinstance(options.get("lr"), (float, int, Tensor)):
            options["lr"] = options["lr"] * 0.0 + 0.1  # so that each step can be seen
        values, *gradients = [
            [x.view(s) if run is None else x[run] for run in runs for x, s in zip(each, _SHAPES)]
            for each in _draws(device, dtype)
        ]
        n = len(_SHAPES)
        params: list[Tensor] = [torch.nn.Parameter(x.clone()) for x in values]
        of_runs = [params[i : i + n] for i in range(0, len(params), n)]
        inners, first, before = [], set[str](), {}
        generators, on_gpu = [torch.default_generator], []
        if device.type == "cuda":
            on_gpu = [torch.cuda.current_device() if device.index is None else device.index]
            generators += [torch.cuda.default_generators[i] for i in on_gpu]
        with _TRIAL, torch.random.fork_rng(on_gpu), _one_thread(params):
            for xs in of_runs:
                inners.append(self._build([{**options, "params": xs}]))
            before = {k: repr(v) for k, v in _options(inners[0].param_groups[0]).items()}
            for i, grads in enumerate(gradients):
                for x, grad in zip(params, grads):
                    x.grad = grad.clone()
                for seed, inner in enumerate(inners):
                    for generator in generators:
                        generator.manual_seed(seed)
                    inner.step()
                if i == 0:
                    first = set(inners[0].state.get(params[0], {}))
                for each in zip(*of_runs):
                    states = [inner.state.get(x, {}) for inner, x in zip(inners, each)]
                    _compare(each, states, runs)
                rest = [_of_no_parameter(inner) for inner in inners]
                _compare([], rest, runs)
        return inners[0], first, before

    # The step

    def _update(
        self, rows: Rows | list[Row], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if found_inf is not None and found_inf.item():
            return
        self._push()
        pieces = [x for _, x in self._pairs()]
        taken: list[tuple[Row, Tensor, Tensor]] = []
        for row in rows:
            state = self.state.get(row.param, {})
            add_master(state, row.piece, self.master_weights)
            if state:
                self.state[row.param] = state
            x, values = pieces[row.position], values_of(row.piece, state).detach()
            x.data = values
            x.grad = _scaled(row.grad, factor, x)
            taken.append((row, x, values))
        try:
            with _one_thread([x for _, x, _ in taken]):
                self.inner.step()
        finally:
            for x in pieces:
                x.grad = None
        for row, x, values in taken:
            if x.data_ptr() != values.data_ptr():  # the optimizer replaced x.data
                values.copy_(x.detach())
            self._check_state(row, x)
            store_values(row.piece, self.state.get(row.param, {}), values)
            torch.autograd.graph.increment_version(row.piece)
            if self.master_weights == "remainder" and x.dtype != row.piece.dtype:
                x.data = x.data.new_empty(0)
        self._pull()

    def _push(self) -> None:
        """Give the inner optimizer our options and state, where they were changed or loaded."""
        for mine, theirs in zip(self.param_groups, self.inner.param_groups):
            theirs.update(_options(mine))
        for p, x in self._pairs():
            kept = {n: v for n, v in self.state.get(p, {}).items() if n not in _OURS}
            if not kept:
                self.inner.state.pop(x, None)
                continue
            state = self.inner.state.setdefault(x, {})
            state.clear()
            state.update(kept)
        _copy_rest(self.state, self.inner.state)

    def _pull(self) -> None:
        """Show the inner optimizer's options and state as ours."""
        for mine, theirs in zip(self.param_groups, self.inner.param_groups):
            mine.update(_options(theirs))
        for p, x in self._pairs():
            state, mine = self.inner.state.get(x, {}), self.state.get(p, {})
            for name in mine.keys() - _OURS - state.keys():
                del mine[name]
            if state:
                self.state[p].update(state)
        _copy_rest(self.inner.state, self.state)

    def _check_state(self, row: Row, x: Tensor) -> None:
        """Refuse entries that the trial did not show where ranks have parts of them."""
        state = {n: v for n, v in self.inner.state.get(x, {}).items() if v is not None}
        if state.keys() - self._entries.keys():
            self._learn(self.param_groups[row.group])  # an option was changed
        for name, value in state.items():
            entry = self._entries.get(name)
            if entry is not None and isinstance(value, Tensor):
                shape, dtype = x.shape if entry.like else entry.shape, entry.dtype or x.dtype
                known = entry.kind is Tensor and (value.shape, value.dtype) == (shape, dtype)
            else:
                known = entry is not None and entry.kind is not Tensor
            if known:
                continue
            self._unknown = name
            if row.engine is not None and row.engine.shares:
                why = f"its state has '{name}', unlike in the trial of {_STEPS} steps"
                raise self._refusal(why, [row.param])

    # State

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, with whole tensors. Ranks: all, if parameters are sharded or split."""
        self._check_whole("state_dict")
        return super().state_dict()

    def check_saves(self) -> None:
        """Raise ValueError if a checkpoint, which has entries of parameters, would lack a part."""
        self._check_whole("Saver")
        counts = [name for group in self.param_groups for name in self._learn(group).counts]
        rest = [key for key in self.state if not isinstance(key, Tensor)]
        others = [n for n, e in self._entries.items() if e.kind not in (Tensor, bool, int, float)]
        for what, names in (
            ("changes options of its groups", counts),
            ("keeps state of no parameter", rest),
            ("keeps entries that are no numbers", others),
            ("keeps entries that differ between parameters", [self._unknown or ""]),
        ):
            if any(names):
                raise ValueError(
                    f"Saver: {self._name} {what} ({names[0]}), which a checkpoint does not have; "
                    "save its state_dict() yourself"
                )

    def _check_whole(self, caller: str) -> None:
        """Refuse what has state besides that of its parameters."""
        inner = self.inner
        holds = any(isinstance(v, torch.optim.Optimizer) for v in vars(inner).values())
        what = "wraps another optimizer" if holds else "has a state_dict of its own"
        if holds or type(inner).state_dict is not torch.optim.Optimizer.state_dict:
            raise ValueError(
                f"{caller}: {self._name} {what}"
                ", whose state Sharded does not know; it can train, but not be saved or resumed"
            )

    def entry_block(self, name: str) -> int:
        """1: an entry has the parameter's elements; 0: every rank has all of it."""
        entry = self._entries.get(name)
        return super().entry_block(name) if entry is None else int(entry.like)

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        whole = whole_shape(p)
        shapes = dict.fromkeys(("master_weight", "master_remainder", *OF_WEIGHTS), whole)
        return shapes | {n: whole if e.like else e.shape for n, e in self._entries.items()}

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        return [[(name,)] for name in sorted(self._learn(group).first)]

    def _check_entries(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], where: str
    ) -> None:
        self._check_whole("Sharded.load_state_dict")
        super()._check_entries(saved, p, group, where)
        for name in sorted(saved.keys() - _OURS):
            entry, value = self._entries.get(name), saved[name]
            if value is None:
                continue
            if entry is None:
                raise ValueError(
                    f"Sharded.load_state_dict: expected entries of {self._name} for {where}, got "
                    f"{name}, which it did not make in a trial of {_STEPS} steps; load the state "
                    f"that was saved with {self._name} and these options"
                )
            if isinstance(value, Tensor) and entry.kind is Tensor:
                dtype = entry.dtype or self._stepped_dtype(p)
                if value.dtype != dtype and not (
                    value.is_floating_point() and dtype.is_floating_point
                ):
                    raise ValueError(
                        f"Sharded.load_state_dict: expected {name} of dtype {dtype} for {where}, "
                        f"got dtype={value.dtype}, which has other values; load the state that "
                        f"was saved with {self._name} and these options"
                    )

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name in self._entries.keys() & saved.keys():
            value, entry = saved[name], self._entries[name]
            if value is None:
                entries[name] = None
                continue
            if entry.kind is not Tensor:
                plain = value.item() if isinstance(value, Tensor) else copy_module.deepcopy(value)
                entries[name] = entry.kind(plain)
                continue
            device = p.device if entry.on_device else torch.device("cpu")
            dtype = entry.dtype or self._stepped_dtype(p)
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=dtype, device="cpu")
            if entry.like:
                like = torch.empty_like(p, dtype=dtype, device=device, requires_grad=False)
                entries[name] = like.copy_(value)
            else:
                entries[name] = value.to(device, dtype, copy=copy).reshape(entry.shape)
        return entries


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _copy_rest(source: Any, target: Any) -> None:
    """Replace the state that belongs to no parameter."""
    for key in [key for key in target if not isinstance(key, Tensor)]:
        del target[key]
    target.update((k, v) for k, v in source.items() if not isinstance(k, Tensor))


def _engines(params: Iterable[Tensor]) -> list[Any]:
    engines = map(engine_of_parameter, params)
    return list({id(e): e for e in engines if e is not None}.values())


def _shares(engines: list[Any]) -> bool:
    return any(engine.shares for engine in engines)


def _is_known(inner: torch.optim.Optimizer) -> bool:
    """Whether a step is that of a class of torch's that is elementwise, and nothing else."""
    hooks = inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks
    return type(inner) in _KNOWN and not hooks and "step" not in vars(inner)


def _square() -> Tensor:
    return torch.zeros(8, 8, dtype=torch.float32, device="cpu")


def _entry(value: Any, x: Tensor) -> Entry:
    if not isinstance(value, Tensor):
        return Entry(False, torch.Size(), None, False, type(value))
    like = value.shape == x.shape
    dtype = None if like and value.dtype == x.dtype else value.dtype
    return Entry(like, value.shape, dtype, value.device == x.device, Tensor)


def _scaled(grad: Tensor, factor: Tensor | None, x: Tensor) -> Tensor:
    """The gradient in the stepped dtype; multiplied in fp32."""
    if factor is not None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide) * factor.to(grad.device)
    return grad.to(x.dtype).view(x.shape)


@contextlib.contextmanager
def _one_thread(stepped: list[Tensor]) -> Iterator[None]:
    """One thread of torch if 16-bit weights need it; see the top of this file."""
    n = torch.get_num_threads()
    alone = n > 1 and any(x.device.type == "cpu" and x.dtype in HALF for x in stepped)
    if alone:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if alone:
            torch.set_num_threads(n)


# The trial


class NotElementwise(Exception):  # noqa: N818 - a verdict, not a failure
    """Why an optimizer is refused."""


def _draws(device: torch.device, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """The values of the trial's tensors, then the gradients of each step: two halves, [2, N / 2],
    of other sizes, signs and zeros."""
    random = torch.Generator("cpu").manual_seed(0)
    large = 30.0 if dtype == torch.float16 else 1e3  # its square fits
    sizes = (1.0, -large), (large, 1e-3), (0.0, 1.0), (1e-3, -large), (1.0, 0.0)
    for step in range(_STEPS + 1):
        scale = torch.tensor(sizes[step % len(sizes)], dtype=torch.float32, device="cpu")[:, None]
        each = []
        for shape in _SHAPES:
            half = math.prod(shape) // 2
            x = torch.randn(2, half, generator=random, dtype=torch.float32, device="cpu")
            each.append(((x.abs() if step % 3 == 1 else x) * scale).to(device, dtype))
        yield each


def _of_no_parameter(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers that an optimizer keeps in its groups, attributes and state of no parameter."""
    rest = {str(key): value for key, value in inner.state.items() if not isinstance(key, Tensor)}
    return {**vars(inner), **_options(inner.param_groups[0]), **rest}


def _compare(xs: Sequence[Tensor], states: list[dict[str, Any]], runs: list[int | None]) -> None:
    """Refuse if other runs than the first have other values of a tensor (none: only state), or
    other state."""
    values = [{"": x} for x in xs] or [{} for _ in states]
    whole, *others = ({**x, **state} for x, state in zip(values, states))
    for name, value in whole.items() if others else ():
        parts = [other.get(name) for other in others]
        if xs and isinstance(value, Tensor) and value.shape == xs[0].shape:
            flat = [x.detach().flatten() for x in parts if isinstance(x, Tensor)]
            same = _are_equal(torch.cat(flat) if flat else None, value.detach().flatten())
        else:
            same = all(_are_equal(part, value) for part in parts)
        if not same and None in runs[1:]:
            raise NotElementwise("its step draws random numbers, which ranks do not share")
        if not same:
            what = f"'{name}' of its state" if name else "its step"
            raise NotElementwise(f"{what} is not the same for two halves of a tensor as for all")


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two values of the same kind are equal; tensors in their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        bits = [x.detach().reshape(-1).view(torch.uint8) for x in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    return a == b if isinstance(a, (bool, int, float)) else True
