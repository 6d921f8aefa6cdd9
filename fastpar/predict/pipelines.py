"""Layouts with pipeline stages: far too many to simulate, so those go first that could be fastest.

Every (tp, pp, stage, micro-batch, recomputation, schedule, chunks) has a bound that costs next to
nothing: the step without its bubble, and the least bubble that its schedule can have. In the order
of these bounds layouts are simulated, until no bound is below what has been found. What is left out
could not win: see test_the_bounds_leave_out_no_winner.

ZeRO stages 2 and 3 are among them only where nothing else fits: with pipelines they reduce the
gradients of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastpar.axes.step import Setup, Workload
from fastpar.predict.estimate import (
    ALIKE,
    MAX_MICRO_BATCH_TOKENS,
    Estimate,
    divisors,
    layout_text,
    tp_sizes,
)
from fastpar.predict.memory import predict_memory
from fastpar.predict.time import Rates, StepTime, predict_step

MOST_STAGES = 64
SCHEDULES = (
    ("1f1b", None),
    ("interleaved", None),
    ("interleaved", 4),
    ("zb-h1", None),
    ("zb-v", None),
)
SHOWN = 1.5  # times the fastest step: slower pipelines are of no interest
SURE = 0.9  # of a bubble's formula, which is exact for equal stages


def check_stages(workload: Workload, world_size: int, stages: int | None) -> int | None:
    """stages, if ranks and layers can be cut so; None: any number.

    Raises:
        ValueError: more than the layers, or a number that the ranks do not divide.
    """
    if stages is None or stages == 1:
        return stages
    most = min(MOST_STAGES, workload.shape.n_layer)
    near = [n for n in divisors(world_size) if n <= most]
    if not 1 <= stages <= most or world_size % stages:
        raise ValueError(
            f"plan: expected pp to divide the {world_size} ranks and to be at most {most}, of "
            f"{workload.shape.n_layer} layers, got pp={stages}; use --pp "
            + " or ".join(map(str, near[-3:]))
        )
    return stages


def pipeline_splits(
    workload: Workload,
    template: Setup,
    per_node: int,
    stages: int | None = None,
    zero_stages: Iterable[int] = (0, 1),
) -> Iterator[Setup]:
    """Every (tp, pp, stage) that divides what it has to; stages: of this pp alone."""
    for tp in tp_sizes(workload, template, per_node):
        if tp > 1 and template.moment_dtype == "int8":
            continue
        for pp in divisors(template.world_size // tp):
            dp = template.world_size // (tp * pp)
            if not 1 < pp <= min(MOST_STAGES, workload.shape.n_layer) or workload.batch_size % dp:
                continue
            sp = None if workload.seq_len % tp == 0 else False
            if stages not in (None, pp):
                continue
            for stage in zero_stages if dp > 1 else {0}.intersection(zero_stages):
                yield template.change(tp=tp, pp=pp, sequence_parallel=sp, zero_stage=stage)


def least_bubble_s(setup: Setup, time: StepTime) -> float:
    """Seconds that ranks wait at least, of a step whose time is known but for that."""
    working = sum(time.parts[name] for name in ("forward", "backward", "recompute", "loss"))
    fill = (setup.pp - 1) * working / setup.grad_accum_steps
    part = {"zb-h1": 0.25, "zb-v": 0.0}.get(setup.schedule, 1 / setup.chunks)
    return SURE * fill * part


def search_pipelines(
    workload: Workload,
    template: Setup,
    *,
    rates: Rates,
    limit_bytes: float,
    per_node: int,
    checkpointing: Iterable[str],
    fastest_s: float,
    stages: int | None = None,
    zero_stages: Iterable[int] = (0, 1),
) -> list[Estimate]:
    """The best of each way to cut that is not much slower than the fastest.

    Args:
        fastest_s: a step of the best layout without stages, inf for none.
        stages: of this pp alone, whatever its time and memory; the others: as search().
    """
    bounds = []
    for split in pipeline_splits(workload, template, per_node, stages, zero_stages):
        rows = workload.batch_size // split.dp
        for micro in divisors(rows):
            if micro > 1 and micro * workload.seq_len > MAX_MICRO_BATCH_TOKENS:
                break
            for mode in checkpointing:
                setup = split.change(
                    micro_batch_size=micro,
                    grad_accum_steps=rows // micro,
                    activation_checkpointing=mode,
                )
                times: dict[bool, StepTime] = {}
                for schedule, chunks in SCHEDULES:
                    one, in_v = setup.change(schedule=schedule, chunks=chunks), schedule == "zb-v"
                    if split.pp * one.chunks > min(MOST_STAGES, workload.shape.n_layer):
                        continue
                    if in_v not in times:  # a V has one tied table, so nothing to add up
                        times[in_v] = predict_step(workload, one, rates, bubble=False)
                    bound = times[in_v].step_s + least_bubble_s(one, times[in_v])
                    bounds.append((bound, one))
    found: dict[tuple, Estimate] = {}
    for bound, setup in sorted(bounds, key=lambda pair: pair[0]):
        if bound > SHOWN * fastest_s:
            break
        known = found.get(Estimate.family_of(setup))
        if known is not None and known.time is not None and known.time.step_s <= bound:
            continue
        memory = predict_memory(workload, setup)
        if memory.total > limit_bytes:
            least = known is None or (known.time is None and memory.total < known.memory.total)
            if stages is not None and least:
                found[Estimate.family_of(setup)] = Estimate(setup, memory, None)
            continue
        time = predict_step(workload, setup, rates)
        fastest_s = min(fastest_s, time.step_s)
        if known is None or known.time is None or time.step_s < known.time.step_s:
            found[Estimate.family_of(setup)] = Estimate(setup, memory, time)
    return list(found.values())


def stages_text(estimates: Sequence[Estimate]) -> str:
    """Whether pipeline stages are worth it, in a sentence."""
    winner, piped = estimates[0], estimates[0].setup.pp > 1
    others = (e for e in estimates if e.time is not None and (e.setup.pp > 1) != piped)
    other = next(others, None)
    assert winner.time is not None
    if other is None or other.time is None:
        if piped:
            return f"{winner.setup.pp}: without stages nothing fits"
        return "none: no pipeline fits and is within half of the fastest step"
    slower = other.time.step_s / winner.time.step_s - 1
    name = layout_text(other.setup)
    if not piped:
        if slower <= ALIKE:
            return f"none: the best pipeline, {name}, is as fast and less simple"
        waits = other.time.bubble_s / other.time.step_s
        return (
            f"none: the best pipeline, {name}, is {slower:.1%} slower; its stages wait {waits:.1%}"
        )
    exposed = 1e3 * (other.time.exposed_s - winner.time.exposed_s)
    waits = winner.time.bubble_s / winner.time.step_s
    return (
        f"{winner.setup.pp}: the best without, {name}, is {slower:.1%} slower and waits "
        f"{exposed:.3g} ms more for communication; stages wait {waits:.1%} of the step"
    )
