"""What a step is made of, without saying how long it takes: operations and exchanges of one rank.

Op and Send are the words between those who count (here), those who know a machine (Rates) and those
who add up (step_time.py). Counted is what fastpar's own ops and engine do, of the rank that has
most to do: of pipeline stages the last one, which has the loss.

Shape legend as in model.py; N is the tokens of a micro-batch, t is tp. Under sequence parallelism
norms see N/t of them.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from fastpar.config.config import VOCAB_MULTIPLE, GPTConfig
from fastpar.cost.workload import Job, Setup
from fastpar.kernels.global_norm import NORM_WORDS
from fastpar.kernels.linear_cross_entropy import default_chunk_rows
from fastpar.sharding.layout import ALIGN, ParamSpec, build_layout, default_bucket_mb

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
FIRST_BUCKET_BYTES = 2**20  # parallelize()'s default
_ROOT = 0  # unit of what is in no block
_CONTROL_WORDS = 5 + NORM_WORDS  # see control.py
_BITS = 62


class Op(NamedTuple):
    """One kind of operation of a rank, `count` times in a step.

    name, shape (per rank):
        matmul         (M, K, N): x[M, K] @ w[N, K].T; backward is both products, dx and dw
        attention      (B, H, T, D), causal
        layer_norm     (N, C): residual_layer_norm
        bias_gelu      (N, F)
        embedding      (N, C)
        loss           (N, C, V): linear_cross_entropy, whose forward computes the gradients too;
                       backward scales them
        optimizer      (elements,): norm and update of so many elements
        copy           (bytes,): read and written, of gradients into buckets
    direction: "forward" or "backward" ("forward" for optimizer, "backward" for copy), and
        "recompute": what forward does, done again in backward.
    flops, bytes: of one of them; what must move through memory at least.
    """

    name: str
    shape: tuple[int, ...]
    direction: str
    flops: float
    bytes: float
    count: float  # type: ignore[assignment]  # hides tuple.count

    @property
    def key(self) -> tuple[str, tuple[int, ...], str]:
        """What decides how long it takes: recomputing takes as long as forward."""
        return self.name, self.shape, self.direction.replace("recompute", "forward")


class Send(NamedTuple):
    """One kind of exchange of a rank, `count` times in a step.

    kind: all_reduce, reduce_scatter, all_gather, broadcast or send.
    axis: "dp", "shard", "copies" (of shards), "tp", "pp" or "control".
    bytes: of the whole tensor (of all_gather: gathered; of reduce_scatter: before it).
    ranks: of the group; stride: distance of neighbours in the group, in global ranks.
    under: what can hide it: "forward", "backward" or "" (nothing: the rank waits). Along tp the
        product beside it, else the pass of the micro-batches that send.
    """

    kind: str
    axis: str
    bytes: float
    ranks: int
    stride: int
    count: float  # type: ignore[assignment]  # hides tuple.count
    under: str


class Rates(Protocol):
    """What a machine does: datasheet.py from data sheets, measured.py from this machine."""

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation."""

    def send_s(self, send: Send) -> float:
        """Seconds of one such exchange."""

    def overhead_s(self, job: Job, setup: Setup) -> float:
        """Seconds of a step that no Op and no Send stands for: Python, hooks, data; 0: not known.

        step_time.predict_step adds it to the step as one of its parts.
        """

    @property
    def peak_flops(self) -> float | None:
        """Of a rank at the format of the weights: what MFU is a fraction of; None: not known."""

    @property
    def overlap(self) -> float:
        """Fraction of the compute time under which an exchange hides; 0: ranks' cores do both."""


# Operations


def ops_of(job: Job, setup: Setup) -> tuple[Op, ...]:
    """What a rank computes in one optimizer step."""
    return passes_of(job, setup) + updates_of(job, setup)


def passes_of(job: Job, setup: Setup) -> tuple[Op, ...]:
    """Forward and backward: the part of ops_of() that is the same for the same pass_key()."""
    return _passes(job.shape, pass_key(setup))


def pass_key(setup: Setup) -> tuple[Any, ...]:
    """What the operations on activations depend on, besides the shape."""
    return (
        setup.micro_batch_size,
        setup.grad_accum_steps,
        setup.tp,
        setup.pp,
        setup.sequence_parallel and setup.tp > 1,
        setup.activation_checkpointing,
        setup.weight_bytes,
        setup.device_type,
    )


@functools.lru_cache(4096)
def _passes(shape: GPTConfig, key: tuple[Any, ...]) -> tuple[Op, ...]:
    micro, n_micro, t, pp, sequence_parallel, mode, item, device = key
    width, seq_len = shape.n_embd, shape.block_size
    rows = micro * seq_len
    mine = -(-rows // t) if sequence_parallel else rows
    layers = n_micro * -(-shape.n_layer // pp)
    vocab = _vocab_rows(shape, t)
    products = [
        _matmul(rows, width, 3 * width // t, item),
        _matmul(rows, width // t, width, item),
        _matmul(rows, width, 4 * width // t, item),
        _matmul(rows, 4 * width // t, width, item),
    ]
    norms = _pair("layer_norm", (mine, width), 8.0, (4, 4), item)
    cheap = [(norms, 2), (_pair("bias_gelu", (rows, 4 * width // t), 15.0, (2, 3), item), 1)]
    heads = max(1, shape.n_head // t)
    kept = [(pair, 1) for pair in [_attention(micro, heads, seq_len, shape.head_dim, item)]]
    kept += [(pair, 1) for pair in products]
    again = {"none": [], "selective": cheap, "full": cheap + kept}[mode]
    ops = [op._replace(count=layers * n) for pair, n in cheap + kept for op in pair]
    ops += [pair[0]._replace(direction="recompute", count=layers * n) for pair, n in again]
    ops += [op._replace(count=n_micro) for op in (*norms, *_loss(rows, width, vocab, item, device))]
    if pp == 1:
        table = float(vocab * width * item)  # of whose gradient most rows are zeros
        shape_of = (rows, width)
        moved = 3.0 * rows * width * item
        ops.append(Op("embedding", shape_of, "forward", 0.0, moved, n_micro))
        ops.append(Op("embedding", shape_of, "backward", 0.0, moved + table, n_micro))
    return tuple(ops)


def _pair(
    name: str, shape: tuple[int, int], flops: float, passes: tuple[int, int], item: int
) -> tuple[Op, Op]:
    """Forward and backward of an op that reads and writes tensors of one size, so many each."""
    n = math.prod(shape)
    forward, backward = (float(n * item * k) for k in passes)
    return (
        Op(name, shape, "forward", flops * n, forward, 1),
        Op(name, shape, "backward", 2 * flops * n, backward, 1),
    )


def _matmul(m: int, k: int, n: int, item: int) -> tuple[Op, Op]:
    moved, flops = float(item * (m * k + n * k + m * n)), 2.0 * m * k * n
    return (
        Op("matmul", (m, k, n), "forward", flops, moved, 1),
        Op("matmul", (m, k, n), "backward", 2 * flops, 2 * moved, 1),
    )


def _attention(batch: int, heads: int, time: int, dim: int, item: int) -> tuple[Op, Op]:
    """Two products forward and five backward, half of the scores each: causal."""
    shape, flops = (batch, heads, time, dim), 2.0 * batch * heads * time * time * dim
    tensor = float(batch * heads * time * dim * item)  # q, k, v, o; and their gradients
    return (
        Op("attention", shape, "forward", flops, 4 * tensor, 1),
        Op("attention", shape, "backward", 2.5 * flops, 8 * tensor, 1),
    )


def _loss(n: int, width: int, vocab: int, item: int, device: str) -> tuple[Op, Op]:
    """Forward: three products, and five times through the logits; see linear_cross_entropy.py."""
    chunks = max(1, -(-n // default_chunk_rows(n, width, vocab, device)))
    logits, weight = float(n * vocab), float(vocab * width)
    moved = item * (5 * logits + 3 * n * width) + chunks * weight * (2 * item + 2 * 4)
    shape = (n, width, vocab)
    scaled = 2.0 * n * width * item + weight * (4 + item)
    return (
        Op("loss", shape, "forward", 6.0 * n * width * vocab, moved, 1),
        Op("loss", shape, "backward", n * width + weight, scaled, 1),
    )


def updates_of(job: Job, setup: Setup) -> tuple[Op, ...]:
    """The rest of ops_of(): gradients into their buckets, the update of this rank's elements."""
    local, n_micro = local_parameters(job.shape, setup), setup.grad_accum_steps
    taken = local * (setup.weight_bytes + setup.grad_bytes)
    ops = [Op("copy", (taken,), "backward", 0.0, float(taken), 1)]
    if n_micro > 1:
        more = local * (setup.weight_bytes + 2 * setup.grad_bytes)
        n_first = 1 if setup.accumulate == "full" else n_micro
        ops = [ops[0]._replace(count=n_first)]
        if n_first < n_micro:
            ops.append(Op("copy", (more,), "backward", 0.0, float(more), n_micro - n_first))
    mine = -(-local // setup.n_shards)
    of_element = 2 * setup.grad_bytes + 2 * setup.weight_bytes + 2 * setup.state_bytes
    ops.append(Op("optimizer", (mine,), "forward", 15.0 * mine, mine * of_element, 1))
    return tuple(ops)


# Parameters and buckets


def _vocab_rows(shape: GPTConfig, tp: int) -> int:
    """Of the table on one rank, see Shard's pad_to."""
    return -(-shape.padded_vocab_size // (tp * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE


def _block_shapes(width: int, tp: int) -> list[tuple[int, ...]]:
    """Of a block's parameters on one rank, in registration order."""
    q, f = 3 * width // tp, 4 * width // tp
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention: list[tuple[int, ...]] = [(q, width), (q,), (width, width // tp), (width,)]
    mlp: list[tuple[int, ...]] = [(f, width), (f,), (width, f), (width,)]
    return [*norm, *attention, *norm, *mlp]


@functools.lru_cache(256)
def _n_local(shape: GPTConfig, tp: int, pp: int) -> int:
    width = shape.n_embd
    block = sum(math.prod(s) for s in _block_shapes(width, tp))
    root = _vocab_rows(shape, tp) * width + 2 * width
    root += shape.block_size * width if pp == 1 else 0
    return root + -(-shape.n_layer // pp) * block


def local_parameters(shape: GPTConfig, setup: Setup) -> int:
    """Elements of the parameters that a rank has a part of along tp and pp, before ZeRO."""
    return _n_local(shape, setup.tp, setup.pp)


class Place(NamedTuple):
    """Buckets alike: elements without padding, how many; those of two units stay at stage 3."""

    used: int
    count: int  # type: ignore[assignment]
    root: bool
    last_unit: bool


class Places(NamedTuple):
    """Buckets in launch order."""

    buckets: tuple[Place, ...]
    align: int

    def numel(self, place: Place) -> int:
        """Elements with padding."""
        return -(-place.used // self.align) * self.align


def places_of(job: Job, setup: Setup) -> Places:
    """The buckets that parallelize() would make."""
    dp, sharded = setup.dp, setup.n_shards > 1
    cap = setup.bucket_mb or default_bucket_mb(dp, setup.transport if dp > 1 else "none")
    found = _places(job.shape, setup.tp, setup.pp, sharded, cap, setup.dtype, setup.grad_dtype)
    return Places(found, ALIGN * setup.n_shards)


@functools.lru_cache(1024)
def _places(
    shape: GPTConfig,
    tp: int,
    pp: int,
    sharded: bool,
    bucket_mb: float,
    dtype: str,
    grad_dtype: str,
) -> tuple[Place, ...]:
    kind, wide, width = DTYPES[dtype], DTYPES[grad_dtype], shape.n_embd
    block = _block_shapes(width, tp)
    block_bytes = sum(math.prod(s) for s in block) * kind.itemsize
    together = max(1, FIRST_BUCKET_BYTES // block_bytes)
    layers = -(-shape.n_layer // pp)
    # All units between the first and the last two are alike: few are laid out, one counts often.
    more = max(0, -(-layers // together) - 6) if sharded else 0
    shapes: list[tuple[int, ...]] = [(_vocab_rows(shape, tp), width)]
    if pp == 1:
        shapes.append((shape.block_size, width))
    units = [_ROOT] * len(shapes)
    for layer in range(layers - more * together):
        shapes += block
        units += [1 + layer // together] * len(block)
    shapes += [(width,), (width,)]
    units += [_ROOT] * 2
    layout = build_layout(
        [ParamSpec(("",), s, kind) for s in shapes],
        bucket_bytes=bucket_mb * 2**20,
        first_bucket_bytes=FIRST_BUCKET_BYTES,
        grad_dtype=wide,
        unit_of=units if sharded else None,
        flags=not sharded,
    )
    last, places = max(units), []
    for bucket in layout.buckets:
        used = bucket.used_start + (0 if sharded else len(bucket.slots))
        count = 1 + more if bucket.unit == 3 else 1
        places.append(Place(used, count, bucket.unit == _ROOT, bucket.unit == last))
    return tuple(places)


# Exchanges


def sends_of(job: Job, setup: Setup) -> tuple[Send, ...]:
    """What a rank exchanges in one optimizer step, as describe.wire_bytes() adds it up and more."""
    sends: list[Send] = []
    if setup.dp > 1:
        sends += _of_gradients(job, setup)
    if setup.tp > 1:
        sends += _along_tp(job, setup)
    if setup.pp > 1:
        sends += _along_pp(job, setup)
    if setup.world_size > 1:
        n_params = 4 + 12 * -(-job.shape.n_layer // setup.pp)
        words = _CONTROL_WORDS + -(-n_params // _BITS)
        total = 8.0 * words * setup.world_size
        sends.append(Send("all_gather", "control", total, setup.world_size, 1, 1, ""))
    return tuple(send for send in sends if send.count and send.ranks > 1)


def _of_gradients(job: Job, setup: Setup) -> Iterator[Send]:
    """Of buckets: gradients while backward runs, parameters before they are used."""
    places, n_micro = places_of(job, setup), setup.grad_accum_steps
    reductions = n_micro if setup.accumulate == "shard" else 1
    stage = setup.zero_stage if setup.n_shards > 1 else 0
    copies = setup.dp // setup.n_shards
    reduced, last = Counter[tuple[int, str]](), len(places.buckets) - 1
    for index, place in enumerate(places.buckets):
        under = "" if index == last else "backward"  # the last one is complete when backward ends
        reduced[places.numel(place), under] += reductions * place.count
    for (numel, under), count in reduced.items():
        n_bytes = float(numel * setup.wire_bytes)
        if stage == 0:
            yield Send("all_reduce", "dp", n_bytes, setup.dp, setup.tp, count, under)
            continue
        yield Send("reduce_scatter", "shard", n_bytes, setup.n_shards, setup.tp, count, under)
        stride, shard = setup.tp * setup.n_shards, n_bytes / setup.n_shards
        yield Send("all_reduce", "copies", shard, copies, stride, count, under)
    if stage:
        for (numel, under), count in _gathers(places, stage, n_micro).items():
            n_bytes = float(numel * setup.weight_bytes)
            yield Send("all_gather", "shard", n_bytes, setup.n_shards, setup.tp, count, under)


def _gathers(places: Places, stage: int, n_micro: int) -> Counter[tuple[int, str]]:
    """(elements, under) of buckets that are gathered, how often; the first one hides nowhere."""
    found = Counter[tuple[int, str]]()
    for place in places.buckets:
        first = "" if place.root else "forward"
        numel, times = places.numel(place), place.count * (n_micro if stage == 3 else 1)
        found[numel, first] += times
        if stage == 3 and not (place.root or place.last_unit):
            found[numel, "backward"] += times
    return found


def _along_tp(job: Job, setup: Setup) -> Iterator[Send]:
    """See tensor_parallel.py and vocab_parallel.py."""
    shape, t, n_micro = job.shape, setup.tp, setup.grad_accum_steps
    n, width = setup.micro_batch_size * job.seq_len, shape.n_embd
    whole = float(n * width * setup.weight_bytes)
    layers = n_micro * -(-shape.n_layer // setup.pp)
    forwards = 2 if setup.activation_checkpointing == "full" else 1
    embeds = n_micro if setup.pp == 1 else 0

    def send(kind: str, count: int, under: str = "", n_bytes: float = whole) -> Send:
        return Send(kind, "tp", n_bytes, t, 1, count, under)

    if setup.sequence_parallel:
        # Of a layer's backward only what enters its column layers has a product beside it.
        yield send("all_gather", 2 * layers * (forwards + 1) + embeds + n_micro)
        yield send("reduce_scatter", 2 * layers * forwards + embeds + n_micro)
        yield send("all_gather", 2 * layers, "backward")
        yield send("reduce_scatter", 2 * layers, "backward")
        partial = _partial_elements(job, setup)
        times = n_micro if setup.zero_stage == 0 else 1
        mine = float(partial * setup.grad_bytes) / setup.n_shards
        yield send("all_reduce", times, "", mine)
    else:
        yield send("all_reduce", 2 * layers * forwards + embeds + n_micro)
        yield send("all_reduce", 2 * layers, "backward")
    rows = default_chunk_rows(n, width, _vocab_rows(shape, t), setup.device_type)
    chunks = -(-n // rows)
    yield send("all_gather", n_micro * chunks, "", 12.0 * n * t / chunks)


def _partial_elements(job: Job, setup: Setup) -> int:
    """Of parameters that tokens share: positions, norms, biases of row layers."""
    layers, width = -(-job.shape.n_layer // setup.pp), job.shape.n_embd
    return (6 * layers + 2 + (job.seq_len if setup.pp == 1 else 0)) * width


def _along_pp(job: Job, setup: Setup) -> Iterator[Send]:
    """On paper: a stage's output forward, its gradient back; and the two copies of the table."""
    tokens, width = setup.micro_batch_size * job.seq_len, job.shape.n_embd
    stride, t = setup.tp * setup.dp, setup.tp
    n_bytes = float(tokens * width * setup.weight_bytes) / t
    count = 2 * setup.grad_accum_steps * setup.pp_interleave
    yield Send("send", "pp", n_bytes, setup.pp, stride, count, "")
    table = float(_vocab_rows(job.shape, t) * width * setup.wire_bytes)
    yield Send("all_reduce", "pp", table, 2, stride * (setup.pp - 1), 1, "")
