"""The states of a model's parameters along tp (and rows) and ep, and their consequences.

A module declares the states of its parameters in one of two ways. Names may have dots.

    tp_states = {"scale": Partial()}                  an attribute, if nothing else depends on it

    def tensor_parallel(self, tp):                    a method, called once by parallelize()
        self.tp = tp                                  ... if its forward communicates
        return {"c_attn.weight": Shard(0, groups=3), "c_proj.bias": tp.per_token}
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes import Making
from fastpar.axes.tensor.functional import TensorParallel
from fastpar.comm.collectives import Collectives
from fastpar.settings.mesh import TP_AXES
from fastpar.sharding.layout import parameter_names
from fastpar.sharding.placements import Placement, Replicate, Run, Shard, State, runs_of_placement


class Declared:
    """Every parameter's state along tp, on a grid along rows too, and of experts along ep.

    Args:
        tp: the TensorParallel, None with tp=1.
        states: of all parameters, by axis except ep; shapes: of the whole tensors.
    Attributes:
        groups: the ranks along each axis, outermost first.
        experts: the states along ep of parameters that have some.
    """

    def __init__(
        self,
        tp: TensorParallel | None,
        states: dict[nn.Parameter, Mapping[str, State]],
        shapes: dict[nn.Parameter, torch.Size],
    ) -> None:
        self.tp, self._states, self._shapes = tp, states, shapes
        self.groups: dict[str, Collectives] = {} if tp is None else tp.groups
        self.experts: dict[nn.Parameter, State] = {}
        self._placements: dict[nn.Parameter, Placement] = {}

    def split_experts(self, states: dict[nn.Parameter, State], group: Collectives) -> None:
        """Replace each of these by this rank's part of it along ep, in place."""
        self.groups, self.experts = {"ep": group, **self.groups}, states
        self._placements.clear()
        for p, state in states.items():
            assert isinstance(state, Shard)
            p.data = state.cut(p.detach(), group.rank, group.world_size)

    def rename(
        self,
        old: Mapping[nn.Parameter, tuple[str, ...]],
        new: Mapping[nn.Parameter, tuple[str, ...]],
    ) -> None:
        """Replace the parameters by new ones, in the same order."""
        pairs = list(zip(old, new))
        self._states = {q: self._states[p] for p, q in pairs}
        self.experts = {q: self.experts[p] for p, q in pairs if p in self.experts}
        self._placements.clear()
        self._shapes = {q: self._shapes[p] for p, q in pairs}

    def states(self, p: Tensor) -> Mapping[str, State]:
        """The states of one parameter along tp, and rows."""
        return self._states[p]  # type: ignore[index]

    def whole_shape(self, p: Tensor) -> torch.Size:
        """The shape of the whole tensor."""
        return self._shapes[p]  # type: ignore[index]

    def placement(self, p: Any) -> Placement:
        """The placement of one parameter along tp, and of experts along ep."""
        if p not in self._placements:
            states = dict(self.states(p))
            if p in self.experts:
                states["ep"] = self.experts[p]
            sizes = {a: g.world_size for a, g in self.groups.items() if a in states}
            self._placements[p] = Placement(states, sizes)
        return self._placements[p]

    @property
    def place(self) -> dict[str, int]:
        """This rank's number along each axis."""
        return {axis: group.rank for axis, group in self.groups.items()}

    def key_of(self, p: Any) -> str:
        """The key of its bucket: "ep" for experts, which other ranks hold."""
        return "ep" if p in self.experts else ""

    def counts(self, p: Tensor) -> bool:
        """Whether this rank's part of p counts in sums over all elements of the model."""
        return self.placement(p).counts(self.place)

    def is_split(self, p: Tensor) -> bool:
        """Whether ranks hold different parts of p."""
        return bool(self.placement(p).gather_axes)

    def is_partial(self, p: Tensor) -> bool:
        """Whether p's gradient is a sum over the ranks."""
        return bool(self.placement(p).reduce_axes)

    def runs(self, p: Tensor) -> list[Run]:
        """The elements of the whole tensor in this rank's part of p."""
        return runs_of_placement(self.placement(p), self.whole_shape(p), self.place)

    def cut(self, whole: Tensor, p: Tensor) -> Tensor:
        """This rank's part of a whole tensor of p's shape, a copy."""
        return self.placement(p).cut(whole, self.place)

    def whole(self, local: Tensor, p: Tensor) -> Tensor:
        """The whole tensor from every rank's part of it, in p's local shape.

        Ranks: all of tp, and of ep for experts. Wire: the tensor's bytes.
        """
        if not self.is_split(p):
            return local.clone()
        placement, local = self.placement(p), local.view(p.shape)
        shapes = placement.local_shapes(self.whole_shape(p))
        for (state, axis, _), shape in reversed([*zip(placement.shard_steps(), shapes)]):
            raw = self.groups[axis].gathered(local.contiguous().view(-1).view(torch.uint8))
            rows = raw.view(local.dtype).view(-1, *local.shape)
            local = state.join(rows.unbind(0), shape)
        return local

    def along_tp(self, p: Tensor) -> tuple[Placement, torch.Size]:
        """(the placement along tp alone, the shape that tp splits)."""
        placement, whole = self.placement(p), self.whole_shape(p)
        if "ep" in placement.states:
            whole = placement.local_shapes(whole)[1]
        return Placement(self.states(p), {"tp": placement.sizes.get("tp", 1)}), whole


def not_split(named: Mapping[nn.Parameter, tuple[str, ...]]) -> Declared:
    """All parameters unsplit, with tp=1."""
    return Declared(None, {p: {"tp": Replicate()} for p in named}, {p: p.shape for p in named})


def tp_method(module: nn.Module) -> Callable[[TensorParallel], dict[str, State]] | None:
    """A module's tensor_parallel(tp); transformers 4.46 has other methods of that name."""
    method = getattr(module, "tensor_parallel", None)
    if not callable(method) or list(inspect.signature(method).parameters)[:1] != ["tp"]:
        return None
    return method


def find_states(model: nn.Module, tp: TensorParallel) -> dict[nn.Parameter, State]:
    """The states that the modules of a model declare for their parameters.

    Raises:
        ValueError: a name without a parameter; two states for one parameter.
    """
    states: dict[nn.Parameter, State] = {}
    for prefix, module in model.named_modules():
        declared: dict[str, State] = dict(getattr(module, "tp_states", {}))
        method = tp_method(module)
        if method is not None:
            declared.update(method(tp))
        params = dict(module.named_parameters(remove_duplicate=False)) if declared else {}
        for name, state in declared.items():
            where = f"{prefix}.{name}" if prefix else name
            if name not in params:
                raise ValueError(
                    f"parallelize: {type(module).__name__} declares a state for '{where}', which "
                    "is not a parameter; correct its tensor_parallel or tp_states"
                )
            add_state(states, params[name], state, where)
    return states


def add_state(states: dict[nn.Parameter, State], p: nn.Parameter, state: State, name: str) -> None:
    """Note a parameter's state.

    Raises:
        ValueError: it has a different one.
    """
    if states.setdefault(p, state) != state:
        raise ValueError(
            f"parallelize: parameter '{name}' has two states, {states[p]} and {state}; declare it "
            "once"
        )


def split_parameters(
    named: Mapping[nn.Parameter, tuple[str, ...]],
    states: dict[nn.Parameter, State],
    tp: TensorParallel,
    share: Callable[[list[Tensor]], None],
) -> Declared:
    """Replace each parameter by this rank's part of it, in place.

    Args:
        named: all parameters of the model with their names.
        share: copies the values of the first rank of tp to the others.
    Raises:
        ValueError: a parameter without a state, or one that cannot be split as its state says.
            Nothing is changed then.
    """
    placed: dict[nn.Parameter, Mapping[str, State]] = {}
    for p, names in named.items():
        if p not in states:
            raise ValueError(
                f"parallelize: parameter '{names[0]}' has no declared state with {tp.label}; name "
                "it in tp_plan, or in its module's tp_states: Shard, Replicate or Partial"
            )
        placed[p] = tp.states_of(states[p], p.dim())
    declared = Declared(tp, placed, {p: p.shape for p in named})
    for p, names in named.items():
        try:
            declared.placement(p).local_shapes(p.shape)
        except ValueError as error:
            raise ValueError(
                f"parallelize: {tp.label} cannot split parameter '{names[0]}' of shape "
                f"{list(p.shape)} as {states[p]}: {error}; choose another "
                f"{tp.label.split('=')[0]}, or Replicate()"
            ) from None
    for p in named:
        if not p.is_meta:
            share([p.detach()])
        if declared.is_split(p):
            p.data = declared.cut(p.detach(), p)
    return declared


def split_model(making: Making, tp: TensorParallel, planned: Any) -> None:
    """Keep this rank's part of the model's parameters, along tp or on a grid. Ranks: all.

    Args:
        planned: of a model whose modules do not declare states, see Making.
    """
    model, mesh = making.model, making.mesh
    # Before modules get tp: buffers that they create then may be those of a slice.
    mesh.broadcast_([buffer for buffer in model.buffers() if not buffer.is_meta], *TP_AXES)
    named = parameter_names(model)
    if planned is not None:
        planned.check(tp)
    before = {module: vars(module).get("tp") for module in model.modules()}
    try:
        if planned is not None:
            planned.convert(tp)
        states = find_states(model, tp)
        if planned is not None:
            planned.add_states(states, named, tp)
        making.declared = split_parameters(
            named, states, tp, lambda values: mesh.broadcast_(values, *TP_AXES)
        )
    except BaseException:
        if planned is not None:
            planned.undo()
        for module, old in before.items():  # modules that have got tp
            if vars(module).get("tp") is not old:
                vars(module)["tp"] = old
        raise
    by, left = ("declared by its modules", ()) if planned is None else (planned.why, planned.left)
    making.report = tp_report(making.declared, parameter_names(model), by, left)
    making.same_inputs["tp"] = tp.group


# Report

_MIB = 2**20
_KINDS = {
    "split": "split over the ranks",
    "partial": "replicated, gradients summed along tp once a step",
    "replicated": "replicated, the same gradient on every rank",
    "left": "undeclared, assumed the same on every rank",
}


def _short(axis: str, state: State, *, grid: bool) -> str:
    """A state without default values, and without the axis unless on a grid."""
    if not isinstance(state, Shard):
        return f"{axis}: {type(state).__name__}" * grid
    groups = f", groups={state.groups}" if state.groups > 1 else ""
    padded = f", pad_to={state.pad_to}" if state.pad_to else ""
    return f"{axis}: " * grid + f"Shard({state.dim}{groups}{padded})"


def tp_report(
    declared: Declared,
    named: Mapping[nn.Parameter, tuple[str, ...]],
    why: str,
    left: Collection[str] = (),
) -> str:
    """A table of every parameter: its state along tp, its shape and this rank's part of it.

    Args:
        named: all parameters, already split, with their names; layer numbers become *.
        why: the source of the states.
        left: names of the parameters that have a state by default.
    """
    tp = declared.tp
    assert tp is not None
    rows: dict[str, Counter[tuple[str, str, str]]] = {kind: Counter() for kind in _KINDS}
    here, whole = Counter[str](), Counter[str]()
    for p, names in named.items():
        states, shape = declared.states(p), declared.whole_shape(p)
        split, partial = declared.is_split(p), declared.is_partial(p)
        kind = "split" if split else "partial" if partial else "replicated"
        kind = "left" if names[0] in left else kind
        name = " = ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", x) for x in names))
        sizes = f"{list(shape)}" + (f" -> {list(p.shape)}" if split else "")
        short = [_short(axis, s, grid=len(states) > 1) for axis, s in states.items()]
        rows[kind][name, sizes, ", ".join(filter(None, short))] += 1
        here[kind] += p.numel() * p.element_size()
        whole[kind] += shape.numel() * p.element_size()
    how = f"sequence parallelism {'on' if tp.sequence_parallel else 'off'}"
    how = tp.tokens if tp.shared_dim == -1 else how
    lines = [f"tensor parallelism: {tp.label}, {how}, {why}"]
    for kind, title in _KINDS.items():
        if not rows[kind]:
            continue
        size = f"{here[kind] / _MIB:.2f} MiB"
        if kind == "split":
            size += f" of {whole[kind] / _MIB:.2f} MiB"
        lines.append(f"{title}: {sum(rows[kind].values())} parameters, {size} here")
        for (name, sizes, how), count in rows[kind].items():
            lines.append(f"  {count:>4} {name}  {sizes}  {how}".rstrip())
    return "\n".join(lines)
