"""Kinds of parallelism, one per file: the protocol of an axis, and the list of all axes.

An axis defines everything about itself. Other code goes through every(), so an added axis changes
no other file:

    settings     its settings, for `fastpar train`, parallelize() and the planner
    rules        its checks of settings, and what it does not work with
    plan         checks before a model is changed
    cut          removes the modules that other ranks run
    split        keeps this rank's part of parameters
    travel       the groups of ranks that sum the gradients of these parts
    connect      connects a rank's modules with those of other ranks
    attach       connects to the finished engine
    describe     lines of engine.describe(); memory: its bytes; header: of a run; record: of a
                 checkpoint
    ops, comms   of one optimizer step of a rank, predicted
    states       bytes that stay on a rank between steps
    candidates   layouts that `fastpar plan` should try
    text, ...    texts of reports

Settings and rules of fastpar's own axes are in settings/, as a command line is read and checked
before torch is imported. An added axis has its own.

To add one, write a file in this folder with an `AXIS`, or call register(). Override only the
methods that it needs. They are called in the order of `order`: from the axis whose ranks are
farthest apart to the nearest, then axes that work on buckets. split() is called in reverse order:
what neighbours leave of a parameter is split further by more distant ranks.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.settings.fields import add_group, flat
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.settings.rules import add_rules


@dataclass
class Making:
    """State of parallelize() that the axes read and write while a model becomes an engine.

    Args:
        mesh: the user's. debug: engine.debug.Debug.
        planned: the tp plan of a model that does not define its split: a foreign.tp_plan.Planned.
        connect_rows: connects a model with the ranks that split its rows; None: not possible.
        transport: of make_collectives, as requested.
    Attributes:
        make: collectives of a process group for a role; not before cut().
        declared: the split parameters, an axes.tensor.declared.Declared.
        stages: of a pipeline. unit_starts: modules at which a unit begins.
        same_inputs: by axis: groups whose ranks must have the same inputs.
        report: text: what was split, and why.
    """

    model: nn.Module
    mesh: Mesh
    parallel: Parallel
    debug: Any
    tp_plan: Any
    planned: Callable[[], Any]
    connect_rows: Callable[..., None] | None
    transport: str
    make: Callable[[Any, str], Collectives] = field(init=False)
    declared: Any = None
    stages: Any = None
    unit_starts: Sequence[nn.Module] = ()
    same_inputs: dict[str, Collectives] = field(default_factory=dict)
    report: str = ""
    kept: dict[str, Any] = field(default_factory=dict)  # values that an axis keeps between calls


class Travel(NamedTuple):
    """The groups of ranks that exchange the buckets of one key of the layout.

    Args:
        mesh: the ranks as these parameters' gradients see them: replicas, each sharded along dp.
        rank: this one's number among those that have the same parameters.
        share: copies the first rank's values to all of these. Ranks: all.
        spread: neighbours along dp over which the parameters of this key are split.
        sources: keeps the gradients of several sources in a bucket separate; None: there is one.
        groups: of these ranks, an engine.bucket.BucketGroups.
    """

    mesh: Mesh
    rank: int
    share: Callable[[Sequence[Tensor]], None]
    spread: int = 1
    sources: Callable[[Any], Any] | None = None
    groups: Any = None


class Axis:
    """One kind of parallelism; a subclass overrides the methods that it needs.

    Attributes:
        name: one word, its name in records.
        key: its name in a mesh, and of the parameters that it splits.
        order: when its methods are called; see the top of axes/__init__.py.
        settings: a frozen dataclass of settings, unless Parallel has them. Field names are the
            flags' names, so they are unique.
        rules: rows for settings/rules.py: Rule, Pair, Needs.
        place: rank from common to rare. A layout's name lists its axes in this order; of equally
            fast layouts the one with less of the rare axes is chosen; candidates are chosen from
            the rare end.
    """

    name = ""
    key = ""
    order = 100
    place = 100
    settings: type | None = None
    rules: tuple[Any, ...] = ()

    # A model

    def plan(self, making: Making) -> None:
        """Check the model and mesh before anything is changed.

        Raises:
            ValueError: this axis cannot split them.
        """

    def cut(self, making: Making) -> None:
        """Remove the modules that this rank does not run. Ranks: all."""

    def split(self, making: Making) -> None:
        """Keep this rank's part of parameters, and note it in making.declared. Ranks: all."""

    def travel(self, making: Making, n_shards: int) -> Travel | None:
        """The groups of ranks of the parameters with its key, which it splits. Ranks: all.

        Args:
            n_shards: ranks that shard one replica of all other parameters.
        """

    def connect(self, making: Making) -> None:
        """Connect modules with other ranks, once parameters are on their device.

        Ranks: all.
        """

    def attach(self, making: Making, engine: Any) -> None:
        """Prepare what the axis does during steps. Ranks: all."""

    def describe(self, shards: Any) -> Iterable[str]:
        """Lines of engine.describe(), from an engine.shards.Shards."""
        return ()

    def memory(self, shards: Any) -> dict[str, int]:
        """Bytes allocated on this rank besides those of buckets, by kind."""
        return {}

    def header(self, setup: Setup, shape: GPTConfig) -> Mapping[str, str]:
        """Words for the lines at the start of a run, by the first word of the line, such as ranks.

        Args:
            setup: the run's settings in effect.
        """
        return {}

    def record(self, shards: Any) -> dict[str, Any]:
        """Notes of a checkpoint on how this axis ran, by name, for people."""
        return {}

    # A predicted step

    def ops(self, workload: Workload, setup: Setup) -> Iterable[Op]:
        """Operations of a rank for this axis in an optimizer step, besides the model's own."""
        return ()

    def comms(self, workload: Workload, setup: Setup) -> Iterable[CommOp]:
        """Communication of a rank for this axis in an optimizer step."""
        return ()

    def states(self, setup: Setup, buckets: Any, sizes: dict[str, float]) -> None:
        """Change the bytes of parameters, gradients and optimizer that stay on a rank.

        Args:
            buckets: the rank's, axes.data.GPTBuckets.
        """

    def host_bytes(self, workload: Workload, setup: Setup) -> float:
        """Bytes of a rank in host memory."""
        return 0.0

    # The planner

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        """Layouts to try, with the given one among them.

        The search drops those that another axis, the batch or a rule does not accept.

        Args:
            setup: with the choices of axes of a higher place.
            per_node: ranks per node.
        """
        yield setup

    def accepts(self, workload: Workload, setup: Setup) -> bool:
        """Whether a complete candidate is worth trying."""
        return True

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        """Key for reports: of layouts with equal keys only the best is shown. Of equally fast ones
        that with the usual values is preferred, then that with the least; see place."""
        if self.settings is None:
            return ()
        return tuple(flat(getattr(setup.parallel.more, self.name)).values())

    def text(self, setup: Setup) -> str:
        """Its part of a layout's name, such as "tp 2"; "" if it is off."""
        return ""

    def note(self, setup: Setup) -> str:
        """Text behind the name, such as "ZeRO-3"."""
        return ""

    def check(self, command: Any, workload: Workload) -> None:
        """Check a command before a search.

        Args:
            command: predict.plan.PlanCommand.
        Raises:
            ValueError: a request that cannot be met.
        """


def layout_text(setup: Setup) -> str:
    """A layout as text: dp 4 x tp 2, ZeRO-3 in groups of 8."""
    axes = sorted(every(), key=lambda axis: axis.place)
    sizes = " x ".join(filter(None, (axis.text(setup) for axis in axes)))
    sizes = sizes or ("one GPU" if setup.device_type == "cuda" else "one rank")
    return ", ".join([sizes, *filter(None, (axis.note(setup) for axis in axes))])


def size_text(n_bytes: float) -> str:
    """Bytes as text."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.0f} MB"


def number_text(value: float, digits: int = 3) -> str:
    """A number with so many digits, or all of those before its point: never 3.33e+04."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


_registered: list[Axis] = []


def register(axis: Axis) -> None:
    """Add an axis to those of this folder, before settings are read or a model is parallelized."""
    _registered.append(axis)
    every.cache_clear()
    if axis.settings is not None:
        add_group(axis.name, axis.settings)
    add_rules(axis.rules, {} if axis.settings is None else flat(axis.settings()))


@functools.cache
def every() -> tuple[Axis, ...]:
    """All axes, by `order`."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    built_in = [module.AXIS for module in modules if hasattr(module, "AXIS")]
    return tuple(sorted([*built_in, *_registered], key=lambda axis: axis.order))


def engine_of_parameter(p: Tensor) -> Any:
    """The engine of a parameter, None if it has none."""
    link = getattr(p, "_fastpar_engine", None)
    return None if link is None else link.target
