"""Every layout that the runtime can train a workload with, what each would cost, and why one wins.

A layout is refused here exactly where `fastpar train` refuses it: each candidate is turned into the
run's settings, which check themselves. What does not fit is kept, to say by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, takewhile
from typing import Any

from fastpar.axes.step import Setup, Workload
from fastpar.predict.estimate import (
    ALIKE,
    MAX_MICRO_BATCH_TOKENS,
    Estimate,
    cp_sizes,
    divisors,
    tp_sizes,
)
from fastpar.predict.grids import grid_splits
from fastpar.predict.memory import format_bytes, host_bytes, predict_memory
from fastpar.predict.pipelines import search_pipelines
from fastpar.predict.time import Rates, predict_step

CHECKPOINTING = ("none", "selective", "full")


def splits(workload: Workload, template: Setup, per_node: int) -> Iterator[Setup]:
    """Every (tp, cp, stage, shard size) that divides what it has to, with a micro-batch of 1.

    With offload in the template: of the stages that have it.
    """
    stages: dict[str | None, range] = {
        None: range(4),
        "optimizer": range(2, 4),
        "parameters": range(3, 4),
    }
    pairs = (
        (t, *c)
        for t in tp_sizes(workload, template, per_node)
        for c in cp_sizes(workload, template, t, per_node)
    )
    for tp, cp, method in pairs:
        data = template.world_size // tp
        if workload.batch_size % (data // cp):
            continue
        if tp > 1 and template.moment_dtype == "int8":
            continue
        sequence_parallel = None if workload.seq_len % tp == 0 else False
        base = template.change(tp=tp, cp=cp, cp_method=method, sequence_parallel=sequence_parallel)
        in_node = per_node // tp
        shards = {n for n in (in_node, 8 * in_node) if 1 < n < data and data % n == 0}
        alone = data == 1 and template.offload is None
        for stage in stages[template.offload][: 1 if alone else None]:
            for shard_size in (None, *sorted(shards)) if stage else (None,):
                yield base.change(zero_stage=stage, shard_size=shard_size)


def offloads(template: Setup) -> tuple[str, ...]:
    """The kinds of offload that there are for these devices and this optimizer."""
    able = template.device_type == "cuda" and template.optimizer == "adamw"
    return ("optimizer", "parameters") if able else ()


def search(
    workload: Workload,
    template: Setup,
    *,
    rates: Rates,
    limit_bytes: float,
    per_node: int,
    checkpointing: Iterable[str] = CHECKPOINTING,
    stages: int | None = None,
    grid: str | None = None,
) -> list[Estimate]:
    """The best of each way to cut and to keep, fastest first; those that do not fit come last.

    For each split and checkpointing mode the micro-batch is the fastest that fits. Of those that
    are alike in speed the simplest comes first: fewest stages, least cp and tp, lowest ZeRO stage,
    least recomputation. Offload is looked at where nothing else fits.

    Args:
        template: world size, formats, device and transport of all candidates.
        limit_bytes: of a rank's memory.
        per_node: ranks on a node.
        stages: of a pipeline, 1: none; None: what is best.
        grid: of ranks that split layers, as ROWSxCOLUMNS, "none": none; None: what is best.
    """
    modes, alone = tuple(checkpointing), grid not in (None, "none")
    stages = 1 if alone else stages

    def best_of(offload: str | None) -> list[Estimate]:
        given = template.change(offload=offload)
        ways = [] if alone else list(splits(workload, given, per_node))
        ways += grid_splits(workload, given, per_node, grid)
        return _search_splits(workload, ways, rates, limit_bytes, modes)

    found = best_of(None) if stages in (None, 1) else []
    found.sort(key=_rank)
    fastest_s = found[0].time.step_s if found and found[0].time else float("inf")
    for zero_stages in () if alone else ((0, 1), (2, 3)):
        found += search_pipelines(
            workload,
            template,
            rates=rates,
            limit_bytes=limit_bytes,
            per_node=per_node,
            checkpointing=modes,
            fastest_s=fastest_s,
            stages=stages,
            zero_stages=zero_stages,
        )
        if any(e.time for e in found):
            break
    for offload in offloads(template) if stages in (None, 1) and not alone else ():
        if not any(e.time for e in found):
            found += best_of(offload)
    found.sort(key=_rank)
    if found and found[0].time is not None:
        enough = (1 + ALIKE) * found[0].time.step_s
        alike = [e for e in found if e.time is not None and e.time.step_s <= enough]
        simplest = min(alike, key=_complexity)
        found.remove(simplest)
        found.insert(0, simplest)
    return found


def _search_splits(
    workload: Workload,
    ways: Iterable[Setup],
    rates: Rates,
    limit_bytes: float,
    checkpointing: Iterable[str],
) -> list[Estimate]:
    """search() without stages."""
    found = []
    for split in ways:
        rows, sharing = workload.batch_size // split.dp, split.rows * split.depth
        for mode in checkpointing:
            best: Estimate | None = None
            kept = split.change(activation_checkpointing=mode)
            for micro in divisors(rows):
                most = MAX_MICRO_BATCH_TOKENS * split.cp * sharing
                if micro > sharing and micro * workload.seq_len > most:
                    break
                if micro % sharing:
                    continue
                setup = kept.change(micro_batch_size=micro, grad_accum_steps=rows // micro)
                memory = predict_memory(workload, setup)
                if memory.total > limit_bytes:  # and so will larger ones be
                    best = best or Estimate(setup, memory, None)
                    break
                time = predict_step(workload, setup, rates)
                if best is None or best.time is None or time.step_s < best.time.step_s:
                    best = Estimate(setup, memory, time)
            if best is not None:
                found.append(best)
    return found


def _complexity(estimate: Estimate) -> tuple[Any, ...]:
    setup = estimate.setup
    mode = CHECKPOINTING.index(setup.activation_checkpointing)
    chunks = setup.pp * setup.chunks
    return (
        chunks,
        setup.tp_grid is not None,
        setup.cp,
        setup.by_keys,
        setup.tp,
        setup.zero_stage,
        setup.shard_size is not None,
        mode,
        _rank(estimate),
    )


def _rank(estimate: Estimate) -> tuple[float, float]:
    time = estimate.time
    return (time.step_s if time else float("inf"), estimate.memory.total)


def families(estimates: Iterable[Estimate]) -> list[Estimate]:
    """The first of each family."""
    first: dict[tuple[int | str, ...], Estimate] = {}
    for estimate in estimates:
        first.setdefault(estimate.family, estimate)
    return list(first.values())


def why_not(loser: Estimate, winner: Estimate, limit_bytes: float) -> str:
    """Why a layout lost, from its own numbers."""
    if loser.time is None:
        kinds = sorted(vars(loser.memory).items(), key=lambda kind: -kind[1])[:2]
        most = ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in kinds)
        return (
            f"does not fit: {loser.memory.total / 1e9:,.1f} GB of {limit_bytes / 1e9:,.1f} GB with "
            f"a micro-batch of {loser.setup.micro_batch_size} ({most})"
        )
    assert winner.time is not None
    slower = loser.time.step_s / winner.time.step_s - 1
    if slower <= ALIKE:
        more = loser.memory.total / winner.memory.total - 1
        words = f"{abs(more):.0%} {'more' if more > 0 else 'less'} memory"
        return f"as fast within {ALIKE:.0%}, {words}, and less simple"
    parts = winner.time.parts
    more_of = {name: s - parts.get(name, 0.0) for name, s in loser.time.parts.items()}
    worst = sorted(more_of.items(), key=lambda part: -part[1])[:2]
    shown = [f"{name} +{s * 1e3:.3g} ms" for name, s in worst if s > 0.1 * worst[0][1] and s > 0]
    return f"{100 * slower:.1f} % slower: " + ", ".join(shown)


def refused(workload: Workload, setup: Setup) -> str | None:
    """Why the runtime would refuse a layout; None: it would not."""
    if setup.shard_size is not None and setup.data % setup.shard_size:
        return f"shard_size={setup.shard_size} does not divide dp={setup.data}"
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
    """What would make something fit, each the smallest of its kind, in words.

    Args:
        larger: bytes -> a kind of device whose ranks have so many, or None.
    """

    def smallest(workload: Workload, template: Setup, per_node: int) -> tuple[float, Setup]:
        """Bytes of the layout that takes the least, with offload where there is some."""
        template = template.change(activation_checkpointing="full")
        layouts = [
            split.change(grad_accum_steps=workload.batch_size // split.dp)
            for offload in (None, *offloads(template))
            for split in splits(workload, template.change(offload=offload), per_node)
        ]
        sizes = ((predict_memory(workload, layout).total, layout) for layout in layouts)
        return min(sizes, key=lambda found: found[0], default=(float("inf"), template))

    def least(workload: Workload, template: Setup, per_node: int) -> float:
        return smallest(workload, template, per_node)[0]

    ways: list[str] = []

    def add_first(cases: Iterable[tuple[str, Workload, Setup, int]]) -> None:
        for flags, of_what, setup, in_node in cases:
            if least(of_what, setup, in_node) <= limit_bytes:
                ways.append(flags)
                break

    adamw = template.change(optimizer="adamw")
    if offloads(adamw) and not offloads(template):
        add_first([("--optimizer adamw with --offload", workload, adamw, per_node)])
    inputs = template.change(offload_activations=template.device_type == "cuda")
    on_host = format_bytes(host_bytes(workload, smallest(workload, inputs, per_node)[1]))
    flags = "fastpar train --activation-checkpointing full --offload-activations"
    add_first([(f"{flags}, with {on_host} of a rank's host", workload, inputs, per_node)])
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
    device = larger(least(workload, template, per_node))
    if device is not None:
        ways.append(f"--gpu {device}")
    return ways


def possible_batches(workload: Workload, template: Setup, per_node: int, n: int = 3) -> list[int]:
    """The nearest batch sizes that some split of these ranks divides."""
    smallest = template.world_size // tp_sizes(workload, template, per_node)[-1]
    below = workload.batch_size // smallest * smallest
    near = {below, below + smallest, below + 2 * smallest, below - smallest} - {0}
    fits = sorted((b for b in near if b > 0), key=lambda b: abs(b - workload.batch_size))
    return sorted(fits[:n])
