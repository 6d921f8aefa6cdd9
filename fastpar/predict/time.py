"""The time of a step: what a rank computes and sends in it, at a machine's rates.

Counted is the work of fastpar's own ops and engine on the busiest rank; for pipeline stages the
mean, including shares of the loss and the embedding. Each axis counts its own part (axes/); Muon's
matrices are counted here, as if they were shared out evenly.

Shape legend as in gpt.py; N is the tokens of a micro-batch, t is tp. Under sequence parallelism
norms see N/t of them.

[Note: what hides] Communication that is `under` a pass overlaps, up to the machine's overlap, with
the compute time of certain micro-batches: sums of accumulate="full" with the last backward, gathers
of stages 1 and 2 with the first forward, others with all. Communication under nothing, like the
last bucket, is exposed. Along tp only the products of column layers overlap, and for muon's
exchanges only its products.
[Note: bubble] Parts are those of a pipeline's mean rank; the bubble is the rest of the makespan of
its schedule, which axes/pipeline/schedules.py simulates with each stage's costs. It includes the
time of messages, and the slowest stage's extra work.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastpar.axes import every
from fastpar.axes.data import GPTBuckets, buckets_of, elements_of
from fastpar.axes.offload import waiting_s
from fastpar.axes.pipeline import stage_layers
from fastpar.axes.pipeline.schedules import ENOUGH, Costs, Kind
from fastpar.axes.pipeline.schedules import time_of as simulated
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.engine.control import count_words
from fastpar.kernels.loss.linear_cross_entropy import default_chunk_rows
from fastpar.predict.machine import STEPS, Cluster, DatasheetRates
from fastpar.settings import model as block
from fastpar.settings.model import (
    GPTConfig,
    Part,
    block_parts,
    column_share,
    computed_qkv,
    first_parts,
    flops_per_token,
    last_parts,
    parameters_of,
    widths,
    work_of,
)


def product_flops(short: int, long: int) -> float:
    """FLOPs of one step of Newton-Schulz on a matrix with these sides."""
    return 4.0 * short * short * long + 2.0 * short**3


class Matrices(NamedTuple):
    """The matrices that Muon updates on a rank, shared out evenly among dp x tp ranks.

    Attributes:
        kinds: number of parameters of (matrices in it, short side, long side), before tp and dp.
        numel: elements that a replica has of them on a rank of tp, along dp on n_shards ranks.
        n_dp: ranks that share the work; n_tp: ranks of tp.
    """

    kinds: Counter[tuple[int, int, int]]
    numel: int
    n_dp: int
    n_tp: int
    n_shards: int

    @property
    def held(self) -> float:
        """Elements of a rank."""
        return self.numel / self.n_shards

    @property
    def share(self) -> float:
        """Of the work, on the rank with most: a parameter is not divided."""
        costs = {kind: kind[0] * product_flops(*kind[1:]) for kind in self.kinds}
        total = sum(costs[kind] * n for kind, n in self.kinds.items())
        ranks = self.n_dp * self.n_tp
        return max(1 / ranks, max(costs.values()) / total) if total else 1 / ranks

    @property
    def room(self) -> float:
        """Elements of temporary memory: a rank's slices, and beside its own matrices their operands
        and results; of a single one the operands of its products."""
        one = max((2 * short * (short + long) for _, short, long in self.kinds), default=0)
        return self.held + max(3 * self.numel / self.n_dp, one)


_token_flops = functools.lru_cache(1024)(flops_per_token)


def matrices_of(shape: GPTConfig, buckets: GPTBuckets, setup: Setup) -> list[Matrices]:
    """Muon's matrices of a rank with these buckets; experts on ep ranks separately."""
    shards, apart = setup.n_shards if setup.stage else 1, bool(buckets.of_experts)
    matrices = [_matrices(shape, buckets, setup.data, setup.tp, shards, False)]
    if apart:
        ranks = setup.data // setup.mesh.ep, setup.tp, max(1, shards // setup.mesh.ep)
        matrices.append(_matrices(shape, buckets, *ranks, True))
    return matrices


@functools.lru_cache(1024)
def _matrices(
    shape: GPTConfig, buckets: GPTBuckets, dp: int, tp: int, n_shards: int, of_experts: bool
) -> Matrices:
    sizes, sides, numel = widths(shape), {}, 0
    for part in (*block_parts(shape, experts=True), *block_parts(shape)):
        if part.op == "matmul":
            many = {"QKV": shape.queries_per_key + 2, "2F": 2, "2H": 2}.get(part.out, 1)
            both = sorted((sizes[part.into], sizes[part.out] // many))
            sides[f"{part.name}.weight", part.on == "experts"] = many, *both
    bucket_of, kinds = {s.registered: s.bucket for s in buckets.layout.slots}, Counter[Any]()
    for i in buckets.hidden:
        if bool(buckets.layout.buckets[bucket_of[i]].key) == of_experts:
            stack = len(buckets.shapes[i]) == 3
            many, *both = sides[buckets.names[i], stack]
            kind = (buckets.shapes[i][0] * many if stack else many, *both)
            kinds[kind] += 1
            numel += math.prod(buckets.shapes[i])
    return Matrices(kinds, numel, n_shards if n_shards > 1 else dp, tp, n_shards)


def product_bytes(setup: Setup) -> int:
    """Bytes of an element of the products, which is what ranks send."""
    return 2 if setup.device_type == "cuda" else 4


UPDATES = ("optimizer", "orthogonalize", "matrix_update")  # once per step, after the passes


# Compute


def ops_of(workload: Workload, setup: Setup) -> tuple[Op, ...]:
    """What a rank computes in one optimizer step."""
    batch = setup.samples_of_rank, setup.grad_accum_steps, setup.sequence_parallel
    ranks = setup.tp, setup.mesh.cp, setup.by_keys, setup.mesh.pp, setup.mesh.ep
    kind = setup.recompute.activation_checkpointing, setup.weight_bytes, setup.device_type
    passes = _passes(workload.shape, batch, ranks, kind)
    more = (op for axis in every() for op in axis.ops(workload, setup))
    return *passes, *more, *_updates(workload, setup)


@functools.lru_cache(4096)
def _passes(shape: GPTConfig, batch: Any, ranks: Any, kind: Any) -> tuple[Op, ...]:
    """Forward and backward, of what ops_of() reads of a setup."""
    micro, n_micro, sequence_parallel = batch
    (t, c, by_keys, pp, ep), (mode, item, device) = ranks, kind
    sizes, seq_len = widths(shape, t) | {"QKV": computed_qkv(shape, t)}, shape.block_size
    rows = 2 * micro * -(-seq_len // (2 * c)) if by_keys else -(-micro * seq_len // c)
    sent, heads = rows * shape.top_k, shape.heads_of_rank(t)
    on = {"tokens": rows, "own": -(-rows // t) if sequence_parallel else rows, "choices": sent}
    if shape.n_expert:  # assuming that experts are chosen equally often
        on["experts"] = -(-sent * ep // shape.n_expert)

    def pair(part: Part) -> tuple[Op, Op]:
        """A part's forward and backward."""
        size: tuple[int, ...] = (on[part.on], sizes[part.out])
        more = sizes["V"]
        if part.op == "attention":
            size = (micro, heads if by_keys else -(-heads // c), seq_len, shape.head_size)
        elif part.op in ("matmul", "loss"):
            size = (on[part.on], sizes[part.into], sizes[part.out])
        elif part.cheap:
            size = (on[part.on], sizes[part.into])
        if part.op == "loss":
            more = max(1, -(-rows // default_chunk_rows(rows, sizes["C"], more, device)))
        flops, moved, *back = work_of(part.op, size, 4 if part.into == "X" else item, more)
        forward = Op(part.op, size, "forward", flops, moved, 1)
        return forward, Op(part.op, size, "backward", back[0], back[1], 1)

    layers, ends = n_micro * shape.n_layer / pp, n_micro / pp
    sparse = layers * shape.expert_layers / shape.n_layer
    counts = (
        (block.attention_parts(shape), layers),
        (block.mlp_parts(shape), layers - sparse),
        (block.expert_parts(shape), sparse),
    )
    every = [(part, pair(part), count) for parts, count in counts if count for part in parts]
    every.sort(key=lambda each: (not each[0].cheap, each[0].op == "matmul"))
    again = {"none": (), "selective": (True,), "full": (True, False)}[mode]
    sums = Counter[Op]()
    for recomputed in (False, True):
        for part, (forward, backward), count in every:
            if part.op == "attention" and by_keys:
                count /= c  # 1/c of all queries
            if part.on == "experts":
                count *= shape.n_expert // ep
            if not recomputed:
                sums[forward] += count
                sums[backward] += count
            elif part.cheap in again:
                sums[forward._replace(direction="recompute")] += count
    for part in (*last_parts(shape), *first_parts(shape)[:1]):
        for op in pair(part):
            sums[op] += ends
    return tuple(op._replace(count=count) for op, count in sums.items())


def _updates(workload: Workload, setup: Setup) -> Iterator[Op]:
    """The update of this rank's elements."""
    _, shard = elements_of(workload, setup)
    n_elements = math.ceil(shard)
    of_element = 2 * setup.grad_bytes + 2 * setup.weight_bytes + 2 * setup.state_bytes
    if setup.optim.optimizer == "muon":
        for matrices in matrices_of(workload.shape, buckets_of(workload, setup), setup):
            n_elements -= math.ceil(matrices.held)
            yield from _matrix_updates(matrices, setup)
    yield Op("optimizer", (n_elements,), "forward", 15.0 * n_elements, n_elements * of_element, 1)


def _matrix_updates(matrices: Matrices, setup: Setup) -> Iterator[Op]:
    """Products of the rank with the most of them, and the elementwise work."""
    item = product_bytes(setup)
    for (many, short, long), count in matrices.kinds.items():
        flops = STEPS * product_flops(short, long)
        moved = float(STEPS * item * (4 * short * long + 5 * short * short))
        products = many * count * matrices.share
        yield Op("orthogonalize", (short, long), "forward", flops, moved, products)
    # torch's operations read or write gradient, momentum and update 25 times.
    held = math.ceil(matrices.held)
    yield Op("matrix_update", (held,), "forward", 12.0 * held, 25.0 * 4 * held, 1)


# Communication


def comm_ops_of(workload: Workload, setup: Setup) -> tuple[CommOp, ...]:
    """What a rank communicates in one optimizer step."""
    comms = [comm for axis in reversed(every()) for comm in axis.comms(workload, setup)]
    if setup.optim.optimizer == "muon":
        comms += _to_owners(workload, setup)
    if setup.world_size > 1:
        ends, each = _parameters(workload.shape)
        words = count_words(ends + each * -(-workload.shape.n_layer // setup.mesh.pp))
        total = 8.0 * words * setup.world_size
        comms.append(CommOp("all_gather", "control", total, setup.world_size, 1, 1, ""))
    return tuple(comm for comm in comms if comm.count and comm.ranks > 1)


@functools.cache
def _parameters(shape: GPTConfig) -> tuple[int, int]:
    """(parameters of a model outside its layers, parameters of a layer)."""
    parts = first_parts(shape) + last_parts(shape), block_parts(shape)
    ends, each = (len([*parameters_of(some)]) for some in parts)
    return ends, each


def _to_owners(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Muon's matrices to the ranks that update them, and back."""
    item, axis = product_bytes(setup), "shard" if setup.stage else "dp"
    kinds = matrices_of(workload.shape, buckets_of(workload, setup), setup)
    for matrices, stride in zip(kinds, (setup.tp, setup.tp * setup.mesh.ep)):
        along, column = item * matrices.held, item * matrices.numel / matrices.n_dp
        times = 1 + (matrices.n_shards > 1)
        yield CommOp("all_to_all", axis, along, matrices.n_dp, stride, times, "update")
        yield CommOp("all_to_all", "tp", column, setup.tp, 1, 2, "update")


F, B = Kind
_PARTS = ("forward", "backward", "recompute", "loss", "optimizer")
_EXPOSED = ("dp", "tp", "cp", "ep", "pp", "control")


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds.

    Attributes:
        exposed_s: of communication that the rank waits for.
        bubble_s: waiting for other pipeline stages.
        parts: forward, backward, recompute, loss, optimizer, exposed communication (dp, tp, cp,
            ep, pp, control), bubble, waiting for the host's step (offload) and other; they add up
            to step_s.
        tokens_per_s: of all ranks.
        mfu: FLOPs of the model over the devices' peak.
    """

    step_s: float
    exposed_s: float
    bubble_s: float
    parts: dict[str, float]
    tokens_per_s: float
    mfu: float

    def measured(self, step_s: float) -> StepTime:
        """A real step that took so long; its parts are not known."""
        faster = self.step_s / step_s
        return StepTime(step_s, 0, 0, {}, self.tokens_per_s * faster, self.mfu * faster)


def predict_step(
    workload: Workload, setup: Setup, rates: DatasheetRates, *, bubble: bool = True
) -> StepTime:
    """The time of a step.

    Args:
        setup: dp * micro_batch_size * grad_accum_steps is the batch.
        bubble: False: without the waits of pipeline stages, which need a simulation.
    """
    rows = setup.dp * setup.micro_batch_size * setup.grad_accum_steps
    assert rows == workload.batch_size, (rows, workload.batch_size)
    ops, comms = ops_of(workload, setup), comm_ops_of(workload, setup)
    return time_of(workload, setup, rates, ops, comms, bubble=bubble)


def time_of(
    workload: Workload,
    setup: Setup,
    rates: DatasheetRates,
    ops: Iterable[Op],
    comms: Iterable[CommOp],
    *,
    bubble: bool = True,
) -> StepTime:
    """The time of a step that consists of these operations and this communication."""
    parts, column_s, products_s = dict.fromkeys(_PARTS, 0.0), 0.0, 0.0
    passes: Passes = defaultdict(float)
    simulates = setup.mesh.pp > 1 and bubble
    for op in ops:
        seconds = rates.op_s(op) * op.count
        name = "optimizer" if op.name in UPDATES else op.name
        parts[name if name in _PARTS else op.direction] += seconds
        if op.name == "orthogonalize":
            products_s += seconds
        if simulates:
            _add(passes, op, seconds)
        if op.name == "matmul" and op.direction == "backward":
            column_s += seconds * column_share(workload.shape)
    backward_s = parts["backward"] + parts["recompute"] + parts["loss"] * 2 / 3
    one = parts["forward"] / setup.grad_accum_steps, backward_s / setup.grad_accum_steps
    if setup.parallel.offload.what is not None:  # the host steps
        parts["optimizer"] = 0.0
    comms = list(comms)
    exposed = _exposed(setup, rates, comms, parts, (column_s, products_s))
    parts.update(exposed)
    parts["bubble"] = 0.0
    if simulates:
        message_s = max((rates.comm_s(c) for c in comms if c.under == "schedule"), default=0.0)
        waited = exposed["tp"] + sum(
            rates.comm_s(c) * c.count for c in comms if c.kind == "send" and not c.under
        )
        parts["bubble"] = _bubble_s(passes, workload.shape, setup, waited, message_s)
    if setup.parallel.offload.what is not None:
        parts["offload"] = waiting_s(workload, setup, rates.host, *one)
    parts["other"] = rates.overhead_s
    step_s = sum(parts.values())
    tokens_per_s = workload.tokens_per_step / step_s
    mfu = tokens_per_s * _token_flops(workload.shape) / (setup.world_size * rates.peak_flops)
    exposed_s = sum(exposed.values())
    return StepTime(step_s, exposed_s, parts["bubble"], parts, tokens_per_s, mfu)


def _exposed(
    setup: Setup,
    rates: DatasheetRates,
    comms: Iterable[CommOp],
    parts: dict[str, float],
    windows: tuple[float, float],
) -> dict[str, float]:
    """Exposed communication by part; see [Note: what hides].

    windows: seconds of products of column layers, and of muon's.
    """
    n_micro, overlap = setup.grad_accum_steps, rates.overlap
    exposed = dict.fromkeys(_EXPOSED, 0.0)
    along_tp = homes = 0.0
    once, each = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    for comm in comms:
        seconds = rates.comm_s(comm) * comm.count
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
            always = setup.parallel.zero_stage == 3 if gathers else setup.accumulate == "shard"
            (each if always else once)[comm.under] += seconds
    exposed["tp"] += max(0.0, along_tp - overlap * windows[0])
    exposed["dp"] += max(0.0, homes - overlap * windows[1])
    passes = {"forward": parts["forward"], "backward": parts["backward"] + parts["recompute"]}
    for name, seconds in passes.items():
        hidden, usual = overlap * seconds / n_micro, each[name] / n_micro
        exposed["dp"] += (n_micro - 1) * max(0.0, usual - hidden)
        exposed["dp"] += max(0.0, usual + once[name] - hidden)
    return exposed


def cost_per_billion_tokens(
    time: StepTime, cluster: Cluster, price_per_hour: float | None = None
) -> float:
    """Cost of training, in the currency of the price.

    Args:
        price_per_hour: of one device; None: the table's.
    """
    price = cluster.device.price_per_hour if price_per_hour is None else price_per_hour
    return price * cluster.n_devices / 3600 * 1e9 / time.tokens_per_s


# Pipelines: seconds of each stage, the schedule's makespan


Passes = dict[tuple[str, Kind], float]  # seconds on a mean rank, by part of the model and kind


def _add(passes: Passes, op: Op, seconds: float) -> None:
    """Adds the time of all operations like this one."""
    if op.name in UPDATES:
        return
    part = {"embedding": "embedding", "loss": "head"}.get(op.name, "layers")
    if op.direction == "forward":
        passes[part, F] += seconds
    else:
        passes[part, B] += seconds


def _bubble_s(
    passes: Passes, shape: GPTConfig, setup: Setup, waited_s: float, message_s: float
) -> float:
    """The makespan minus the work of a mean rank.

    Args:
        waited_s: for communication in forward and backward, half of it in each.
        message_s: see time_of() of axes/pipeline/schedules.py.
    """
    for kind in (F, B):
        passes["layers", kind] += waited_s / 2
    share, counts = setup.mesh.pp / setup.grad_accum_steps, stage_layers(shape, setup)
    end, stages = len(counts) - 1, []
    for kind in (F, B):
        first, last = (passes[part, kind] * share for part in ("embedding", "head"))
        each = passes["layers", kind] * (share / shape.n_layer)
        ends = enumerate(counts)
        stages.append([n * each + (s == 0) * first + (s == end) * last for s, n in ends])
    # Relative to a mean stage, and rounded, so that similar layouts share a simulation.
    unit = sum(map(sum, stages)) / len(counts) or 1.0
    costs = Costs(*(tuple(round(x / unit, 4) for x in of_kind) for of_kind in stages))
    what = setup.parallel.pipeline.schedule, setup.mesh.pp, setup.grad_accum_steps, setup.chunks
    makespan = unit * makespan_of(*what, costs, round(message_s / unit, 4))
    return makespan - sum(passes.values())


@functools.lru_cache(65536)
def makespan_of(
    schedule: str, pp: int, micro_batches: int, chunks: int, costs: Costs, message: float
) -> float:
    """See time_of() of axes/pipeline/schedules.py; costs are tuples."""
    few = min(micro_batches, ENOUGH * pp + micro_batches % pp)
    makespan, busiest = simulated(schedule, pp, few, chunks, costs, message)
    return makespan + (micro_batches - few) * busiest / few
