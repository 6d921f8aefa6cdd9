"""Lists every layout that the runtime can train a workload with, predicts each, ranks them.

The axes propose layouts, each axis based on the choices of those before it. A layout is refused
here exactly if `fastpar train` refuses it: each candidate is turned into the run's settings, which
check themselves. Layouts that do not fit are kept, to report by how much.

[Note: bounds] Predicting the step of a pipeline needs a simulation, and there are far too many. So
layouts are tried in the order of a cheap lower bound: the step without its bubble, which for others
is the whole step. What is left out could not win: see test_the_bounds_leave_out_no_winner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from fastpar.axes import every, number_text
from fastpar.axes.step import ALIKE, Setup, Workload
from fastpar.predict.machine import DatasheetRates
from fastpar.predict.memory import Memory, format_bytes, host_bytes, predict_memory
from fastpar.predict.time import StepTime, predict_step
from fastpar.settings.mesh import divisors

CHECKPOINTING = ("none", "selective", "full")
MAX_MICRO_BATCH_TOKENS = 131072  # per rank: more rows do not make matrix products faster
SHOWN = 1.5  # times the fastest step: slower layouts are not simulated


@dataclass(frozen=True)
class Estimate:
    """A layout and its prediction; time is None if it does not fit."""

    setup: Setup
    memory: Memory
    time: StepTime | None

    @property
    def step_s(self) -> float:
        return self.time.step_s if self.time else float("inf")

    @property
    def rank(self) -> tuple[float, int]:
        return self.step_s, self.memory.total

    @property
    def family(self) -> tuple[Any, ...]:
        """What the report compares: one row per family."""
        return family_of(self.setup)

    @property
    def complexity(self) -> tuple[Any, ...]:
        """Sort key: of layouts of equal speed the least complex wins, rare axes first."""
        key: list[Any] = []
        for axis in sorted(every(), key=lambda axis: -axis.place):
            for value, usual in zip(axis.compared(self.setup), axis.compared(Setup())):
                key += [value != usual, value if isinstance(value, int) else 0]
        mode = CHECKPOINTING.index(self.setup.recompute.activation_checkpointing)
        return *key, mode, self.rank


def family_of(setup: Setup) -> tuple[Any, ...]:
    """See Estimate.family."""
    return tuple(axis.compared(setup) for axis in every())


def layouts(
    workload: Workload, template: Setup, per_node: int, fixed: Collection[str] = ()
) -> Iterator[Setup]:
    """Every layout that divides the model, the batch and the ranks, with a micro-batch of 1.

    Args:
        fixed: settings that all layouts take from the template.
    """
    setups, axes = [template], sorted(every(), key=lambda axis: -axis.place)
    kept = {(name, value) for name, value in template.in_effect().items() if name in fixed}
    for axis in axes:
        setups = [
            setup
            for given in setups
            for setup in axis.candidates(workload, given, per_node)
            if kept <= setup.in_effect().items()
        ]
    for setup in setups:
        sharing = setup.dp * setup.rows * setup.depth
        sensible = all(axis.accepts(workload, setup) for axis in axes)
        if workload.batch_size % sharing == 0 and sensible and refused(workload, setup) is None:
            yield setup


def is_last_resort(setup: Setup) -> bool:
    """Whether a layout is tried only if no other fits: state on the host, and stages 2 and 3 of a
    pipeline, which reduce the gradients of each micro-batch."""
    layout = setup.parallel
    return layout.offload.what is not None or (setup.mesh.pp > 1 and layout.zero_stage > 1)


def micro_batches(workload: Workload, setup: Setup) -> Iterator[Setup]:
    """The layout with every micro-batch that its ranks can divide, the smallest first."""
    rows, sharing = workload.batch_size // setup.dp, setup.rows * setup.depth
    for micro in divisors(rows):
        most = MAX_MICRO_BATCH_TOKENS * setup.mesh.cp * sharing
        if micro > sharing and micro * workload.seq_len > most:
            break
        if micro % sharing == 0:
            yield setup.change(micro_batch_size=micro, grad_accum_steps=rows // micro)


def search(
    workload: Workload,
    template: Setup,
    *,
    rates: DatasheetRates,
    limit_bytes: float,
    per_node: int,
    fixed: Collection[str] = (),
) -> list[Estimate]:
    """The best of each layout and checkpointing mode, ranked(); what does not fit comes last.

    For each layout and checkpointing mode the micro-batch is the fastest that fits; of pipelines
    only layouts that are not much slower than the fastest are predicted.

    Args:
        template: world size, formats, device and transport of all candidates.
        limit_bytes: of a rank's memory.
        per_node: ranks on a node.
        fixed: settings that all layouts take from the template.
    """
    every_way = list(layouts(workload, template, per_node, fixed))
    estimates: list[Estimate] = []
    for last in (False, True):
        ways = [way for way in every_way if is_last_resort(way) is last]
        estimates += try_in_order(workload, rates, limit_bytes, ways)
        if any(e.time for e in estimates):
            break
    return ranked(estimates)


def ranked(estimates: Iterable[Estimate]) -> list[Estimate]:
    """The fastest first. Of those of equal speed the simplest leads: see Axis.place, then least
    recomputation."""
    ordered = sorted(estimates, key=lambda e: e.rank)
    if ordered and ordered[0].time is not None:
        enough = (1 + ALIKE) * ordered[0].step_s
        simplest = min((e for e in ordered if e.step_s <= enough), key=lambda e: e.complexity)
        ordered.remove(simplest)
        ordered.insert(0, simplest)
    return ordered


def try_in_order(
    workload: Workload,
    rates: DatasheetRates,
    limit_bytes: float,
    ways: Iterable[Setup],
    modes: Iterable[str] = CHECKPOINTING,
) -> Collection[Estimate]:
    """The best micro-batch of each layout and mode; see [Note: bounds]."""
    bounds = [
        (predict_step(workload, setup, rates, bubble=False), setup)
        for way in ways
        for mode in modes
        for setup in micro_batches(workload, way.change(activation_checkpointing=mode))
    ]
    best: dict[Any, Estimate] = {}
    fastest_s = float("inf")
    for time, setup in sorted(bounds, key=lambda pair: pair[0].step_s):
        piped = setup.mesh.pp > 1
        if piped and time.step_s > SHOWN * fastest_s:
            continue
        key = family_of(setup), None if piped else setup.recompute.activation_checkpointing
        before = best.get(key)
        if before is not None and before.step_s <= time.step_s:
            continue
        memory = predict_memory(workload, setup)
        if memory.total <= limit_bytes:
            time = predict_step(workload, setup, rates) if piped else time
            fastest_s = min(fastest_s, time.step_s)
        estimate = Estimate(setup, memory, time if memory.total <= limit_bytes else None)
        if before is None or estimate.rank < before.rank:
            best[key] = estimate
    return best.values()


def families(estimates: Iterable[Estimate]) -> list[Estimate]:
    """The first of each family."""
    first: dict[tuple[Any, ...], Estimate] = {}
    for estimate in estimates:
        first.setdefault(estimate.family, estimate)
    return list(first.values())


def why_not(loser: Estimate, winner: Estimate, limit_bytes: float) -> str:
    """Why a layout lost, from its own figures."""
    if loser.time is None:
        kinds = sorted(vars(loser.memory).items(), key=lambda kind: -kind[1])[:2]
        most = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in kinds)
        return (
            f"does not fit: {loser.memory.total / 1e9:,.1f} GB of {limit_bytes / 1e9:,.1f} GB with "
            f"a micro-batch of {loser.setup.micro_batch_size} ({most})"
        )
    assert winner.time is not None
    slower = loser.step_s / winner.step_s - 1
    if slower <= ALIKE:
        more = loser.memory.total / winner.memory.total - 1
        words = f"{abs(more):.0%} {'more' if more > 0 else 'less'} memory"
        return f"within {ALIKE:.0%} of the best, {words}, but more complex"
    parts = winner.time.parts
    more_of = {name: s - parts.get(name, 0.0) for name, s in loser.time.parts.items()}
    worst = sorted(more_of.items(), key=lambda part: -part[1])[:2]
    shown = [
        f"{name} +{number_text(s * 1e3)} ms" for name, s in worst if s > 0.1 * worst[0][1] and s > 0
    ]
    return f"{100 * slower:.1f} % slower" + ": " * bool(shown) + ", ".join(shown)


def refused(workload: Workload, setup: Setup) -> str | None:
    """Why the runtime would refuse a layout; None: it accepts it."""
    if setup.parallel.shard_size is not None and setup.data % setup.parallel.shard_size:
        return f"shard_size={setup.parallel.shard_size} does not divide dp={setup.data}"
    try:
        setup.config(workload)
    except ValueError as error:
        return str(error)
    return None


def smallest_changes(
    workload: Workload,
    template: Setup,
    *,
    limit_bytes: float,
    per_node: int,
    larger: Callable[[float], str | None],
) -> list[str]:
    """The smallest change of each kind that would make a layout fit, in words.

    Args:
        larger: bytes -> a device whose ranks have that much memory, or None.
    """

    def smallest(workload: Workload, template: Setup, per_node: int) -> tuple[float, Setup]:
        """(bytes, layout) of the layout that takes the least memory."""
        full = template.change(activation_checkpointing="full")
        first = (
            next(micro_batches(workload, way), way)
            for way in layouts(workload, full, per_node)
            if way.mesh.pp == 1
        )
        sizes = ((predict_memory(workload, setup).total, setup) for setup in first)
        return min(sizes, key=lambda case: case[0], default=(float("inf"), full))

    ways: list[str] = []

    def add_first(cases: Iterable[tuple[str, Workload, Setup, int]]) -> None:
        for flags, of_what, setup, in_node in cases:
            if smallest(of_what, setup, in_node)[0] <= limit_bytes:
                ways.append(flags)
                break

    if template.optim.optimizer != "adamw":  # whose state may be on the host
        add_first([("--optimizer adamw", workload, template.change(optimizer="adamw"), per_node)])
    inputs = template.change(offload_activations=template.device_type == "cuda")
    on_host = format_bytes(host_bytes(workload, smallest(workload, inputs, per_node)[1]))
    flags = "fastpar train --activation-checkpointing full --offload-activations"
    add_first([(f"{flags}, with {on_host} of host memory per rank", workload, inputs, per_node)])
    storage: dict[str, dict[str, Any]] = {"--moment-dtype bf16": {"moment_dtype": "bf16"}}
    if template.dtype == "bf16":
        remainder = {"master_weights": "remainder"}
        both = {"moment_dtype": "bf16", **remainder}
        storage = {"--master-weights remainder": remainder, **storage}
        storage["--moment-dtype bf16 --master-weights remainder"] = both
    add_first((f, workload, template.change(**new), per_node) for f, new in storage.items())
    lengths = takewhile(lambda length: length >= 64, (workload.seq_len >> n for n in count(1)))
    shapes = (replace(workload.shape, block_size=length) for length in lengths)
    add_first(
        (f"--block-size {shape.block_size}", replace(workload, shape=shape), template, per_node)
        for shape in shapes
    )
    worlds = [template.world_size * factor for factor in (2, 3, 4, 6, 8, 12, 16, 32, 64)]
    one_node = per_node == template.world_size
    nodes = [max(per_node, min(8, world)) if one_node else per_node for world in worlds]
    add_first(
        (f"--gpus {world}", workload, template.change(world_size=world), node)
        for world, node in zip(worlds, nodes)
    )
    device = larger(smallest(workload, template, per_node)[0])
    if device is not None:
        ways.append(f"--gpu {device}")
    return ways


def possible_batches(
    workload: Workload, template: Setup, per_node: int, fixed: Collection[str] = ()
) -> list[int]:
    """The three nearest batch sizes that some layout of these ranks divides."""
    ways = layouts(replace(workload, batch_size=template.world_size), template, per_node, fixed)
    smallest = min(way.dp * way.rows * way.depth for way in ways)
    below = workload.batch_size // smallest * smallest
    near = {below, below + smallest, below + 2 * smallest, below - smallest} - {0}
    fits = sorted((b for b in near if b > 0), key=lambda b: abs(b - workload.batch_size))
    return sorted(fits[:3])
