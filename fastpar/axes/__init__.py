"""One kind of parallelism a file: the protocol of an axis, and the axes that there are.

An axis says everything about itself. Everybody else goes through every() and names none:

    settings     its group of settings, which `fastpar train`, parallelize() and the planner have
    rules        which of them there are, and what they do not run with
    plan         before a model is changed: refuse it, or say how it will be cut
    split        a model's parameters: what this rank keeps
    attach       to the engine that was made
    describe     lines, and bytes, of engine.describe(); what a checkpoint records
    ops, comms   of one optimizer step of a rank, on paper
    states       bytes that stay on a rank from step to step
    candidates   layouts that `fastpar plan` should try
    text         its part of a layout's name

To add one, write a file in this folder with an `AXIS`, or call register(). A method that an axis
has nothing to say to is left out. [Note: order] Methods are called in the order of `order`: from
the ranks that lie farthest apart to the nearest, then what works on buckets.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.settings.fields import More, flat
from fastpar.settings.rules import add_rules


class Axis:
    """One kind of parallelism; a subclass overrides what it has to say.

    Attributes:
        name: one word, its name in records.
        order: see [Note: order].
        settings: a frozen dataclass of settings, where Parallel has none of its own for it. Field
            names are the flags' names, so they are unique.
        rules: rows for settings/rules.py: Rule, Pair, Needs.
    """

    name = ""
    order = 100
    settings: type | None = None
    rules: tuple[Any, ...] = ()

    # A model

    def plan(self, making: Any) -> None:
        """Before anything is changed. Ranks: all.

        Args:
            making: engine.parallelize.Making.
        Raises:
            ValueError: a model or mesh that this axis cannot share out.
        """

    def split(self, making: Any) -> None:
        """Keep this rank's part of the model. Ranks: all."""

    def attach(self, making: Any, engine: Any) -> None:
        """What an axis does while steps run. Ranks: all."""

    def describe(self, engine: Any) -> Iterable[str]:
        """Lines of engine.describe()."""
        return ()

    def memory(self, engine: Any) -> dict[str, int]:
        """Bytes that are alive on this rank for this axis, by kind."""
        return {}

    def record(self, engine: Any) -> dict[str, Any]:
        """What a checkpoint notes of this axis, by name; nothing reads it back but people."""
        return {}

    # A step, on paper

    def ops(self, workload: Workload, setup: Setup) -> Iterable[Op]:
        """What a rank computes for this axis in an optimizer step, beside the model's own ops."""
        return ()

    def comms(self, workload: Workload, setup: Setup) -> Iterable[CommOp]:
        """What a rank communicates for this axis in an optimizer step."""
        return ()

    def states(self, workload: Workload, setup: Setup) -> dict[str, float]:
        """More bytes that stay on the fullest rank, by the field of predict.memory.Memory."""
        return {}

    # The planner

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        """Ways to train beside the given one, which is among them.

        Args:
            per_node: ranks on a node.
        """
        yield setup

    def text(self, setup: Setup) -> str:
        """Its part of a layout's name, such as "tp 2"; "" where it is off."""
        return ""


_registered: list[Axis] = []


def register(axis: Axis) -> None:
    """Add an axis to those of this folder, before settings are read or a model is parallelized."""
    _registered.append(axis)
    every.cache_clear()
    if axis.settings is not None:
        More.add(axis.name, axis.settings)
    add_rules(axis.rules, {} if axis.settings is None else flat(axis.settings()))


@functools.cache
def every() -> tuple[Axis, ...]:
    """All axes, in the order of [Note: order]."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    own = [module.AXIS for module in modules if hasattr(module, "AXIS")]
    return tuple(sorted([*own, *_registered], key=lambda axis: axis.order))
