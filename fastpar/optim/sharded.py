"""fastpar.Sharded: any elementwise optimizer, on sharded parameters.

    opt = fastpar.Sharded(torch.optim.RAdam, model.parameters(), lr=1e-3, max_grad_norm=1.0)

An optimizer is elementwise if the update of an element depends only on that element's history: SGD,
Adam, RAdam, Lion. It may then step pieces of tensors, as ranks of ZeRO and tensor parallelism hold
them, with the result of one process. LAMB, Shampoo, Adafactor and Muon need whole tensors; Prodigy
needs the whole model.

The probe: an optimizer does not say whether it is elementwise, so it is tried: a tensor of 1,000
elements is stepped ten times whole, and in two parts by two optimizers, as two ranks would. If bits
differ it is refused. The resulting state shows how each entry is cut: an entry with the tensor's
shape like the tensor, one with a value per 256 elements likewise; any other is kept on all ranks.

One thread: torch's CPU kernels round 16-bit sums differently in whole vectors and in the rest at
the end, and each thread's range of a tensor has an end. So 16-bit weights without masters are
stepped by one thread on a CPU: pieces begin at multiples of 256 elements, so their ends are the
tensor's. Slices of tp may end anywhere: there 16-bit weights without masters (with torch's fused
kernels fp32 ones too) may differ by a rounding from those of one process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.engine.engine import engine_of_parameter
from fastpar.optim.base import EngineOptimizer, Row
from fastpar.optim.state import (
    COUNTS,
    HALF,
    OF_WEIGHTS,
    add_master,
    check_master_weights,
    store_values,
    values_of,
    whole_shape,
)

BLOCK = 256  # pieces begin at multiples of so many elements
_SIZE, _STEPS = 1000, 10  # of the probe
_OURS = {"master_weight", "master_remainder", *OF_WEIGHTS, *COUNTS} - {"step"}


class Entry(NamedTuple):
    """One entry of the state, as the probe found it."""

    block: int  # elements of the parameter per element of the entry; 0: whole on all ranks
    shape: torch.Size
    dtype: torch.dtype | None  # None: the dtype that is stepped
    on_device: bool
    kind: type  # Tensor, or the type of a number


class Sharded(EngineOptimizer):
    """An elementwise optimizer of torch's interface, at any ZeRO stage and tensor parallelism.

    The inner optimizer steps this rank's piece of each parameter (at stage 0 without tp the whole
    one). Groups, learning rate schedules, hooks and state dicts work as the inner optimizer's.

    Args:
        inner: a subclass of torch.optim.Optimizer, or a function with its arguments.
        params: parameters, named parameters, or groups with the inner optimizer's options.
        max_grad_norm: as in fastpar.AdamW. During the step the scaled gradients are a copy: 4
            bytes per element that this rank steps.
        master_weights: the inner optimizer steps fp32 copies of 16-bit parameters; "remainder"
            keeps only the 16 bits that bf16 lacks.
        options: the inner optimizer's: lr and so on.
    Attributes:
        inner: the optimizer; it has parameters only during a step.
        grad_norm, grad_scale, found_inf, skipped: as in fastpar.AdamW; with a loss scale, step()
            waits on the host to know whether it overflowed.
    Ranks: all ranks of the model's mesh call step(), and state_dict() at zero_stage >= 1 or with
        tp > 1.
    State: the inner optimizer's entries of this rank's elements, and master_weight or
        master_remainder. state_dict() is whole on every rank, and without masters it is the inner
        optimizer's, which can load it; load_state_dict() takes either's. Saver writes no options
        of groups: counts that an optimizer keeps there are only in state_dict().
    Raises:
        ValueError: an inner optimizer that is not elementwise, with sharded or split parameters;
            errors of the inner optimizer; the state of another model or optimizer.
        RuntimeError: sparse gradients; the model was parallelized after the optimizer was built.
    """

    _attributes = ("inner", "_make", "_entries")

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
        self._make = inner
        self._entries: dict[str, Entry] = {}
        self.inner = inner([torch.zeros(8, 8, dtype=torch.float32, device="cpu")], **options)
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise ValueError(
                "Sharded: expected a class of optimizers, got an object of "
                f"{type(self.inner).__name__}; pass the class and its options, as in "
                "fastpar.Sharded(torch.optim.RAdam, params, lr=1e-3)"
            )
        super().__init__(params, dict(self.inner.defaults))
        self.inner.param_groups = []

    @property
    def _name(self) -> str:
        return type(self.inner).__name__

    def _check_options(self, group: dict[str, Any], caller: str) -> None:
        """Nothing: the inner optimizer's constructor, which the probe calls, checks them."""

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.dtype == torch.float16 and self.master_weights == "remainder":
            raise ValueError(
                "Sharded: expected fp16 parameters with master_weights=True, got 'remainder', "
                "which works for bf16 only; pass master_weights=True"
            )

    def _check_memory(self) -> None:
        self._learn(self.param_groups[-1])

    # The probe

    def _learn(self, group: dict[str, Any]) -> None:
        """Try a group's options; see "The probe" above."""
        engines = {engine_of_parameter(p) for p in group["params"]} - {None}
        shares = any(engine.shares for engine in engines if engine)
        cuts = [(0, 2 * BLOCK, _SIZE)] if shares else []
        if any(
            e is not None and e.shards.is_split(p)
            for p in group["params"]
            for e in [engine_of_parameter(p)]
        ):
            cuts.append((0, _SIZE // 3, _SIZE))
        tried = {(p.device, self._stepped_dtype(p)) for p in group["params"]}
        for device, dtype in sorted(tried, key=repr):
            device = torch.device("cpu") if device.type == "meta" else device
            try:
                whole, entries = self._try(group, device, dtype, (0, _SIZE))
            except ValueError:  # the inner optimizer's message about the options
                raise
            except Exception as error:
                if not shares:
                    return  # it may work in ways that the probe does not know
                raise self._refusal(error, engines) from error
            try:
                parts = [self._try(group, device, dtype, cut)[0] for cut in cuts]
            except Exception as error:
                raise self._refusal(error, engines) from error
            if not all(torch.equal(whole, part) for part in parts):
                raise ValueError(
                    f"Sharded: {self._name} is not elementwise (a tensor stepped in two parts gets "
                    f"other values than a whole one), so it cannot run with {_sharing(engines)}; "
                    "use an elementwise optimizer (fastpar.AdamW, or fastpar.Muon, which gathers "
                    "matrices), or zero_stage=0 without tp"
                )
            self._entries.update(entries)

    def _refusal(self, error: Exception, engines: Iterable[Any]) -> ValueError:
        return ValueError(
            f"Sharded: {self._name} cannot step a part of a tensor ({error}), so it cannot run "
            f"with {_sharing(engines)}; use an elementwise optimizer, or zero_stage=0 without tp"
        )

    def _try(
        self, group: dict[str, Any], device: torch.device, dtype: torch.dtype, cut: tuple[int, ...]
    ) -> tuple[Tensor, dict[str, Entry]]:
        """(the elements after the probe's steps, the entries of the first part)."""
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        random = torch.Generator("cpu").manual_seed(0)
        # Gradients with a trend, to expose optimizers that adapt to the distance travelled.
        draws = torch.randn(_STEPS + 2, _SIZE, generator=random, dtype=torch.float32, device="cpu")
        values = draws[0].to(device, dtype)
        grads = (draws[1] + 0.5 * draws[2:]).to(device, dtype)
        parts: list[Tensor] = []
        entries: dict[str, Entry | None] = {}
        for start, stop in itertools.pairwise(cut):
            x = values[start:stop].clone()
            if len(cut) == 2:
                x = x.view(8, -1)
            x = torch.nn.Parameter(x)
            inner = self._make([{**options, "params": [x]}])
            with _one_thread([x]):
                for grad in grads:
                    x.grad = grad[start:stop].view(x.shape).clone()
                    inner.step()
            parts.append(x.detach().reshape(-1))
            entries = entries or {n: _entry(v, x) for n, v in inner.state.get(x, {}).items()}
        return torch.cat(parts), {n: e for n, e in entries.items() if e is not None}

    def _stepped_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float32 if p.dtype in HALF and self.master_weights else p.dtype

    # The step

    def _update(self, rows: list[Row], factor: Tensor | None, found: Tensor | None) -> None:
        if found is not None and found.item():
            return
        groups: list[list[Tensor]] = [[] for _ in self.param_groups]
        states: defaultdict[Any, Any] = defaultdict(dict)
        taken: list[tuple[Row, Tensor, dict[str, Any]]] = []
        for row in rows:
            state = dict(self.state.get(row.param, {}))
            add_master(state, row.piece, self.master_weights)
            x = values_of(row.piece, state).detach()
            x.grad = _scaled(row.grad, factor, x)
            groups[row.group].append(x)
            ours = {n: state.pop(n) for n in _OURS & state.keys()}
            states[x] = state
            taken.append((row, x, ours))
        own = [{**group, "params": xs} for group, xs in zip(self.param_groups, groups)]
        self.inner.param_groups, self.inner.state = own, states
        try:
            with _one_thread([x for _, x, _ in taken]):
                self.inner.step()
        finally:
            self.inner.param_groups, self.inner.state = [], defaultdict(dict)
        for mine, theirs in zip(self.param_groups, own):  # some optimizers count steps there
            mine.update((k, v) for k, v in theirs.items() if k != "params")
        for row, x, ours in taken:
            state = {**states[x], **ours}
            if states[x].keys() - self._entries.keys():
                self._learn(self.param_groups[row.group])  # an option was changed
            store_values(row.piece, state, x)
            if state:
                self.state[row.param] = state

    # State

    def entry_block(self, name: str) -> int:
        """Elements of the parameter per element of an entry; 0: every rank has all of it."""
        entry = self._entries.get(name)
        return super().entry_block(name) if entry is None else entry.block

    def entry_shapes(self, p: Tensor) -> dict[str, torch.Size]:
        """The whole shape of every entry that a parameter's state may have."""
        whole = whole_shape(p)
        shapes = dict.fromkeys(("master_weight", "master_remainder", *OF_WEIGHTS), whole)
        for name, entry in self._entries.items():
            blocks = torch.Size([-(-whole.numel() // max(1, entry.block))])
            shapes[name] = {0: entry.shape, 1: whole}.get(entry.block, blocks)
        return shapes

    def _required(self, p: Tensor, group: dict[str, Any]) -> list[list[tuple[str, ...]]]:
        return [[(name,)] for name in self._entries]

    def _convert_moments(
        self, saved: dict[str, Any], p: Tensor, group: dict[str, Any], *, copy: bool
    ) -> dict[str, Any]:
        if not self._entries:
            return {n: v for n, v in saved.items() if n not in _OURS}
        found = {}
        for name in self._entries.keys() & saved.keys():
            value, entry = saved[name], self._entries[name]
            if not issubclass(entry.kind, Tensor):
                found[name] = entry.kind(value.item() if isinstance(value, Tensor) else value)  # type: ignore[call-arg]
                continue
            device = p.device if entry.on_device else torch.device("cpu")
            dtype = entry.dtype or self._stepped_dtype(p)
            if not isinstance(value, Tensor):
                value = torch.tensor(value, dtype=dtype, device="cpu")
            if entry.block == 1:
                like = torch.empty_like(p, dtype=dtype, device=device, requires_grad=False)
                found[name] = like.copy_(value)
            else:
                found[name] = value.to(device, dtype, copy=copy).reshape(
                    value.shape if entry.block else entry.shape
                )
        return found


def _entry(value: Any, x: Tensor) -> Entry | None:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return Entry(0, torch.Size(), None, False, type(value))
    blocks = torch.Size([-(-x.numel() // BLOCK)])
    block = 1 if value.shape == x.shape else BLOCK if value.shape == blocks else 0
    dtype = None if block == 1 and value.dtype == x.dtype else value.dtype
    return Entry(block, value.shape, dtype, value.device == x.device, Tensor)


def _scaled(grad: Tensor, factor: Tensor | None, x: Tensor) -> Tensor:
    """The gradient in the stepped dtype; multiplied in fp32."""
    if factor is not None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide) * factor.to(grad.device)
    return grad.to(x.dtype).view(x.shape)


def _sharing(engines: Iterable[Any]) -> str:
    return next((engine.sharing for engine in engines if engine is not None), "this layout")


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
