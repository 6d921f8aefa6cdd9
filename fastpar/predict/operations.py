"""What a step is made of, without saying how long it takes: compute and communication of one rank.

Op and CommOp are the words between those who count (here), those who know a machine (Rates) and
those who add up (step_time.py). Counted is what fastpar's own ops and engine do, on the rank that
has most to do; of pipeline stages the mean, fractions of the loss and of the embedding included.

Shape legend as in gpt.py; N is the tokens of a micro-batch, t is tp. Under sequence parallelism
norms see N/t of them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Protocol

from fastpar.axes.buckets import bucket_mb_of, buckets_of
from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.wires import FORMATS
from fastpar.engine.control import count_words
from fastpar.kernels.linear_cross_entropy import default_chunk_rows
from fastpar.predict.matrix_updates import (
    STEPS,
    MatrixUpdates,
    product_bytes,
    product_flops,
    updates_of,
)
from fastpar.settings import block
from fastpar.settings.block import (
    FIRST,
    LAST,
    Part,
    block_parts,
    count_elements,
    parameters_of,
    shapes_of,
    split_products,
    vocabulary_rows,
    widths,
    work_of,
)
from fastpar.settings.config import GPTConfig

UPDATES = ("optimizer", "orthogonalize", "matrix_update")  # once a step, after the passes


class Rates(Protocol):
    """How fast a machine is: DatasheetRates on paper, MeasuredRates for this machine."""

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation."""

    def comm_s(self, comm: CommOp) -> float:
        """Seconds of one such communication."""

    def overhead_s(self, workload: Workload, setup: Setup) -> float:
        """Seconds of a step that no Op and no CommOp stands for: Python, hooks, data."""

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of a rank at the format of the weights, for MFU; None: not known."""

    @property
    def overlap(self) -> float:
        """Fraction of the compute time under which communication hides; 0: cores do both."""

    @property
    def generation(self) -> str:
        """Of the device, which tells what host it usually has: a key of host_step.HOSTS."""


# Compute


def ops_of(workload: Workload, setup: Setup) -> tuple[Op, ...]:
    """What a rank computes in one optimizer step."""
    return _passes(workload.shape, *_decides_passes(setup)) + _updates(workload, setup)


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
    if shape.n_expert:  # chosen equally often
        on["experts"] = -(-sent * ep // shape.n_expert)

    def pair(part: Part) -> tuple[Op, Op]:
        """Its forward and its backward."""
        size: tuple[int, ...] = (on[part.on], sizes[part.out])
        more = sizes["V"]
        if part.op == "attention":
            size = (micro, heads if by_keys else -(-heads // c), seq_len, shape.head_dim)
        elif part.op in ("matmul", "loss"):
            size = (on[part.on], sizes[part.into], sizes[part.out])
        if part.op == "loss":
            more = max(1, -(-rows // default_chunk_rows(rows, sizes["C"], more, device)))
        flops, moved, *back = work_of(part.op, size, 4 if part.into == "X" else item, more)
        forward = Op(part.op, size, "forward", flops, moved, 1)
        return forward, Op(part.op, size, "backward", back[0], back[1], 1)

    layers, ends = n_micro * shape.n_layer / pp, n_micro / pp
    sparse = layers * shape.expert_layers / shape.n_layer
    counts = (block.ATTENTION, layers), (block.MLP, layers - sparse), (block.EXPERTS, sparse)
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
    for part in (*LAST, *FIRST[:1]):
        for op in pair(part):
            found[op] += ends
    return tuple(op._replace(count=count) for op, count in found.items())


def _updates(workload: Workload, setup: Setup) -> tuple[Op, ...]:
    """Gradients into their buckets, the update of this rank's elements."""
    (local, shard), n_micro = elements_of(workload, setup), setup.grad_accum_steps
    n_first = n_micro if setup.accumulate == "shard" else 1
    copied = local * (setup.weight_bytes + setup.grad_bytes)
    added = copied + local * setup.grad_bytes
    ops = [Op("copy", (copied,), "backward", 0.0, float(copied), n_first)]
    if n_first < n_micro:
        ops.append(Op("copy", (added,), "backward", 0.0, float(added), n_micro - n_first))
    ops += _codes(local, buckets_of(workload, setup).coded_share, setup)
    mine = math.ceil(shard)
    of_element = 2 * setup.grad_bytes + 2 * setup.weight_bytes + 2 * setup.state_bytes
    if setup.optimizer == "muon":
        matrices = updates_of(workload.shape, buckets_of(workload, setup), setup)
        mine -= matrices.elements
        ops += _matrix_updates(matrices, setup)
    return *ops, Op("optimizer", (mine,), "forward", 15.0 * mine, mine * of_element, 1)


def _matrix_updates(matrices: MatrixUpdates, setup: Setup) -> Iterator[Op]:
    """The products of the rank that has most of them, and what is done element by element."""
    item = product_bytes(setup)
    for (short, long), count in matrices.jobs.items():
        flops = STEPS * product_flops(short, long)
        moved = float(STEPS * item * (4 * short * long + 5 * short * short))
        yield Op("orthogonalize", (short, long), "forward", flops, moved, count)
    # Gradient, momentum and update are gone through 25 times by torch's operations.
    moved, flops = 25.0 * 4 * matrices.elements, 12.0 * matrices.elements
    yield Op("matrix_update", (matrices.elements,), "forward", flops, moved, 1)


def expert_elements(shape: GPTConfig, setup: Setup) -> tuple[int, int]:
    """Parameters of the experts of a rank of tp and pp, of all ep; of routers, less their MLPs'."""
    sizes, layers = widths(shape, setup.tp), -(-shape.expert_layers // setup.pp)
    routers = count_elements(block.EXPERTS, {**sizes, "S": 0})
    experts = count_elements(block.EXPERTS, sizes) - routers
    return layers * experts, layers * (routers - count_elements(block.MLP, sizes))


def elements_of(workload: Workload, setup: Setup) -> tuple[int, float]:
    """Of a rank's parameters: those that it has, those whose state it has."""
    experts, instead = expert_elements(workload.shape, setup)
    dense = buckets_of(workload, setup).elements + instead
    local = dense + experts // setup.ep
    return local, (dense + experts) / setup.n_shards if setup.stage else local


# Communication


def comm_ops_of(workload: Workload, setup: Setup) -> tuple[CommOp, ...]:
    """What a rank communicates in one optimizer step."""
    found: list[CommOp] = []
    if setup.data > 1:
        found += _gradients_and_weights(workload, setup)
    if setup.tp_grid is not None:
        found += _along_grid(workload, setup)
    elif setup.tp > 1:
        found += _along_tp(workload, setup)
    if setup.optimizer == "muon":
        found += _to_homes(workload, setup)
    if setup.cp > 1:
        found += _along_cp(workload, setup)
    if setup.pp > 1:
        found += _along_pp(workload, setup)
    if setup.ep > 1:
        found += _along_ep(workload, setup)
    if setup.world_size > 1:
        ends, each = (len([*parameters_of(p)]) for p in (FIRST + LAST, block_parts()))
        words = count_words(ends + each * -(-workload.shape.n_layer // setup.pp))
        total = 8.0 * words * setup.world_size
        found.append(CommOp("all_gather", "control", total, setup.world_size, 1, 1, ""))
    return tuple(comm for comm in found if comm.count and comm.ranks > 1)


def _gradients_and_weights(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Gradients of each kind of bucket while backward runs, weights before they are used."""
    n_micro, stage, shards = setup.grad_accum_steps, setup.stage, setup.n_shards
    tp = setup.tp * setup.rows  # between neighbours, in ranks
    reductions = n_micro if setup.accumulate == "shard" else 1
    reduced = Counter[tuple[int, str]]()
    gathered, again = Counter[tuple[float, str]](), Counter[tuple[float, str]]()  # by bytes
    node = setup.node_size or 1
    buckets = buckets_of(workload, setup)
    experts, instead = expert_elements(workload.shape, setup)
    dense = (buckets.elements + instead) / buckets.elements
    for kind, count in buckets.kinds.items():
        numel, passes = round(kind.padded(shards) * dense), count * (n_micro if stage == 3 else 1)
        reduced[numel, "" if kind.complete_last else "backward"] += reductions * count
        inside = setup.secondary_shards
        sent, kept = float(numel * setup.gathered_bytes(kind.rounded)), numel * setup.weight_bytes
        gathered[sent, "" if kind.root else "forward"] += count if inside else passes
        if inside:
            again[kept, "" if kind.root else "forward"] += passes - count
        if stage == 3 and not (kind.root or kind.last_unit):
            (again if inside else gathered)[kept if inside else sent, "backward"] += passes
    for (numel, under), count in reduced.items():
        n_bytes = float(numel * setup.wire_bytes)
        if stage:
            scatter = "all_to_all" if setup.wire_gradients in FORMATS else "reduce_scatter"
            if node > 1 and scatter == "all_to_all":  # inside of a node, then between nodes
                yield CommOp(scatter, "shard", n_bytes, node, tp, count, under)
                args = n_bytes / node, shards // node, tp * node, count, under
                yield CommOp(scatter, "shard", *args)
                continue
            yield CommOp(scatter, "shard", n_bytes, shards, tp, count, under)
            part, copies = n_bytes / shards, setup.data // shards
            yield from _sums(setup, "copies", part, copies, tp * shards, count, under)
        else:
            yield from _sums(setup, "dp", n_bytes, setup.data, tp, count, under)
    for (n_bytes, under), count in gathered.items() if stage else ():
        yield CommOp("all_gather", "shard", n_bytes, shards, tp, count, under)
    for (n_bytes, under), count in again.items():
        yield CommOp("all_gather", "shard", float(n_bytes), node, tp, count, under)
    if experts:
        yield from _of_experts(setup, experts // setup.ep, reductions)


def _of_experts(setup: Setup, numel: int, reductions: int) -> Iterator[CommOp]:
    """Experts' gradients and weights, over the ranks that have the same ones."""
    stage, stride, ranks = setup.stage, setup.tp * setup.ep, setup.data // setup.ep
    many = max(1, round(numel * setup.wire_bytes / (bucket_mb_of(setup) * 2**20)))
    n_bytes = float(numel * setup.wire_bytes) / many
    shards = max(1, setup.n_shards // setup.ep)
    if stage == 0:
        yield CommOp("all_reduce", "dp", n_bytes, ranks, stride, reductions * many, "backward")
        return
    yield CommOp("reduce_scatter", "shard", n_bytes, shards, stride, reductions * many, "backward")
    part, copies = n_bytes / shards, ranks // shards
    yield CommOp("all_reduce", "copies", part, copies, stride * shards, many, "backward")
    weights = n_bytes / setup.wire_bytes * setup.weight_bytes
    for under in ("forward", "backward") if stage == 3 else ("forward",):
        passes = many * (setup.grad_accum_steps if stage == 3 else 1)
        yield CommOp("all_gather", "shard", weights, shards, stride, passes, under)


def _sums(setup: Setup, axis: str, *of: Any) -> Iterator[CommOp]:
    """An all-reduce of gradients; compressed, its two halves."""
    compressed = setup.wire_gradients in FORMATS
    for kind in ("all_to_all", "all_gather") if compressed else ("all_reduce",):
        yield CommOp(kind, axis, *of)


def _codes(local: int, coded: float, setup: Setup) -> Iterator[Op]:
    """Messages of gradients and weights made and read; see comm/wires.py."""
    micro = setup.grad_accum_steps
    gradients, weights = (float(local * b) for b in setup.code_bytes)
    weights *= coded
    ways = 2 if setup.stage == 0 else 1
    if gradients and setup.data > 1:
        times = ways * (micro if setup.accumulate == "shard" else 1)
        yield Op("copy", (int(gradients),), "backward", 0.0, gradients, times)
    if weights and setup.n_shards > 1:
        times = 2 * micro if setup.stage == 3 else 1
        yield Op("copy", (int(weights),), "forward", 0.0, weights, times)


def _to_homes(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Muon's matrices to their homes and back: of the rank that sends most."""
    matrices = updates_of(workload.shape, buckets_of(workload, setup), setup)
    item, along = product_bytes(setup), "shard" if setup.stage else "dp"
    for axis, ranks, stride, sent, count in (
        (along, matrices.n_dp, setup.tp, max(s.dp for s in matrices.sent), matrices.messages.dp),
        ("tp", setup.tp, 1, max(s.tp for s in matrices.sent), matrices.messages.tp),
    ):
        if count:
            n_bytes = float(item * sent) * ranks / (ranks - 1) / count
            yield CommOp("all_to_all", axis, n_bytes, ranks, stride, count, "update")


def _along_tp(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """The exchanges of axes/tensor/functional.py and axes/tensor/vocabulary.py."""
    shape, t, n_micro = workload.shape, setup.tp, setup.grad_accum_steps
    n, width = setup.tokens_of_rank(workload), shape.n_embd
    whole = float(n * width * setup.weight_bytes)
    layers = -(-shape.n_layer // setup.pp)
    passes = n_micro * layers
    forwards = 2 if setup.activation_checkpointing == "full" else 1
    embeds, split = n_micro if setup.pp == 1 else 0, split_products()
    columns = sum(by_columns for _, by_columns in split)
    row_layers = len(split) - columns

    def comm(kind: str, count: int, under: str = "", n_bytes: float = whole) -> CommOp:
        return CommOp(kind, "tp", n_bytes, t, 1, count, under)

    if setup.sequence_parallel:
        # Of a layer's backward only what enters its column layers has a product beside it.
        yield comm("all_gather", passes * (columns * forwards + row_layers) + embeds + n_micro)
        yield comm("reduce_scatter", row_layers * passes * forwards + embeds + n_micro)
        yield comm("all_gather", columns * passes, "backward")
        yield comm("reduce_scatter", columns * passes, "backward")
        # Partial sums of parameters that tokens share: positions, norms, biases of row layers.
        ends, sizes = LAST + (FIRST if setup.pp == 1 else ()), widths(shape, t)
        partial = layers * count_elements(block_parts(), sizes, whole=True)
        partial += count_elements(ends, sizes, whole=True)
        mine = float(partial * setup.grad_bytes) / setup.n_shards
        yield comm("all_reduce", n_micro if setup.zero_stage == 0 else 1, "", mine)
    else:
        yield comm("all_reduce", row_layers * passes * forwards + embeds + n_micro)
        yield comm("all_reduce", columns * passes, "backward")
    rows = default_chunk_rows(n, width, vocabulary_rows(shape, t), setup.device_type)
    chunks = -(-n // rows)
    yield comm("all_gather", n_micro * chunks, "", 12.0 * n * t / chunks)


def _along_grid(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Of one optimizer step: activations along the row, weights along the column."""
    shape, c, r, n_micro = workload.shape, setup.tp, setup.rows, setup.grad_accum_steps
    n, width, item = setup.tokens_of_rank(workload), shape.n_embd, setup.weight_bytes
    layers, full = shape.n_layer, setup.activation_checkpointing == "full"
    passes, forwards = n_micro * layers, 2 if full else 1
    parts, sizes, split = block_parts(), widths(shape, c), split_products()
    columns, steps = sum(by_columns for _, by_columns in split), 2 * n_micro
    wide = 8.0 if item == 8 else 4.0

    def row(kind: str, count: int, n_bytes: float = float(n * width * item)) -> CommOp:
        return CommOp(kind, "tp", n_bytes, c, 1, count, "")

    def column(kind: str, count: int, n_bytes: float) -> CommOp:
        return CommOp(kind, "tp", float(n_bytes), r, c, count, "")

    # Forward, dy of row layers, x of column layers once more; embedding and head.
    yield row("all_gather", passes * (len(split) + columns * forwards) + steps)
    yield row(
        "reduce_scatter", passes * ((len(split) - columns) * forwards + columns) + 2 * n_micro
    )
    norms = forwards + 1 + (setup.activation_checkpointing == "selective")
    many = sum(part.op == "layer_norm" for part in parts)
    yield row("all_gather", many * passes * norms + 2 * n_micro, 2 * wide * n * c)
    chunks = -(-n // default_chunk_rows(n, width, sizes["V"], setup.device_type))
    yield row("all_gather", n_micro * chunks, 3 * wide * n * c / chunks)
    for letter, many in Counter(letter for letter, _ in split).items():
        yield column("all_gather", many * passes * (forwards + 1), sizes[letter] * width * item)
        yield column("reduce_scatter", many * passes, sizes[letter] * width * item)
    table = sizes["V"] * width * item
    yield column("all_gather", 2 * n_micro, table)
    yield column("reduce_scatter", 2 * n_micro, table)
    # Positions, norms and biases, whose gradients the rows have parts of.
    vectors, ends, (positions,) = (
        [math.prod(s) for s in shapes_of(some, shape, c, r) if len(s) == n]
        for some, n in ((parts, 1), (LAST, 1), (FIRST[1:], 2))
    )
    partial = positions + sum(ends) + layers * sum(vectors)
    mine = partial * setup.grad_bytes / setup.n_shards
    yield column("all_reduce", n_micro if setup.stage == 0 else 1, mine)
    yield CommOp("all_reduce", "tp", wide, r * setup.depth, c, n_micro, "")  # the loss


def _along_cp(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """The exchanges of context/, before and after attention or in it; a loss's sum."""
    shape, n_micro, c = workload.shape, setup.grad_accum_steps, setup.cp
    of_head = setup.tokens_of_rank(workload) * shape.head_dim * setup.weight_bytes
    mine = float(of_head * setup.attended_heads(shape))
    layers = n_micro * -(-shape.n_layer // setup.pp)
    if setup.by_keys:  # keys and values of all tokens, of some heads at a time; their gradients
        heads, at_once = shape.heads_of_rank(setup.tp), -(-shape.heads_of_rank(setup.tp) // c)
        again = setup.activation_checkpointing == "full"
        for some, times in Counter(
            min(at_once, heads - h) for h in range(0, heads, at_once)
        ).items():
            both = 2.0 * of_head * some * c
            gathers = times * layers * (3 if again else 2)
            yield CommOp("all_gather", "cp", both, c, setup.tp, gathers, "")
            yield CommOp("all_to_all", "cp", both, c, setup.tp, times * layers, "")
    else:
        passes = layers * (2 if setup.activation_checkpointing == "none" else 3)
        yield CommOp("all_to_all", "cp", 3 * mine, c, setup.tp, passes, "")
        yield CommOp("all_to_all", "cp", mine, c, setup.tp, passes, "")
    wide = 8.0 if setup.weight_bytes == 8 else 4.0
    yield CommOp("all_reduce", "cp", wide, c, setup.tp, n_micro, "")


def _along_pp(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """A stage's output forward, its gradient back; the sum of both copies of the table."""
    tokens, width = setup.tokens_of_rank(workload), workload.shape.n_embd
    stride, t = setup.tp * setup.data, setup.tp
    n_bytes = float(tokens * width * setup.weight_bytes) / t
    count = 2 * setup.grad_accum_steps * setup.chunks
    yield CommOp("send", "pp", n_bytes, setup.pp, stride, count, "schedule")
    if setup.schedule == "zb-v":  # rank 0 has the first and the last stage
        return
    table = float(vocabulary_rows(workload.shape, t) * width * setup.wire_bytes)
    yield CommOp("all_reduce", "pp", table, 2, stride * (setup.pp - 1), 1, "")


def _along_ep(workload: Workload, setup: Setup) -> Iterator[CommOp]:
    """Rows to their experts and back, in forward and in backward, and their numbers."""
    shape, n_micro = workload.shape, setup.grad_accum_steps
    rows = setup.tokens_of_rank(workload) * shape.top_k
    n_bytes = float(rows * shape.n_embd * setup.weight_bytes)
    layers = n_micro * shape.expert_layers / setup.pp
    forwards = 2 if setup.activation_checkpointing == "full" else 1
    yield CommOp("all_to_all", "ep", n_bytes, setup.ep, setup.tp, 2 * (forwards + 1) * layers, "")
    counts = 8.0 * shape.n_expert
    yield CommOp("all_to_all", "ep", counts, setup.ep, setup.tp, forwards * layers, "")
