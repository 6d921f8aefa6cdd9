"""One kind of parallelism a file: the protocol of an axis, and the axes that there are.

An axis says everything about itself. Everybody else goes through every() and names none:

    settings     its group of settings, which `fastpar train`, parallelize() and the planner have
    rules        which of them there are, and what they do not run with
    plan         before a model is changed: refuse it
    cut          a model's modules: which of them this rank has
    split        the parameters of these: which part of each it has
    travel       over which ranks the gradients of these parts are summed
    connect      the modules of a rank with those of other ranks
    attach       to the engine that was made
    describe     lines of engine.describe(); memory: its bytes; header: of a run; record: of a
                 checkpoint
    ops, comms   of one optimizer step of a rank, on paper
    states       bytes that stay on a rank from step to step; keeps: from forward to backward
    candidates   layouts that `fastpar plan` should try
    text, ...    what it says of them

Settings and rules of fastpar's own axes stand in settings/: a command line is read, and refused,
before torch is imported. An axis that is added has its own.

To add one, write a file in this folder with an `AXIS`, or call register(). A method that an axis
has nothing to say to is left out. [Note: order] Methods are called in the order of `order`: from
the ranks that lie farthest apart to the nearest, then what works on buckets; split() the other way
round: what neighbours have left of a parameter is shared out farther away.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.settings.fields import More, flat, leaves
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.settings.rules import add_rules


@dataclass
class Making:
    """A model on its way to an engine: what parallelize() and the axes tell each other.

    Args:
        mesh: the user's. debug: engine.debug.Debug.
        planned: of a model that does not say itself what tp splits: a foreign.tp_plan.Planned.
        tell_rows: a model of the ranks that share its rows; None: it cannot be told.
        transport: of make_collectives, as asked for.
    Attributes:
        make: collectives of a process group for a role; not before cut().
        declared: what was split, an axes.tensor.declared.Declared.
        stages: of a pipeline. apart: modules at which a unit begins.
        same_inputs: groups whose ranks are to be given the same inputs, by axis.
        report: what was split, and why, for people.
    """

    model: nn.Module
    mesh: Mesh
    asked: Parallel
    debug: Any
    tp_plan: Any
    planned: Callable[[], Any]
    tell_rows: Callable[..., None] | None
    transport: str
    make: Callable[[Any, str], Collectives] = field(init=False)
    declared: Any = None
    stages: Any = None
    apart: Sequence[nn.Module] = ()
    same_inputs: dict[str, Collectives] = field(default_factory=dict)
    report: str = ""
    kept: dict[str, Any] = field(default_factory=dict)  # what an axis keeps for its next call


class Travel(NamedTuple):
    """Over which ranks the buckets of one key of the layout travel.

    Args:
        mesh: the ranks as these parameters' gradients see them: copies along replicas, of which
            those along dp share one.
        rank: this one's number among those that have the same parameters.
        share: gives all of these the values of the first. Ranks: all.
        spread: neighbours along dp that share out the parameters of this key.
        sources: keeps the gradients of several sources in a bucket apart; None: there is one.
        groups: over these ranks, an engine.bucket.BucketGroups.
    """

    mesh: Mesh
    rank: int
    share: Callable[[Sequence[Tensor]], None]
    spread: int = 1
    sources: Callable[[Any], Any] | None = None
    groups: Any = None


class Prices(Protocol):
    """What layouts take on a machine: predict.search.MachinePrices."""

    @property
    def nodes(self) -> int:
        """Machines."""

    def step_s(self, workload: Workload, setup: Setup) -> float:
        """Seconds of a step."""

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation."""

    def ops_s(self, workload: Workload, setup: Setup) -> float:
        """Seconds of all operations of a step."""

    def comm_s(self, comm: CommOp) -> float:
        """Seconds of one such communication."""

    def sent_bytes(self, workload: Workload, setup: Setup) -> float:
        """What a rank sends of gradients and weights in a step."""

    def stepped_elements(self, workload: Workload, setup: Setup) -> float:
        """Elements whose state a rank has."""


class Axis:
    """One kind of parallelism; a subclass overrides what it has to say.

    Attributes:
        name: one word, its name in records.
        key: its name in a mesh, and of the parameters that it shares out.
        order: see [Note: order].
        settings: a frozen dataclass of settings, where Parallel has none of its own for it. Field
            names are the flags' names, so they are unique.
        rules: rows for settings/rules.py: Rule, Pair, Needs.
        place: from what is usual to what is rare. Parts of a layout's name stand in this order; of
            layouts alike in speed the one that has less of what is rare is taken; candidates are
            chosen from the other end.
    """

    name = ""
    key = ""
    order = 100
    place = 100
    settings: type | None = None
    rules: tuple[Any, ...] = ()

    # A model

    def plan(self, making: Making) -> None:
        """Before anything is changed.

        Raises:
            ValueError: a model or mesh that this axis cannot share out.
        """

    def cut(self, making: Making) -> None:
        """Leave in the model the modules that this rank has. Ranks: all."""

    def split(self, making: Making) -> None:
        """Keep this rank's part of parameters, and say so in making.declared. Ranks: all."""

    def travel(self, making: Making, n_shards: int) -> Travel | None:
        """Of parameters that have its key, which this axis shares out. Ranks: all.

        Args:
            n_shards: ranks that share one copy of all others.
        """

    def connect(self, making: Making) -> None:
        """Parameters are on their device: tell modules of the ranks that they compute with.

        Ranks: all.
        """

    def attach(self, making: Making, engine: Any) -> None:
        """What an axis does while steps run. Ranks: all."""

    def describe(self, shards: Any) -> Iterable[str]:
        """Lines of engine.describe(), of an engine.shards.Shards."""
        return ()

    def memory(self, shards: Any) -> dict[str, int]:
        """Bytes that are alive on this rank beside those of buckets, by kind."""
        return {}

    def header(self, known: Mapping[str, Any], shape: GPTConfig) -> Iterable[str]:
        """What a run says of this axis at its start: a few words, then perhaps lines.

        Args:
            known: settings in effect by name, and world_size.
        """
        return ()

    def record(self, shards: Any) -> dict[str, Any]:
        """What a checkpoint notes of how this axis ran, by name, for people."""
        return {}

    # A step, on paper

    def ops(self, workload: Workload, setup: Setup) -> Iterable[Op]:
        """What a rank computes for this axis in an optimizer step, beside the model's own ops."""
        return ()

    def comms(self, workload: Workload, setup: Setup) -> Iterable[CommOp]:
        """What a rank communicates for this axis in an optimizer step."""
        return ()

    def states(self, setup: Setup, buckets: Any, found: dict[str, float]) -> None:
        """Change how many bytes of parameters, gradients and optimizer stay on a rank.

        Args:
            buckets: the rank's, axes.data.GPTBuckets.
        """

    def host_bytes(self, workload: Workload, setup: Setup) -> float:
        """Bytes of a rank on its host."""
        return 0.0

    def host_step_s(
        self, workload: Workload, setup: Setup, rates: Any, forward_s: float, backward_s: float
    ) -> float | None:
        """Seconds that a step waits for the host; None: the optimizer's step is the device's.

        Args:
            rates: predict.machine.Rates.
            forward_s, backward_s: of one micro-batch.
        """
        return None

    def keeps(self, workload: Workload, setup: Setup) -> float:
        """More bytes that a block keeps of a micro-batch until backward; less: below 0."""
        return 0.0

    # The planner

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        """Ways to train beside the given one, which is among them.

        What another axis does not accept, the batch or a rule is left out by the search.

        Args:
            setup: with what axes of a higher place have chosen.
            per_node: ranks on a node.
        """
        yield setup

    def accepts(self, workload: Workload, setup: Setup) -> bool:
        """Whether a candidate that all axes had part in is worth trying."""
        return True

    def last_resort(self, setup: Setup) -> int:
        """0: always tried; others are where nothing fits of those below their number."""
        return 0

    def least_wait_s(self, setup: Setup, working_s: float) -> float | None:
        """Of a layout whose step takes a simulation to predict: seconds that it waits at least.

        The search simulates only those that could be the fastest.

        Args:
            working_s: of a step's passes.
        """
        return None

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        """What people compare: of layouts with the same keys the best is shown."""
        names = () if self.settings is None else leaves(self.settings)
        return tuple(getattr(setup, name) for name in names)

    def complexity(self, setup: Setup) -> tuple[Any, ...]:
        """Grows with what there is of it; see place."""
        return tuple(
            value != usual for value, usual in zip(self.compared(setup), self.compared(Setup()))
        )

    def text(self, setup: Setup) -> str:
        """Its part of a layout's name, such as "tp 2"; "" where it is off."""
        return ""

    def note(self, setup: Setup) -> str:
        """What stands behind the name, such as "ZeRO-3"."""
        return ""

    def can_measure(self, setup: Setup) -> bool:
        """Whether predict/measure.py times what a layout does along this axis."""
        return True

    def check(self, command: Any, workload: Workload) -> None:
        """Before a search.

        Args:
            command: predict.plan.PlanCommand.
        Raises:
            ValueError: what was asked for and cannot be.
        """

    def facts(self, workload: Workload, setup: Setup) -> Iterable[str]:
        """Lines about the best layout."""
        return ()

    def verdict(self, estimates: Sequence[Any], asked: Mapping[str, Any]) -> str:
        """Whether it is worth it, as a line of the report.

        Args:
            estimates: predict.search.Estimate, the best first.
            asked: settings that the command gives.
        """
        return ""

    def what_if(self, workload: Workload, setup: Setup, prices: Prices) -> Sequence[str]:
        """A heading, and lines of what a layout would gain with more of it; or none."""
        return ()

    def relief(self, setup: Setup) -> Iterator[tuple[str, Setup]]:
        """Flags that make a model fit which does not, and with them the setup."""
        yield from ()


def layout_text(setup: Setup) -> str:
    """A layout in words: dp 4 x tp 2, ZeRO-3 in groups of 8."""
    axes = sorted(every(), key=lambda axis: axis.place)
    sizes = " x ".join(filter(None, (axis.text(setup) for axis in axes)))
    sizes = sizes or ("one GPU" if setup.device_type == "cuda" else "one rank")
    return ", ".join([sizes, *filter(None, (axis.note(setup) for axis in axes))])


def size_text(n_bytes: float) -> str:
    """Bytes for people."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.0f} MB"


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
