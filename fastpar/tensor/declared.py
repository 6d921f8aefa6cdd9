"""The states that a model's parameters have along tp, and what follows from them.

A module says which states its parameters have, in one of two ways. Names may have dots.

    tp_states = {"scale": Partial()}                  an attribute, where nothing else depends on it

    def tensor_parallel(self, tp):                    a method, called once by parallelize()
        self.tp = tp                                  ... if its forward communicates
        return {"c_attn.weight": Shard(0, groups=3), "c_proj.bias": tp.per_token}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fastpar.sharding.placements import Placement, Shard, State
from fastpar.sharding.ranges import Run, runs_of_placement
from fastpar.tensor.functional import TensorParallel


class Declared:
    """Every parameter's state along tp.

    Args:
        states: of all parameters; shapes: of the whole tensors.
    Attributes:
        tp: the TensorParallel that they are states of.
    """

    def __init__(
        self,
        tp: TensorParallel,
        states: dict[nn.Parameter, State],
        shapes: dict[nn.Parameter, torch.Size],
    ) -> None:
        self.tp, self.states, self._shapes = tp, states, shapes

    def rename(
        self,
        old: Mapping[nn.Parameter, tuple[str, ...]],
        new: Mapping[nn.Parameter, tuple[str, ...]],
    ) -> None:
        """The parameters were replaced, in the same order."""
        pairs = list(zip(old, new))
        self.states = {q: self.states[p] for p, q in pairs}
        self._shapes = {q: self._shapes[p] for p, q in pairs}

    def state(self, p: Tensor) -> State:
        """How one parameter is placed along tp."""
        return self.states[p]  # type: ignore[index]

    def whole_shape(self, p: Tensor) -> torch.Size:
        """The shape of the tensor that the ranks share out."""
        return self._shapes[p]  # type: ignore[index]

    def placement(self, p: Tensor) -> Placement:
        """The placement of one parameter along tp."""
        return Placement({"tp": self.state(p)}, {"tp": self.tp.size})

    def counts(self, p: Tensor) -> bool:
        """Whether this rank's part of p counts in sums over all elements of the model."""
        return self.placement(p).counts({"tp": self.tp.rank})

    def is_split(self, p: Tensor) -> bool:
        """Whether the ranks have different parts of p."""
        return bool(self.placement(p).gather_axes)

    def is_partial(self, p: Tensor) -> bool:
        """Whether p's gradient is the sum over the ranks."""
        return bool(self.placement(p).reduce_axes)

    def runs(self, p: Tensor) -> list[Run]:
        """Which elements of the whole tensor this rank's part of p holds."""
        return runs_of_placement(self.placement(p), self.whole_shape(p), {"tp": self.tp.rank})

    def cut(self, whole: Tensor, p: Tensor) -> Tensor:
        """This rank's part of a tensor with an element for each of the whole parameter, a copy."""
        return self.placement(p).cut(whole, {"tp": self.tp.rank})

    def rows(self, local: Tensor, p: Tensor) -> Tensor:
        """Every rank's part of a tensor, each in p's local shape: [tp, ...]. Ranks: all of tp."""
        raw = self.tp.group.gathered(local.contiguous().view(-1).view(torch.uint8))
        return raw.view(local.dtype).view(self.tp.size, *p.shape)

    def whole(self, local: Tensor, p: Tensor) -> Tensor:
        """The whole tensor from every rank's part of it, in p's local shape. Ranks: all of tp.

        Wire: the tensor's bytes.
        """
        if not self.is_split(p):
            return local.clone()
        return self.placement(p).join(self.rows(local, p).unbind(0), self.whole_shape(p))


def speaker(module: nn.Module) -> Callable[[TensorParallel], dict[str, State]] | None:
    """A module's tensor_parallel(tp); others have methods of that name (transformers 4.46)."""
    method = getattr(module, "tensor_parallel", None)
    if not callable(method) or list(inspect.signature(method).parameters)[:1] != ["tp"]:
        return None
    return method


def find_states(model: nn.Module, tp: TensorParallel) -> dict[nn.Parameter, State]:
    """What the modules of a model say of their parameters.

    Raises:
        ValueError: a name that is no parameter; two states for one.
    """
    states: dict[nn.Parameter, State] = {}
    for prefix, module in model.named_modules():
        told: dict[str, State] = dict(getattr(module, "tp_states", {}))
        method = speaker(module)
        if method is not None:
            told.update(method(tp))
        own = dict(module.named_parameters(remove_duplicate=False)) if told else {}
        for name, state in told.items():
            where = f"{prefix}.{name}" if prefix else name
            if name not in own:
                raise ValueError(
                    f"parallelize: expected states of {type(module).__name__}'s parameters, got one"
                    f" for '{where}', which is none; correct its tensor_parallel or tp_states"
                )
            add_state(states, own[name], state, where)
    return states


def add_state(states: dict[nn.Parameter, State], p: nn.Parameter, state: State, name: str) -> None:
    """Note a parameter's state.

    Raises:
        ValueError: it has another one.
    """
    if states.setdefault(p, state) != state:
        raise ValueError(
            f"parallelize: expected one state for parameter '{name}', got {states[p]} and {state}; "
            "declare it once"
        )


def split_parameters(
    named: Mapping[nn.Parameter, tuple[str, ...]],
    states: dict[nn.Parameter, State],
    tp: TensorParallel,
    share: Callable[[list[Tensor]], None],
) -> Declared:
    """Make each parameter this rank's part of it, in place.

    Args:
        named: all parameters of the model with their names.
        share: gives all ranks of tp the values of the first.
    Raises:
        ValueError: a parameter without a state; one that does not split as its state says. Nothing
            is changed then.
    """
    shapes = {}
    for p, names in named.items():
        if p not in states:
            raise ValueError(
                f"parallelize: expected a declared state for every parameter with tp={tp.size}, "
                f"got none for '{names[0]}'; name it in tp_plan, or in its module's tp_states: "
                "Shard, Replicate or Partial"
            )
        state = states[p]
        if isinstance(state, Shard):
            try:
                state.local_shape(p.shape, tp.size)
            except ValueError as error:
                raise ValueError(
                    f"parallelize: expected tp={tp.size} to split parameter '{names[0]}' of shape "
                    f"{list(p.shape)} as {state}, got: {error}; choose another tp, or Replicate()"
                ) from None
        shapes[p] = p.shape
    for p in named:
        if not p.is_meta:
            share([p.detach()])
        state = states[p]
        if isinstance(state, Shard):
            p.data = state.cut(p.detach(), tp.rank, tp.size)
    return Declared(tp, states, shapes)
