"""Which modules of a model are gathered together.

A unit is a block of the model: an element of a ModuleList or Sequential. Parameters outside of all
blocks, and those that several blocks share, belong to the root unit, which is needed from the
beginning of a forward to the end of its backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

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
