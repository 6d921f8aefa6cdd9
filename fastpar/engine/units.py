"""Which modules of a model are gathered together, and what hangs on modules and parameters.

A unit is a block of the model: an element of a ModuleList or Sequential. Parameters outside of all
blocks, those that several blocks share, and torch's RNN cells belong to the root unit, which is
needed from the beginning of a forward to the end of its backward.

Links and hooks are empty in copies and pickles: a model can be copied and saved with them on it,
and the copy has no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import nn
from torch._C._dynamo import eval_frame

ROOT = 0  # index of the root unit
T = TypeVar("T")


class NotCopied:
    """Copies and pickles of it are new ones, made without arguments, which do nothing."""

    def __deepcopy__(self, memo: dict) -> NotCopied:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()


class Link(NotCopied, Generic[T]):
    """From a parameter to what works for it."""

    def __init__(self, target: T | None = None) -> None:
        self.target = target


class Hook(NotCopied):
    """Calls function(owner, *args, ...), unless owner.paused; owner is a weak reference, so that
    nobody is kept alive by a hook.

    torch.compile neither traces a hook nor compiles what it calls: it would compile them once for
    each unit, and give up after eight (test_one_compiled_block_serves_all_layers).
    """

    _torchdynamo_disable = True

    def __init__(self, owner: Any = None, function: Any = None, *args: Any) -> None:
        self._owner, self._function, self._args = owner, function, args

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        if owner is None or getattr(owner, "paused", False):
            return None
        return self._function(owner, *self._args, *args, **kwargs)

    def is_of(self, owner: Any) -> bool:
        """Whether it calls a method of owner."""
        return self._owner is not None and self._owner() is owner


# As torch.compiler.disable() does, which imports dynamo, and that takes a second.
eval_frame.set_code_exec_strategy(
    Hook.__call__.__code__,
    eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),
)


def find_units(
    model: nn.Module,
    units: Sequence[nn.Module] | type | tuple[type, ...] | None,
    *,
    merge_bytes: float,
    apart: Sequence[nn.Module] = (),
) -> list[list[nn.Module]]:
    """The modules of each unit in registration order; the first is the root's.

    Neighbours are merged into one unit while their parameters fit into merge_bytes; not with apart.

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
        if size <= room and module not in apart:
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
        # Cells are called once a time step, perhaps more often on one rank than on another.
        if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict | nn.RNNCellBase):
            found.append(child)
        else:
            found.extend(_elements(child))
    return found


def unit_of_parameters(units: list[list[nn.Module]]) -> dict[nn.Parameter, int]:
    """The unit of each parameter of the model; the root's where units share one."""
    parts = [
        (part, i) for i, modules in enumerate(units) if i for m in modules for part in m.modules()
    ]
    inner = {part for part, _ in parts}
    parts += [(part, ROOT) for part in units[ROOT][0].modules() if part not in inner]
    homes: dict[nn.Parameter, set[int]] = {}
    for part, index in parts:
        for p in part._parameters.values():
            if p is not None:
                homes.setdefault(p, set()).add(index)
    return {p: next(iter(found)) if len(found) == 1 else ROOT for p, found in homes.items()}
