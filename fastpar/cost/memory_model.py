"""The peak of a training step's memory on the fullest rank, predicted: closed form, nothing is run.

A step's memory is what stays (parameters, gradients, the optimizer's state) and what comes and
goes. The peak of the latter is at one of six moments, and the largest of them is predicted:

    loss        all activations; the head's input, dx and dweight (in fp32), a chunk's logits
    dweight     as loss without the logits, while dweight is cast
    block       backward of a block: activations up to it, the gradients that its ops hand on, one
                weight's gradient; the head's gradient waits for the embedding's; at stages 2 and 3
                whole gradients on their way, at stage 3 two gathered units
    embedding   backward of the embedding, whose gradient is as large as the head's
    update      Adafactor's: the updates of a batch of matrices, copies of what is rounded; Muon's:
                matrices on their way and one's products (AdamW's kernel needs nothing)
    between     nothing: what stays

On a GPU the same holds, but a chunk's logits go, and attention keeps one number of a row instead of
two. Not predicted: what StepMemory does not measure either (transports' own buffers), and what
oneDNN packs factors of 16-bit products in on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastpar.cost.buckets import RankParts, buckets_of, parts_of
from fastpar.cost.grid import GridPeak
from fastpar.cost.peak_moments import Peak
from fastpar.cost.workload import Setup, Workload
from fastpar.pipeline.simulator import Held, held_of

# cuBLAS's workspace on Hopper, from torch's allocator (a quarter on older GPUs), which the threads
# of forward and of backward have one each of.
_CUBLAS = 2 * 32 * 2**20
_MOMENT_BLOCK = 256  # 8-bit moments have an fp32 scale for each block of so many


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at the peak of a step, by kind.

    Attributes:
        activations: what forward keeps, and the gradients that one op of backward hands to the
            next.
        loss: logits, dx and dweight of the head, and the head's gradient until it is used.
        buckets: whole gradients on their way, gathered parameters, copies in the format of the
            wire, one weight's gradient, on a GPU also cuBLAS's workspace.
        update: what the optimizer needs for a moment.
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
    """What surely stays between steps; no activations, nothing on its way; see buckets_of()."""
    buckets, stage, n = buckets_of(workload, setup, parts), setup.stage, setup.n_shards
    whole, shard = buckets.padded(n), buckets.padded(n) / n
    # Padding has no state. A rank can have a little more than its share of what has.
    elements = buckets.elements / (n if stage else 1)
    state = setup.state_bytes * elements
    if setup.optimizer == "adamw" and setup.moment_dtype == "int8":
        state += 2 * 4 / _MOMENT_BLOCK * elements
    if setup.optimizer == "adafactor":  # means of rows and columns
        state += 4 * sum(map(sum, buckets.matrices)) * elements / buckets.elements
    if setup.optimizer == "muon":  # one momentum, not two moments
        state -= 4 * sum(map(math.prod, buckets.hidden)) / (n if stage else 1)
    weights, grads = shard if stage == 3 else whole, shard if stage >= 2 else whole
    if setup.offload is not None:  # on the host: state, gradients of a stage that frees them
        state, grads = min(state, setup.offload_keep_mb * 2**20), grads if stage < 2 else 0
        weights = 0 if setup.offload == "parameters" else weights
    if stage in (1, 2) and setup.code_bytes[1]:  # a rank's own are apart from what is gathered
        weights += shard
    if setup.secondary_shards and setup.node_size and n > setup.node_size:
        weights += whole / setup.node_size
    return Memory(
        parameters=round(setup.weight_bytes * weights),
        gradients=round(setup.grad_bytes * grads + setup.error_bytes * whole),
        optimizer=round(state),
    )


def predict_memory(workload: Workload, setup: Setup) -> Memory:
    """The peak of a step, after the first ones (which make the optimizer's state).

    Of a pipeline, on the rank that needs most: each with the parameters of its stages, a table that
    the first and the last one share counted on both ranks, and the micro-batches that its
    schedule holds.
    """
    cases = {(parts, held) for parts, several in _stages(workload, setup) for held in several}
    fullest = [
        (parts, a)
        for parts, a in cases
        if not any(other == parts and a.within(b) for other, b in cases)
    ]
    found = (_memory_of(workload, setup, parts, held) for parts, held in fullest)
    return max(found, key=lambda memory: memory.total)


def _stages(workload: Workload, setup: Setup) -> Iterator[tuple[RankParts, list[Held]]]:
    """What each rank of a pipeline has, and what it holds."""
    what = setup.schedule, setup.pp, setup.grad_accum_steps, setup.chunks
    moments = held_of(*what) if setup.pp > 1 else [[Held(0, (1,), (0,))]]
    yield from zip(parts_of(workload, setup), moments)


def predict_ranks(workload: Workload, setup: Setup) -> list[Memory]:
    """predict_memory() of each rank of a pipeline; with pp=1 of the one there is."""
    return [
        max(
            (_memory_of(workload, setup, parts, held) for held in several),
            key=lambda memory: memory.total,
        )
        for parts, several in _stages(workload, setup)
    ]


def kept_by_blocks(workload: Workload, setup: Setup) -> float:
    """Bytes that a rank's blocks keep of a forward until backward; without a pipeline."""
    ((parts, (held,)),) = _stages(workload, setup)
    shape = workload.shape
    return Peak(workload, setup, parts, held).kept(shape.n_layer, shape.expert_layers)


def activations_on_host(workload: Workload, setup: Setup) -> int:
    """Bytes of blocks' inputs that are pinned on a rank's host; 0 where they stay.

    A block has two inputs, x and delta, the first one of a stage has one; the last of all never
    leaves (nn/recompute.py).
    """
    most = 0.0
    for parts, several in _stages(workload, setup) if setup.offload_activations else ():
        for held in several:
            layers = zip(held.held, parts.layers)
            inputs = sum(n * (2 * blocks - 1) for n, blocks in layers if blocks) - 1
            most = max(most, inputs * Peak(workload, setup, parts, held).a)
    return round(most)


def _memory_of(workload: Workload, setup: Setup, parts: RankParts, held: Held) -> Memory:
    """What stays, and the largest moment."""
    peak = (Peak if setup.tp_grid is None else GridPeak)(workload, setup, parts, held)
    top = max(peak.moments(), key=sum)
    return replace(
        predict_states(workload, setup, parts),
        activations=round(top.activations),
        loss=round(top.loss),
        buckets=round(top.buckets + peak.going_down) + (_CUBLAS if peak.on_gpu else 0),
        update=round(top.update),
    )
