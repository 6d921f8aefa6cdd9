"""The time of a step: what a rank computes and sends in it, at a machine's rates.

Counted is the work of fastpar's own ops and engine on the busiest rank; for pipeline stages the
mean, including shares of the loss and the embedding. Each axis counts its own part (axes/). Muon's
matrices, assigned to ranks by the runtime's assign(), are counted here: the buckets say which rank
has which elements of them, and the steps of Owners are counted one by one.

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
from operator import attrgetter
from typing import Any, NamedTuple

from fastpar.axes import every
from fastpar.axes.data import BucketKind, GPTBuckets, buckets_of, elements_of
from fastpar.axes.pipeline import stage_layers
from fastpar.axes.pipeline.schedules import ENOUGH, Costs, Kind
from fastpar.axes.pipeline.schedules import time_of as simulated
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.engine.control import count_words
from fastpar.kernels.loss.linear_cross_entropy import default_chunk_rows
from fastpar.optim.muon import Owner, assign
from fastpar.predict.machine import STEPS, Cluster, Rates
from fastpar.settings import model as block
from fastpar.settings.files import check_at_least
from fastpar.settings.model import (
    GPTConfig,
    Part,
    block_parts,
    column_share,
    first_parts,
    flops_per_token,
    last_parts,
    parameters_of,
    widths,
    work_of,
)

_WIDE = 4  # bytes of an element of the momentum's arithmetic
_MOST_RANKS = 8  # for which memory is counted: those with the most matrices


class Sent(NamedTuple):
    """Per update and axis: elements that a rank sends to others, or messages."""

    dp: int
    tp: int


def product_flops(short: int, long: int) -> float:
    """FLOPs of one step of Newton-Schulz on a matrix with these sides."""
    return 4.0 * short * short * long + 2.0 * short**3


class MatrixUpdates:
    """The assignment of a rank's layers' matrices to ranks.

    Args:
        dp, n_shards: ranks that have them.
        shared_out: of experts that ep ranks split; False: of everything else.
    Attributes:
        elements: of the matrices on a rank along dp x tp, tp innermost; the most.
        sent: by every rank, in this order; most_sent: by any of them.
        messages: all_to_alls per step.
        jobs: number of matrices [short, long] on the rank with the most FLOPs.
    """

    def __init__(
        self,
        shape: GPTConfig,
        buckets: GPTBuckets,
        dp: int,
        tp: int,
        n_shards: int,
        shared_out: bool = False,
    ) -> None:
        slots, made = (
            {slot.registered: slot for slot in buckets.layout.slots},
            buckets.layout.buckets,
        )
        self.sharded, self.n_tp, self.n_shards = n_shards > 1, tp, n_shards
        self.n_dp = n_shards if self.sharded else dp
        sizes, kinds = widths(shape), {}
        for part in (*block_parts(shape, experts=True), *block_parts(shape)):
            if part.op == "matmul":
                many = 3 if part.out == "QKV" else 2 if part.out == "2F" else 1
                sides = sorted((sizes[part.into], sizes[part.out] // many))
                kinds[f"{part.name}.weight", part.on == "experts"] = many, *sides
        self.what = {}  # number of matrices in a parameter, and their sides
        for i in buckets.hidden:
            if bool(made[slots[i].bucket].key) == shared_out:
                stack, *others = buckets.shapes[i]
                many, *sides = kinds[buckets.names[i], len(others) == 2]
                self.what[i] = (stack if len(others) == 2 else many), *sides
        order = sorted(self.what, key=lambda i: self.what[i][0] == 1)  # groups of muon_groups()
        costs = [n * product_flops(*sides) for n, *sides in map(self.what.__getitem__, order)]
        places = assign(costs, self.n_dp * tp)
        self.home = {i: Owner(*divmod(place, tp)) for i, place in zip(order, places)}
        self.numel = {i: math.prod(buckets.shapes[i]) for i in order}
        self.pieces: dict[int, dict[int, int]] = {}  # elements of each matrix, by rank along dp
        by_bucket: dict[int, list[int]] = {}
        for i in sorted(order, key=lambda i: (slots[i].bucket, slots[i].start)):
            slot = slots[i]
            by_bucket.setdefault(slot.bucket, []).append(i)
            kind = BucketKind(made[slot.bucket].numel, False, False, False)
            self.pieces[i] = self._pieces(slot.start, slot.stop, kind.padded(n_shards) // n_shards)
        self.batches = list(by_bucket.values())
        loads: dict[int, float] = dict.fromkeys(places, 0.0)
        for place, cost in zip(places, costs):
            loads[place] += cost
        busiest = max(loads, key=loads.__getitem__, default=0)
        self.jobs = Counter[tuple[int, int]]()
        for i, place in zip(order, places):
            if place == busiest:
                count, short, long = self.what[i]
                self.jobs[short, long] += count
        self._rooms: dict[int, int] = {}
        self.sent, n = self._sent(), len(self.batches)
        self.most_sent = Sent(*map(max, zip(*self.sent)))
        self.messages = Sent(n * (1 + self.sharded) * (self.n_dp > 1), 2 * n * (tp > 1))
        held = Counter[int]()
        for pieces in self.pieces.values():
            held.update(pieces)
        self.elements = max(held.values(), default=0)

    def _pieces(self, start: int, stop: int, shard: int) -> dict[int, int]:
        if not self.sharded:
            return dict.fromkeys(range(self.n_dp), stop - start)
        ranks = range(start // shard, (stop - 1) // shard + 1)
        return {r: min(stop, (r + 1) * shard) - max(start, r * shard) for r in ranks}

    def _sent(self) -> list[Sent]:
        along, column, own = Counter[int](), Counter[int](), Counter[Owner]()
        for i, home in self.home.items():
            everywhere = self.pieces[i]
            for rank, size in everywhere.items() if self.sharded else ():
                along[rank] += size * (rank != home.dp)
            along[home.dp] += sum(everywhere.values()) - everywhere.get(home.dp, 0)
            column[home.dp] += self.numel[i]
            own[home] += self.numel[i]
        ranks = (Owner(r, t) for r in range(self.n_dp) for t in range(self.n_tp))
        # Slices of others' matrices to their ranks, slices of its results to all.
        return [
            Sent(along[at.dp], (column[at.dp] + (self.n_tp - 2) * own[at]) * (self.n_tp > 1))
            for at in ranks
        ]

    def room(self, item: int) -> int:
        """Bytes of temporary memory of an update on the rank that needs most.

        Args:
            item: bytes of an element of the products.
        """
        if item not in self._rooms:
            own = Counter[Owner](self.home.values())
            ranks = {home for home, _ in own.most_common(_MOST_RANKS)} | {Owner(0, 0)}
            self._rooms[item] = max(self._room(rank, item) for rank in ranks)
        return self._rooms[item]

    def _room(self, at: Owner, item: int) -> int:
        """Bytes alive in Owners.run(), which takes the same steps."""
        mine = {i: self.pieces[i].get(at.dp, 0) for i in self.home}
        alive, tp = item * sum(mine.values()), self.n_tp
        # The slices, while the last one is moved: with its gradient, product and sum.
        most = alive + 3 * _WIDE * max(mine.values(), default=0)

        def column(batch: list[int]) -> int:
            return item * sum(self.numel[i] for i in batch if self.home[i].dp == at.dp)

        def given(batch: list[int]) -> int:
            return item * sum(mine[i] for i in batch)

        for batch in self.batches if self.sharded else ():  # sent: copies of slices, then freed
            most = max(most, alive + given(batch) + column(batch))
            alive += column(batch)
        back = 0
        for batch in self.batches:
            arrived, own = column(batch), [i for i in batch if self.home[i] == at]
            whole = {i: item * self.numel[i] * tp for i in own}
            most = max(most, alive + arrived * self.sharded)
            alive += arrived * (not self.sharded) - given(batch)
            if tp > 1:
                most = max(most, alive + arrived + 2 * sum(whole.values()))
                alive += sum(whole.values()) - arrived
            for i in own:
                most = max(most, alive + self._products(i, item))
            sliced = sum(whole.values()) + (arrived if tp > 1 else 0)
            most = max(most, alive + sliced)
            alive += sliced - sum(whole.values())
            copies = arrived * (1 if self.sharded else self.n_dp)
            returned = copies + given(batch) * (self.n_dp > 1)
            if tp > 1:
                back += returned
            else:
                most = max(most, alive + returned)
                alive += returned - sliced
        return max(most, alive + back)

    def _products(self, i: int, item: int) -> int:
        """Memory besides a full parameter: finished parts, and orthogonalize()'s own."""
        count, short, long = self.what[i]
        part = short * long
        running = 2 * part + 2 * short * short
        return item * max((count - 1) * part + running, 2 * count * part * (count > 1))


_matrices = functools.lru_cache(1024)(MatrixUpdates)
_token_flops = functools.lru_cache(1024)(flops_per_token)


def updates_of(shape: GPTConfig, buckets: GPTBuckets, setup: Setup) -> tuple[MatrixUpdates, ...]:
    """The matrices of a rank with these buckets; experts on ep ranks separately."""
    n_shards, ep = setup.n_shards if setup.stage else 1, setup.ep
    found = _matrices(shape, buckets, setup.data, setup.tp, n_shards)
    if not buckets.of_experts:
        return (found,)
    shards = max(1, n_shards // ep)
    return found, _matrices(shape, buckets, setup.data // ep, setup.tp, shards, True)


def updates_text(shape: GPTConfig, buckets: GPTBuckets, setup: Setup) -> str:
    """The largest share of the work, and the bytes sent, in a line."""
    found, item = updates_of(shape, buckets, setup), product_bytes(setup)
    jobs = [(sides, n) for each in found for sides, n in each.jobs.items()]
    flops = sum(STEPS * product_flops(*sides) * n for sides, n in jobs)
    text = f"orthogonalizes {sum(n for _, n in jobs)} of "
    many = sum(n for each in found for n, *_ in each.what.values())
    text += f"{many} matrices on a rank, {flops / 1e12:,.3g} TFLOP"
    for axis in Sent._fields:
        messages = sum(getattr(each.messages, axis) for each in found)
        most = sum(item * max(getattr(sent, axis) for sent in each.sent) for each in found) / 1e6
        text += f"; sends {most:,.3g} MB along {axis} in {messages} all-to-alls" if messages else ""
    return text


def product_bytes(setup: Setup) -> int:
    """Bytes of an element of the products, which is what ranks send."""
    return 2 if setup.device_type == "cuda" else 4


UPDATES = ("optimizer", "orthogonalize", "matrix_update")  # once per step, after the passes


# Compute


def ops_of(workload: Workload, setup: Setup) -> tuple[Op, ...]:
    """What a rank computes in one optimizer step."""
    passes = _passes(workload.shape, *_decides_passes(setup))
    more = (op for axis in every() for op in axis.ops(workload, setup))
    return *passes, *more, *_updates(workload, setup)


_decides_passes = attrgetter(
    *("samples_of_rank", "grad_accum_steps", "tp", "cp", "by_keys", "pp", "sequence_parallel"),
    *("activation_checkpointing", "weight_bytes", "device_type", "ep"),
)


@functools.lru_cache(4096)
def _passes(shape: GPTConfig, *decides: Any) -> tuple[Op, ...]:
    """Forward and backward."""
    micro, n_micro, t, c, by_keys, pp, sequence_parallel, mode, item, device, ep = decides
    sizes, seq_len = widths(shape, t), shape.block_size
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
    found = Counter[Op]()
    for recomputed in (False, True):
        for part, (forward, backward), count in every:
            if part.op == "attention" and by_keys:
                count /= c  # 1/c of all queries
            if part.on == "experts":
                count *= shape.n_expert // ep
            if not recomputed:
                found[forward] += count
                found[backward] += count
            elif part.cheap in again:
                found[forward._replace(direction="recompute")] += count
    for part in (*last_parts(shape), *first_parts(shape)[:1]):
        for op in pair(part):
            found[op] += ends
    return tuple(op._replace(count=count) for op, count in found.items())


def _updates(workload: Workload, setup: Setup) -> Iterator[Op]:
    """The update of this rank's elements."""
    _, shard = elements_of(workload, setup)
    mine = math.ceil(shard)
    of_element = 2 * setup.grad_bytes + 2 * setup.weight_bytes + 2 * setup.state_bytes
    if setup.optimizer == "muon":
        for matrices in updates_of(workload.shape, buckets_of(workload, setup), setup):
            mine -= matrices.elements
            yield from _matrix_updates(matrices, setup)
    yield Op("optimizer", (mine,), "forward", 15.0 * mine, mine * of_element, 1)


def _matrix_updates(matrices: MatrixUpdates, setup: Setup) -> Iterator[Op]:
    """Products of the rank with the most of them, and the elementwise work."""
    item = product_bytes(setup)
    for (short, long), count in matrices.jobs.items():
        flops = STEPS * product_flops(short, long)
        moved = float(STEPS * item * (4 * short * long + 5 * short * short))
        yield Op("orthogonalize", (short, long), "forward", flops, moved, count)
    # torch's operations read or write gradient, momentum and update 25 times.
    moved, flops = 25.0 * 4 * matrices.elements, 12.0 * matrices.elements
    yield Op("matrix_update", (matrices.elements,), "forward", flops, moved, 1)


# Communication


def comm_ops_of(workload: Workload, setup: Setup) -> tuple[CommOp, ...]:
    """What a rank communicates in one optimizer step."""
    found = [comm for axis in reversed(every()) for comm in axis.comms(workload, setup)]
    if setup.optimizer == "muon":
        found += _to_homes(workload, setup)
    if setup.world_size > 1:
        ends, each = _parameters(workload.shape)
        words = count_words(ends + each * -(-workload.shape.n_layer // setup.pp))
        total = 8.0 * words * setup.world_size
        found.append(CommOp("all_gather", "control", total, setup.world_size, 1, 1, ""))
    return tuple(comm for comm in found if comm.count and comm.ranks > 1)


@functools.cache
def _parameters(shape: GPTConfig) -> tuple[int, int]:
    """(parameters of a model outside its layers, parameters of a layer)."""
    parts = first_parts(shape) + last_parts(shape), block_parts(shape)
    ends, each = (len([*parameters_of(some)]) for some in parts)
    return ends, each


def _to_homes(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Muon's matrices to their ranks and back: for the rank that sends most."""
    item, along = product_bytes(setup), "shard" if setup.stage else "dp"
    found = updates_of(workload.shape, buckets_of(workload, setup), setup)
    for matrices, stride in zip(found, (setup.tp, setup.tp * setup.ep)):
        most = matrices.most_sent
        for axis, ranks, apart, sent, count in (
            (along, matrices.n_dp, stride, most.dp, matrices.messages.dp),
            ("tp", setup.tp, 1, most.tp, matrices.messages.tp),
        ):
            if count:
                n_bytes = float(item * sent) * ranks / (ranks - 1) / count
                yield CommOp("all_to_all", axis, n_bytes, ranks, apart, count, "update")


F, I, W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741
_PARTS = ("forward", "backward", "recompute", "loss", "optimizer")
_EXPOSED = ("dp", "tp", "cp", "ep", "pp", "control")


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds.

    Attributes:
        compute_s: of operations.
        comm_s: of communication, overlapped or not; exposed_s: the part that the rank waits for.
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
        bubble: False: without the waits of pipeline stages, which need a simulation.
    Raises:
        ValueError: a batch that is not dp * micro_batch_size * grad_accum_steps; ranks that tp and
            pp do not divide.
    """
    check(workload, setup)
    ops, comms = ops_of(workload, setup), comm_ops_of(workload, setup)
    return time_of(workload, setup, rates, ops, comms, bubble=bubble)


def check(workload: Workload, setup: Setup) -> None:
    """Raises ValueError for arguments that predict_step refuses."""
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
    passes: Passes = defaultdict(float)
    simulates = setup.pp > 1 and bubble
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
    waits = (axis.host_step_s(workload, setup, rates, *one) for axis in every())
    on_host = [seconds for seconds in waits if seconds is not None]
    if on_host:
        parts["optimizer"] = 0.0
    compute_s = sum(parts.values())
    comms = list(comms)
    comm_s, exposed = _exposed(setup, rates, comms, parts, (column_s, products_s))
    parts.update(exposed)
    parts["bubble"] = 0.0
    if simulates:
        message_s = max((rates.comm_s(c) for c in comms if c.under == "schedule"), default=0.0)
        waited = exposed["tp"] + sum(
            rates.comm_s(c) * c.count for c in comms if c.kind == "send" and not c.under
        )
        parts["bubble"] = _bubble_s(passes, workload.shape, setup, waited, message_s)
    if on_host:
        parts["offload"] = sum(on_host)
    parts["other"] = rates.overhead_s(workload, setup)
    step_s = sum(parts.values())
    tokens_per_s, peak, mfu = workload.tokens_per_step / step_s, rates.peak_flops, None
    if peak is not None:
        mfu = tokens_per_s * _token_flops(workload.shape) / (setup.world_size * peak)
    exposed_s = sum(exposed.values())
    return StepTime(step_s, compute_s, comm_s, exposed_s, parts["bubble"], parts, tokens_per_s, mfu)


def _exposed(
    setup: Setup,
    rates: Rates,
    comms: Iterable[CommOp],
    parts: dict[str, float],
    windows: tuple[float, float],
) -> tuple[float, dict[str, float]]:
    """(all communication, exposed communication by part); see [Note: what hides].

    windows: seconds of products of column layers, and of muon's.
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
    exposed["tp"] += max(0.0, along_tp - overlap * windows[0])
    exposed["dp"] += max(0.0, homes - overlap * windows[1])
    passes = {"forward": parts["forward"], "backward": parts["backward"] + parts["recompute"]}
    for name, seconds in passes.items():
        hidden, usual = overlap * seconds / n_micro, each[name] / n_micro
        exposed["dp"] += (n_micro - 1) * max(0.0, usual - hidden)
        exposed["dp"] += max(0.0, usual + once[name] - hidden)
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


Passes = dict[tuple[str, Kind], float]  # seconds on a mean rank, by part of the model and kind


def _add(passes: Passes, op: Op, seconds: float) -> None:
    """Adds the time of all operations like this one."""
    if op.name in UPDATES:
        return
    part = {"embedding": "embedding", "loss": "head"}.get(op.name, "layers")
    if op.direction == "forward":
        passes[part, F] += seconds
    elif op.name == "matmul" and op.direction == "backward":
        passes[part, I] += seconds / 2
        passes[part, W] += seconds / 2
    else:
        passes[part, W if op.name == "embedding" else I] += seconds


def _bubble_s(
    passes: Passes, shape: GPTConfig, setup: Setup, waited_s: float, message_s: float
) -> float:
    """The makespan minus the work of a mean rank.

    Args:
        waited_s: for communication in forward and backward, half of it in each.
        message_s: see time_of() of axes/pipeline/schedules.py.
    """
    for kind in (F, I):
        passes["layers", kind] += waited_s / 2
    share, counts = setup.pp / setup.grad_accum_steps, stage_layers(shape, setup)
    end, stages = len(counts) - 1, []
    for kind in (F, I, W):
        first, last = (passes[part, kind] * share for part in ("embedding", "head"))
        each = passes["layers", kind] * (share / shape.n_layer)
        ends = enumerate(counts)
        stages.append([n * each + (s == 0) * first + (s == end) * last for s, n in ends])
    # Relative to a mean stage, and rounded, so that similar layouts share a simulation.
    unit = sum(map(sum, stages)) / len(counts) or 1.0
    costs = Costs(*(tuple(round(x / unit, 4) for x in of_kind) for of_kind in stages))
    what = setup.schedule, setup.pp, setup.grad_accum_steps, setup.chunks
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
