"""The peak memory of a training step, predicted for the fullest rank.

The prediction is arithmetic; nothing runs. A step's memory is what stays (parameters, gradients,
the optimizer's state), and what is temporary: a fold over the table of parts, from the loss back to
the embedding, adds what an op's backward needs, frees what forward kept for it, and lets the
gradients of its parameters arrive in their buckets. The largest sum on the way is the peak, or the
optimizer's own temporary memory. It is within 5 % of nine in ten measured steps, and never more
than 10 % too low (tests/predict/test_memory_model.py).

On a GPU a chunk's logits are freed, and attention keeps one number per row instead of two. Not
predicted: what StepMemory (measure.py) does not measure either, such as transports' own buffers,
the random state of recomputed blocks, and oneDNN's packed operands of 16-bit products on a CPU.

[Note: units] own: the features of this rank's tokens between blocks, [N, C] ([N/tp, C] under
sequence parallelism); whole: of all tokens. All in bytes of the weights' format. What a block keeps
of them is in settings/model.py; under "selective" recomputation it is its inputs and the outputs of
products and attention, under "full" its inputs: x and delta (the first block has no delta).

[Note: a pipeline's rank] keeps what its schedule holds: of each micro-batch and chunk the blocks'
activations, what was received and what was sent, and on the last stage the gradient of the head's
input, the norm's output and dweight; also the gradient that the running backward was given, and the
message that is received ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fastpar.axes import every
from fastpar.axes.context import attended_heads
from fastpar.axes.data import GPTBuckets, buckets_of
from fastpar.axes.offload import going_down
from fastpar.axes.pipeline import RankParts, parts_of
from fastpar.axes.pipeline.schedules import Held, held_of
from fastpar.axes.step import Setup, Workload
from fastpar.axes.wires import message_bytes
from fastpar.engine.gradients import IN_FLIGHT as IN_REDUCTION
from fastpar.kernels.backend import has_bf16_gemm
from fastpar.kernels.linear import WIDE_ROWS
from fastpar.kernels.linear.fp8 import BLOCK
from fastpar.kernels.loss.linear_cross_entropy import default_chunk_rows
from fastpar.kernels.orthogonalize import TOGETHER
from fastpar.optim.adafactor import BATCH
from fastpar.predict.time import matrices_of, product_bytes
from fastpar.settings.model import (
    GPTConfig,
    Part,
    block_parts,
    computed_qkv,
    products,
    shapes_of,
    widths,
)

# cuBLAS's workspace on Hopper, from torch's allocator (a quarter on older GPUs): one each for the
# threads of forward and of backward.
_CUBLAS = 2 * 32 * 2**20
_MOMENT_BLOCK = 256  # 8-bit moments have an fp32 scale per block of this size


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at the peak of a step, by kind.

    Attributes:
        activations: what forward keeps, and the gradients passed between ops of backward.
        loss: logits, dx and dweight of the head, and the head's gradient until it is used.
        buckets: full gradients in flight, gathered parameters, copies in the wire format, one
            weight's gradient, on a GPU also cuBLAS's workspace.
        update: temporary memory of the optimizer.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    loss: int = 0
    buckets: int = 0
    update: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {format_bytes(size)}" for name, size in vars(self).items() if size
        )
        return f"{format_bytes(self.total)} ({parts})"


def format_bytes(size: float) -> str:
    """A size in GB, or in MB below a tenth of one."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def predict_states(workload: Workload, setup: Setup, parts: RankParts | None = None) -> Memory:
    """What certainly stays between steps; no activations, nothing in flight; see buckets_of()."""
    return states_of(workload.shape, setup, buckets_of(workload, setup, parts))


def states_of(shape: GPTConfig | None, setup: Setup, buckets: GPTBuckets) -> Memory:
    """predict_states() of a rank with these buckets; shape: of a GPT, for Muon."""
    n = setup.n_shards if setup.stage else 1
    # Padding has no state. A rank can have slightly more than its share of the state.
    elements = buckets.share(n)
    state = setup.state_bytes * elements
    if setup.optim.optimizer == "adamw" and setup.optim.moment_dtype == "int8":
        state += 2 * 4 / _MOMENT_BLOCK * elements
    if setup.optim.optimizer == "adafactor":  # means of rows and columns
        state += 4 * sum(map(sum, buckets.matrices)) * elements / buckets.elements
    if setup.optim.optimizer == "muon":  # one momentum, not two moments
        assert shape is not None
        for matrices in matrices_of(shape, buckets, setup):
            state -= 4 * matrices.held
    sizes: dict[str, float] = {"optimizer": state}
    for axis in every():
        axis.states(setup, buckets, sizes)
    return Memory(**{name: round(size) for name, size in sizes.items()})


def _adafactor_scratch(setup: Setup, buckets: GPTBuckets) -> float:
    """The most memory that a batch of matrices needs; see adafactor.py, "Batches"."""
    each, rounded = 4, 0  # bytes of an element of the batch, and of its largest matrix
    if setup.dtype == "bf16" and setup.master_weights != "none":
        each, rounded = (8, 8) if setup.master_weights == "remainder" else (4, 6)
    sizes = [math.prod(shape) for shape in buckets.matrices]
    return float(each * max(*sizes, min(sum(sizes), BATCH)) + rounded * max(sizes))


# The table of a rank


class Step(NamedTuple):
    """The backward of a block's op, in bytes.

    Attributes:
        frees: what forward kept for it; needs: gradients and buffers while it runs.
        numel: elements of its parameters, whose gradients it makes.
    """

    frees: float
    needs: float
    numel: int


class Block(NamedTuple):
    """A block on a rank, for one micro-batch, in bytes.

    Attributes:
        kept: from forward to backward; again: computed again when backward begins with it.
        steps: in the order of forward.
        last: the end of that second forward: its last output, which is discarded.
    """

    kept: float
    again: float
    steps: tuple[Step, ...]
    last: float


class Table:
    """What a rank has of a GPT for one micro-batch, in bytes; see [Note: units].

    Attributes:
        blocks: of each kind.
        batch: inputs and targets. residual: gradients between blocks.
        table: shape of the embedding; tied: whether it is the head too.
        standing: memory that the loss keeps between calls. of_loss: activations besides those of
            blocks, and the loss' memory, when it is computed.
    """

    standing = 0
    of_loss: tuple[float, float]

    def __init__(self, workload: Workload, setup: Setup) -> None:
        shape, tp, grid = workload.shape, setup.tp, setup.mesh.tp_grid is not None
        self.shape, self.setup, self.tied = shape, setup, shape.tied
        on_gpu, item = setup.device_type == "cuda", setup.weight_bytes
        n = self.n = setup.tokens_of_rank(workload)
        split = self.split = grid or (tp > 1 and setup.sequence_parallel)
        self.whole = n * shape.n_embd * item
        self.own = self.whole / tp if split else self.whole
        attended, heads = attended_heads(shape, setup), shape.heads_of_rank(tp)
        choices, statistics = n * shape.top_k, 8 * (n / tp if split and not grid else n)
        of_heads, row = n * heads * shape.head_size * item, choices * item
        self.sizes = {
            **{"C": self.own, "A": of_heads},
            "QKV": n * computed_qkv(shape, tp) * item,
            **{"F": n * shape.inner * item / tp, "2F": 2 * n * shape.inner * item / tp, "D": 0.0},
            **{"stats": statistics, "lse": (4 if on_gpu else 8) * n * attended},
            **{"X": 4 * n * shape.n_embd, "E": 4 * n * shape.n_expert, "choices": 20 * choices},
            **{"H": row * shape.hidden / tp, "2H": 2 * row * shape.hidden / tp},
            "R": row * shape.n_embd,
        }
        self.letters = widths(shape, tp, setup.mesh.ep)
        rows = self.letters["V"]
        self.table = rows, shape.n_embd
        # A grid's rank has all of it.
        self.batch = 16.0 * n * setup.mesh.cp * setup.rows * setup.depth
        self.residual = self.own * (2 if shape.dropout else 1)  # of x and delta
        chunk = min(n, default_chunk_rows(n, shape.n_embd, rows, setup.device_type))
        workspace = item * rows * chunk
        self.standing = 0 if on_gpu else workspace
        dweight = rows * shape.n_embd * (4 + item * (setup.rows > 1))
        if item == 2 and not on_gpu and not has_bf16_gemm:  # see wide_product()
            dweight += 4 * chunk * (min(rows, WIDE_ROWS) + shape.n_embd)
        loss = workspace + self.whole * (1 + split) + 4 * n + dweight
        self.of_loss = 2 * self.own + statistics, loss
        dense = self._block(experts=False)
        sparse = self._block(experts=True) if shape.n_expert else dense
        self.blocks: Sequence[Block] = (dense, sparse)

    def _keeps(self, part: Part) -> float:
        system = self.setup.flags.system
        if part.keeps and part.name in products(system.fp8):  # 8-bit codes, and their scales
            k = self.letters[part.into]
            scales = {"row": 1, "block": -(-k // BLOCK), "tensor": 0}[system.fp8_scaling]
            return self.n * (k + 4 * scales)
        return sum(self.sizes[letter] for letter in part.keeps)

    def _needs(self, part: Part) -> float:
        """Gradients of output and input; where tokens are split, a product gathers both."""
        into, out = self.sizes.get(part.into, 0.0), self.sizes[part.out]
        if part.op != "matmul":
            return into + out
        if not self.split:
            return into + out * (part.out != "C")  # which is the residual's
        into = 2 * self.whole if part.into == "C" else into  # also what is gathered again
        return into + (self.whole if part.out == "C" else out)

    def _numel(self, part: Part) -> int:
        s = self.setup
        rows = s.rows * (s.mesh.tp_grid is not None)
        shapes = shapes_of([part], self.shape, s.tp, rows, s.mesh.ep)
        return sum(map(math.prod, shapes))

    def _block(self, *, experts: bool) -> Block:
        parts, sizes = block_parts(self.shape, experts=experts), self.sizes
        mode = self.setup.recompute.activation_checkpointing
        steps = [Step(self._keeps(p), self._needs(p), self._numel(p)) for p in parts]
        everything, rows = sum(step.frees for step in steps), sizes["R"] * experts
        if mode == "none":
            return Block(everything, 0.0, tuple(steps), 0.0)
        travel = self.setup.mesh.ep > 1
        if mode == "full":
            last = self.own * (1 + self.split) + self.whole + rows * (1 + travel)
            return Block(2 * self.own, everything, tuple(steps), last)
        norms = sum(p.op in ("layer_norm", "rms_norm") for p in parts)
        again = sum(sizes[p.out] for p in parts[:-1] if p.cheap) + norms * self.own
        kept = 2 * self.own + sizes["lse"] + 2 * rows * travel
        kept += sum(sizes[p.out] for p in parts[:-1] if not p.cheap)
        return Block(kept, again, tuple(steps), 0.0)


# The fold


def arriving(setup: Setup, buckets: GPTBuckets, first: int, last: int) -> float:
    """The most bytes of gradients in a backward, besides those that stay, while elements come.

    Those of a bucket wait in autograd for its last one. At stages 2 and 3 a bucket has memory until
    its reduction is awaited.

    Args:
        first, last: elements that have come before and then.
    """
    each, stage, ends = setup.grad_bytes, setup.stage, [0, *buckets.ends]
    several, by_shard = setup.grad_accum_steps > 1, setup.accumulate == "shard"
    done, full = (sum(end <= n for end in ends[1:]) for n in (first, last))
    share = buckets.share(setup.n_shards) / buckets.elements
    of_sum, kept = each * share * (several and by_shard and stage > 0), 0.0
    most = IN_REDUCTION * setup.bucket_bytes / each
    running: float = ends[full]
    if stage >= 2:
        running = max(min(running, most), running - ends[max(0, full - 3)])
        # Of earlier micro-batches, or of those that are reduced.
        kept = each * (buckets.padded(1) if several and not by_shard else running)
    elif setup.grad_accum_steps > 2:
        kept, of_sum = of_sum * buckets.padded(1), 0.0
    waiting = setup.weight_bytes * (last - ends[done])
    new = ends[full] - ends[done]  # whose gradients are not freed yet
    return kept + waiting + (message_bytes(setup) + of_sum) * max(0, running - new)


class Moment(NamedTuple):
    """Bytes of temporary memory at one moment."""

    activations: float
    loss: float
    buckets: float
    update: float = 0.0


def _kept(table: Table, layers: Sequence[int]) -> float:
    """Kept by these blocks; of offloaded inputs: of the block in backward, the next, the last."""
    layers = layers[-3:] if table.setup.recompute.offload_activations else layers
    kept = sum(table.blocks[kind].kept for kind in layers)
    return kept - table.own * (table.setup.recompute.activation_checkpointing == "full")


def _others(table: Table, parts: RankParts, now: Held) -> float:
    """What a pipeline keeps of other micro-batches and chunks; see [Note: a pipeline's rank]."""
    if table.setup.mesh.pp == 1:
        return 0.0
    kept, last = 0.0, len(parts.layers) - 1
    for chunk, (n, layers) in enumerate(zip(now.held, parts.layers)):
        running = chunk == now.chunk
        kept += n * (_kept(table, layers) + table.own)
        if parts.last and chunk == last:  # the head's input, its norm's output, dweight
            kept += (n - running) * (2 * table.own + 4 * math.prod(table.table))
        if running:
            kept -= _kept(table, layers)
    # The gradient that it was given (the loss has none), and the message received ahead.
    return kept + table.own * (2 - (parts.last and now.chunk == last))


def moments(table: Table, parts: RankParts, held: Held, buckets: GPTBuckets) -> Iterator[Moment]:
    """A backward, from the loss to the embedding.

    Args:
        parts: the rank's parts of the model; held: micro-batches that each of its chunks keeps.
    """
    setup, item = table.setup, table.setup.weight_bytes
    layers, last = parts.layers[held.chunk], held.chunk == len(parts.layers) - 1
    standing = table.standing * parts.last
    head = float(item * math.prod(table.table))
    waits = head / setup.rows * (table.tied and parts.last)
    always = table.batch + _others(table, parts, held)
    root, *units = buckets.units

    def gathered(units_done: int) -> float:
        """Parameters at stage 3: the root's, of a unit and the one before it."""
        some = units[max(0, units_done - 2) : units_done]
        return item * (root + sum(some)) * (setup.stage == 3)

    after = [kind for chunk in parts.layers[held.chunk + 1 :] for kind in chunk]
    n = sum(step.numel for kind in after for step in table.blocks[kind].steps)
    arrived = functools.partial(arriving, setup, buckets)
    kept, weights = always + _kept(table, layers), gathered(len(units))
    if parts.last and last:
        yield Moment(kept + table.of_loss[0], table.of_loss[1], weights + arrived(n, n))
    for i in reversed(range(len(layers))):
        block, weights = table.blocks[layers[i]], gathered(len(units) - len(layers) + i + 1)
        kept = always + _kept(table, layers[: i + 1]) + table.residual + block.again
        yield Moment(kept + block.last, standing + waits, arrived(n, n) + weights)
        for step in reversed(block.steps):
            before, n = n, n + step.numel
            yield Moment(kept + step.needs, standing + waits, arrived(before, n) + weights)
            kept -= step.frees
    if parts.first and held.chunk == 0:
        kept = always + table.residual
        yield Moment(kept, standing + waits, arrived(n, n) + head + gathered(0))
        # The sum of both gradients of a 16-bit table is a copy.
        grads = arrived(n, buckets.elements)
        yield Moment(table.batch, standing + waits * (item == 2), grads + gathered(0))


def _update_bytes(workload: Workload, setup: Setup, buckets: GPTBuckets) -> float:
    """Temporary memory of the optimizer's step; AdamW's needs none."""
    if setup.optim.optimizer == "adafactor":
        return _adafactor_scratch(setup, buckets)
    if setup.optim.optimizer == "muon":
        owned = matrices_of(workload.shape, buckets, setup)
        room = product_bytes(setup) * max(matrices.room for matrices in owned)
        if setup.device_type == "cuda":  # values and products in fp32 and 16 bits
            room += 14.0 * max(min(TOGETHER, matrices.numel / matrices.n_dp) for matrices in owned)
        return room
    return 0.0


def predict_memory(workload: Workload, setup: Setup, stage: int | None = None) -> Memory:
    """The peak of a step, after the first ones (which create the optimizer's state).

    Args:
        stage: of a pipeline: on this rank; None: on the one that needs most. Each has the
            parameters of its stages, a table shared by the first and last stage counts on both
            ranks, and each keeps the micro-batches that its schedule holds.
    """
    ranks = enumerate(_stages(workload, setup))
    cases = {(parts, a) for i, (parts, held) in ranks for a in held if stage in (None, i)}
    table = Table(workload, setup)
    memories = (_memory_of(workload, table, parts, held) for parts, held in cases)
    return max(memories, key=lambda memory: memory.total)


def _stages(workload: Workload, setup: Setup) -> Iterator[tuple[RankParts, list[Held]]]:
    """Each pipeline rank's parts, and what it holds."""
    what = setup.parallel.pipeline.schedule, setup.mesh.pp, setup.grad_accum_steps, setup.chunks
    moments = held_of(*what) if setup.mesh.pp > 1 else [[Held(0, (1,))]]
    yield from zip(parts_of(workload, setup), moments)


def activations_on_host(workload: Workload, setup: Setup) -> int:
    """Bytes of blocks' inputs that are pinned on a rank's host; 0 without offload.

    A block has two inputs, x and delta, a stage's first block has one; the last input of all stays
    on the device (nn/recompute.py).
    """
    most = 0.0
    for parts, several in _stages(workload, setup) if setup.recompute.offload_activations else ():
        for held in several:
            layers = zip(held.held, parts.layers)
            inputs = sum(n * (2 * len(blocks) - 1) for n, blocks in layers if blocks) - 1
            most = max(most, inputs * Table(workload, setup).own)
    return round(most)


def host_bytes(workload: Workload, setup: Setup) -> int:
    """A rank's bytes on its host: of axes, and inputs of blocks."""
    kept = sum(axis.host_bytes(workload, setup) for axis in every())
    return round(kept) + activations_on_host(workload, setup)


def _memory_of(workload: Workload, table: Table, parts: RankParts, held: Held) -> Memory:
    setup, buckets = table.setup, buckets_of(workload, table.setup, parts)
    update = _update_bytes(workload, setup, buckets)
    return peak_of(table, parts, held, buckets, predict_states(workload, setup, parts), update)


def peak_of(
    table: Table, parts: RankParts, held: Held, buckets: GPTBuckets, states: Memory, update: float
) -> Memory:
    """What stays, and the largest moment."""
    setup = table.setup
    step = Moment(0.0, table.standing * parts.last, 0.0, update)
    top = max([*moments(table, parts, held, buckets), step], key=sum)
    on_its_way = going_down(setup, buckets) + _CUBLAS * (setup.device_type == "cuda")
    memory = replace(states, **{name: round(size) for name, size in top._asdict().items()})
    return replace(memory, buckets=round(top.buckets + on_its_way))
