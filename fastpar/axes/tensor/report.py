"""What the ranks of the axis tp split of a model, replicate and leave, for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

from torch import nn

from fastpar.axes.tensor.declared import Declared
from fastpar.sharding.placements import Shard, State

_MIB = 2**20
_KINDS = {
    "split": "split over the ranks",
    "partial": "replicated, gradients summed along tp once a step",
    "replicated": "replicated, the same gradient on every rank",
    "left": "left: named by nobody, taken for the same on every rank",
}


def _short(axis: str, state: State, *, grid: bool) -> str:
    """Without what is as usual, and nothing of what the title says."""
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
        named: all parameters, split already, with their names; layers' numbers become *.
        why: where the states come from.
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
