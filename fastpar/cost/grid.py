"""What a rank of a grid sends inside of layers: the exchanges of fastpar/tensor/grid.py."""

from __future__ import annotations

from collections.abc import Iterator

from fastpar.cost.workload import Setup, Workload, vocabulary_rows
from fastpar.kernels.linear_cross_entropy import default_chunk_rows

Comm = tuple[str, str, float, int, int, int, str]  # the fields of operations.CommOp


def along_grid(workload: Workload, setup: Setup) -> Iterator[Comm]:
    """Of one optimizer step: activations along the row, weights along the column."""
    shape, c, r, n_micro = workload.shape, setup.tp, setup.rows, setup.grad_accum_steps
    n, width, item = setup.tokens_of_rank(workload), shape.n_embd, setup.weight_bytes
    layers, full = shape.n_layer, setup.activation_checkpointing == "full"
    passes, forwards = n_micro * layers, 2 if full else 1
    wide = 8.0 if item == 8 else 4.0

    def row(kind: str, count: int, n_bytes: float = float(n * width * item)) -> Comm:
        return (kind, "tp", n_bytes, c, 1, count, "")

    def column(kind: str, count: int, n_bytes: float) -> Comm:
        return (kind, "tp", float(n_bytes), r, c, count, "")

    # Forward, dy of row layers, x of column layers once more; embedding and head.
    yield row("all_gather", passes * (2 * forwards + 4) + 2 * n_micro)
    yield row("reduce_scatter", passes * (2 * forwards + 2) + 2 * n_micro)
    norms = forwards + 1 + (setup.activation_checkpointing == "selective")
    yield row("all_gather", 2 * passes * norms + 2 * n_micro, 2 * wide * n * c)
    chunks = -(-n // default_chunk_rows(n, width, vocabulary_rows(shape, c), setup.device_type))
    yield row("all_gather", n_micro * chunks, 3 * wide * n * c / chunks)
    features, hidden = shape.heads_of_rank(c) * shape.head_dim, shape.hidden // c
    for outputs, many in ((3 * features, 1), (features, 1), (hidden, 2)):
        yield column("all_gather", many * passes * (forwards + 1), outputs * width * item)
        yield column("reduce_scatter", many * passes, outputs * width * item)
    table = vocabulary_rows(shape, c) * width * item
    yield column("all_gather", 2 * n_micro, table)
    yield column("reduce_scatter", 2 * n_micro, table)
    # Positions, norms and biases, whose gradients the rows have parts of.
    partial = (shape.block_size + 2 + 6 * layers) * (width // c) + layers * (3 * features + hidden)
    mine = partial * setup.grad_bytes / setup.n_shards
    yield column("all_reduce", n_micro if setup.stage == 0 else 1, mine)
    yield ("all_reduce", "tp", wide, r * setup.depth, c, n_micro, "")  # the loss
