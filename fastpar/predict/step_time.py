"""How long a step takes: compute and communication at a machine's rates, and what hides what.

[Note: what hides] Communication that is `under` a pass hides, as far as the machine's overlap lets
it, in the compute time of the micro-batches that it has: sums of accumulate="full" have the last
backward, gathers of stages 1 and 2 the first forward, others all. What is under nothing, like the
last bucket, the rank waits for. Along tp only the products of column layers run beside it, beside
muon's exchanges only its products.
[Note: bubble] Parts are those of a pipeline's mean rank; the bubble is the rest of the makespan of
its schedule, which axes/pipeline/simulator.py runs with each stage's costs. Also in it are the
time that messages take, and what the slowest stage has to do more than the mean.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fastpar.axes.pipeline import stage_layers
from fastpar.axes.pipeline.schedules import Kind
from fastpar.axes.pipeline.simulator import ENOUGH, Costs
from fastpar.axes.pipeline.simulator import time_of as simulated
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.predict.devices import Cluster
from fastpar.predict.host_step import host_step_s
from fastpar.predict.operations import UPDATES, Rates, comm_ops_of, ops_of
from fastpar.settings.block import column_share, flops_per_token
from fastpar.settings.config import GPTConfig
from fastpar.settings.files import check_at_least

F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
_PARTS = ("forward", "backward", "recompute", "loss", "optimizer")
_EXPOSED = ("dp", "tp", "cp", "ep", "pp", "control")


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds.

    Attributes:
        compute_s: of operations.
        comm_s: of communication, hidden or not; exposed_s: what of it the rank waits for.
        bubble_s: waiting for other pipeline stages.
        parts: forward, backward, recompute, loss, optimizer, exposed communication (dp, tp, cp,
            ep, pp, control), bubble, waiting for the host's step (offload) and other; they add up
            to step_s.
        tokens_per_s: of all ranks.
        mfu: None without a known peak.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    bubble_s: float
    parts: dict[str, float]
    tokens_per_s: float
    mfu: float | None


def predict_step(
    workload: Workload, setup: Setup, rates: Rates, *, bubble: bool = True
) -> StepTime:
    """The time of a step.

    Args:
        bubble: False: without the waiting of a pipeline's stages, which takes a simulation.
    Raises:
        ValueError: a batch that is not dp * micro_batch_size * grad_accum_steps; ranks that tp and
            pp do not divide.
    """
    check(workload, setup)
    ops, comms = ops_of(workload, setup), comm_ops_of(workload, setup)
    return time_of(workload, setup, rates, ops, comms, bubble=bubble)


def check(workload: Workload, setup: Setup) -> None:
    """Raise ValueError for what predict_step refuses."""
    counts = ("world_size", "tp", "cp", "pp", "micro_batch_size", "grad_accum_steps")
    values = {name: getattr(setup, name) for name in counts}
    check_at_least("predict_step", values, dict.fromkeys(counts, 1), "count from 1")
    if setup.world_size % (setup.tp * setup.cp * setup.pp):
        axes = "tp * pp" if setup.cp == 1 else "tp * cp * pp"
        raise ValueError(
            f"predict_step: expected {axes} to divide world_size={setup.world_size}, got "
            f"{axes}={setup.tp * setup.cp * setup.pp}; choose another tp"
        )
    rows = setup.dp * setup.micro_batch_size * setup.grad_accum_steps
    if rows != workload.batch_size:
        raise ValueError(
            "predict_step: expected batch_size = dp * micro_batch_size * grad_accum_steps = "
            f"{setup.dp} * {setup.micro_batch_size} * {setup.grad_accum_steps} = {rows}, got "
            f"batch_size={workload.batch_size}; change one of them"
        )


def time_of(
    workload: Workload,
    setup: Setup,
    rates: Rates,
    ops: Iterable[Op],
    comms: Iterable[CommOp],
    *,
    bubble: bool = True,
) -> StepTime:
    """The time of a step that consists of these operations and this communication."""
    parts, column_s, products_s = dict.fromkeys(_PARTS, 0.0), 0.0, 0.0
    kinds = PassCosts() if setup.pp > 1 and bubble else None
    for op in ops:
        seconds = rates.op_s(op) * op.count
        name = "optimizer" if op.name in UPDATES else op.name
        parts[name if name in _PARTS else op.direction] += seconds
        if op.name == "orthogonalize":
            products_s += seconds
        if kinds:
            kinds.add(op, seconds)
        if op.name == "matmul" and op.direction == "backward":
            column_s += seconds * column_share(workload.shape)
    offloads = setup.offload is not None
    if offloads:
        micro = setup.grad_accum_steps
        backward_s = (parts["backward"] + parts["recompute"] + parts["loss"] * 2 / 3) / micro
        forward_s = parts["forward"] / micro
        host = host_step_s(workload, setup, rates.generation, forward_s, backward_s)
        parts["optimizer"] = 0.0
    compute_s = sum(parts.values())
    comms = list(comms)
    comm_s, exposed = _exposed(setup, rates, comms, parts, (column_s, products_s))
    parts.update(exposed)
    parts["bubble"] = 0.0
    if kinds:
        message_s = max((rates.comm_s(c) for c in comms if c.under == "schedule"), default=0.0)
        waited = exposed["tp"] + sum(
            rates.comm_s(c) * c.count for c in comms if c.kind == "send" and not c.under
        )
        parts["bubble"] = kinds.bubble_s(workload.shape, setup, waited, message_s)
    if offloads:
        parts["offload"] = host
    parts["other"] = rates.overhead_s(workload, setup)
    step_s = sum(parts.values())
    tokens_per_s, peak, mfu = workload.tokens_per_step / step_s, rates.peak_flops, None
    if peak is not None:
        mfu = tokens_per_s * flops_per_token(workload.shape) / (setup.world_size * peak)
    exposed_s = sum(exposed.values())
    return StepTime(step_s, compute_s, comm_s, exposed_s, parts["bubble"], parts, tokens_per_s, mfu)


def _exposed(
    setup: Setup,
    rates: Rates,
    comms: Iterable[CommOp],
    parts: dict[str, float],
    rooms: tuple[float, float],
) -> tuple[float, dict[str, float]]:
    """(all communication, what of it is waited for by part); see [Note: what hides].

    rooms: seconds of products of column layers, and of muon's.
    """
    n_micro, overlap = setup.grad_accum_steps, rates.overlap
    exposed = dict.fromkeys(_EXPOSED, 0.0)
    total = along_tp = homes = 0.0
    once, each = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    for comm in comms:
        seconds = rates.comm_s(comm) * comm.count
        total += seconds
        if comm.under == "schedule":  # see [Note: bubble]
            continue
        if not comm.under:
            exposed[comm.axis if comm.axis in _EXPOSED else "dp"] += seconds
        elif comm.under == "update":
            homes += seconds
        elif comm.axis == "tp":
            along_tp += seconds
        else:
            gathers = comm.kind == "all_gather"
            always = setup.zero_stage == 3 if gathers else setup.accumulate == "shard"
            (each if always else once)[comm.under] += seconds
    exposed["tp"] += max(0.0, along_tp - overlap * rooms[0])
    exposed["dp"] += max(0.0, homes - overlap * rooms[1])
    windows = {"forward": parts["forward"], "backward": parts["backward"] + parts["recompute"]}
    for name, window in windows.items():
        room, usual = overlap * window / n_micro, each[name] / n_micro
        exposed["dp"] += (n_micro - 1) * max(0.0, usual - room)
        exposed["dp"] += max(0.0, usual + once[name] - room)
    return total, exposed


def cost_per_billion_tokens(
    time: StepTime, cluster: Cluster, price_per_hour: float | None = None
) -> float:
    """Cost of training, in the currency of the price.

    Args:
        price_per_hour: of one device; None: the table's.
    Raises:
        ValueError: a negative price.
    """
    price = cluster.device.price_per_hour if price_per_hour is None else price_per_hour
    values, advice = {"price_per_hour": price}, "pass the price of one device"
    check_at_least("cost_per_billion_tokens", values, {"price_per_hour": 0}, advice)
    return price * cluster.n_devices / 3600 * 1e9 / time.tokens_per_s


# Pipelines: seconds of each stage, the schedule's makespan


class PassCosts:
    """Seconds of a step's passes on a mean rank, by (what part of the model, kind of operation)."""

    def __init__(self) -> None:
        self.seconds = Counter[tuple[str, Kind]]()

    def add(self, op: Op, seconds: float) -> None:
        """All operations like this one."""
        if op.name in UPDATES:
            return
        part = {"embedding": "embedding", "loss": "head"}.get(op.name, "layers")
        if op.direction == "forward":
            self.seconds[part, F] += seconds  # type: ignore[assignment]  # Counter of floats
        elif op.name == "matmul" and op.direction == "backward":
            self.seconds[part, I] += seconds / 2  # type: ignore[assignment]
            self.seconds[part, W] += seconds / 2  # type: ignore[assignment]
        else:
            kind = W if op.name == "embedding" else I
            self.seconds[part, kind] += seconds  # type: ignore[assignment]

    def of_part(self, setup: Setup, part: str, count: int = 1) -> dict[Kind, float]:
        """Of one micro-batch; count: of such parts in the model."""
        share = setup.pp / setup.grad_accum_steps / count
        return {kind: self.seconds[part, kind] * share for kind in (F, I, W)}

    def bubble_s(self, shape: GPTConfig, setup: Setup, waited_s: float, message_s: float) -> float:
        """What the makespan has more than the work of a mean rank.

        Args:
            waited_s: for communication in forward and backward, half of it in each.
            message_s: see time_of() of axes/pipeline/simulator.py.
        """
        for kind in (F, I):
            self.seconds["layers", kind] += waited_s / 2  # type: ignore[assignment]
        first, each, last = (
            self.of_part(setup, part, count)
            for part, count in (("embedding", 1), ("layers", shape.n_layer), ("head", 1))
        )
        counts = stage_layers(shape, setup)
        end = len(counts) - 1
        stages = {
            kind: tuple(
                count * each[kind] + (s == 0) * first[kind] + (s == end) * last[kind]
                for s, count in enumerate(counts)
            )
            for kind in (F, I, W)
        }
        # In parts of a mean stage, and rounded, so that layouts that are alike share a simulation.
        unit = sum(map(sum, stages.values())) / len(counts) or 1.0
        costs = [tuple(round(x / unit, 4) for x in of_kind) for of_kind in stages.values()]
        what = setup.schedule, setup.pp, setup.grad_accum_steps, setup.chunks
        makespan = unit * makespan_of(*what, Costs(*costs), round(message_s / unit, 4))
        return makespan - sum(self.seconds.values())


@functools.lru_cache(65536)
def makespan_of(
    schedule: str, pp: int, micro_batches: int, chunks: int, costs: Costs, message: float
) -> float:
    """See time_of() of axes/pipeline/simulator.py; costs are tuples."""
    few = min(micro_batches, ENOUGH * pp + micro_batches % pp)
    makespan, busiest = simulated(schedule, pp, few, chunks, costs, message)
    return makespan + (micro_batches - few) * busiest / few
