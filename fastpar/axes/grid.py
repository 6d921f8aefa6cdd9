"""Layers split over a grid of ranks: r rows and c columns, tokens by rows, features by columns.

    tokens     x[N, C]: rank (i, j) has samples i of the batch and features j: [N/r, C/c]
    column     w[F, C]: F by columns and C by rows: [F/c, C/r]
    row        w[C, F]: F by columns and C by rows: [C/r, F/c]

A product gathers one block along each axis and computes once; the transposed ones of backward end
in a sum along the other axis, a reduce-scatter. That is SUMMA with its broadcasts in one piece:

                 forward                              backward
    column       x along the row, w along the         w again, dx summed along the row; x again,
                 column; y is complete                dw summed along the column
    row          w along the column; y summed         dy along the row, w again: dx is complete;
                 along the row                        dw summed along the column

A row layer sends its output, C wide, and not its input, which is 4 * C wide in an MLP's second
product, as SUMMA would. A block sends 4 and 6 times [N/r, C/c] * (c - 1) for activations, as tensor
parallelism with sequence parallelism does, and 3 times its weights, as stage 3 does.

Use it        rarely: it holds what tp x ZeRO-3 holds, and waits for every exchange, as it gathers
              no weights ahead. It has the least memory per rank. Measured on 4 ranks with links of
              1 Gbit/s: TP 2 x ZeRO-3 433 ms a step, grid 2x2 531, TP 4 623; the grid's peak memory
              is 13 % below that of TP 2 x ZeRO-3. bench/results/grid/README.md has more.
Not with      tp, cp, ep, pp, replicas, experts, fp8, Adafactor, Muon, compile, offload, packed
              documents, sequence_parallel, node_size.

A norm needs sums over the row: two numbers per token, exchanged forward and backward and added in
the order of the ranks. Attention is local, by heads along the row. The vocabulary is a column
layer's outputs, so the loss is that of vocabulary.py along the row.

Two axes: a module declares one state, as for tensor parallelism (tensor_parallel(self, tp)). On the
grid a matrix with Shard(d) is also cut by rows along its other dimension; all else is cut by
columns along its last dimension, and its gradient is summed over the rows, which have other
samples.

Depth: depth grids have the same weights and split a batch together with the rows. For gradients
depth is one of the data axes, over which the engine averages: so an operator that sums over a batch
multiplies its gradient by depth, as in axes/context/sequences.py, "One loss".

Source: Xu et al. 2021, arXiv 2104.05343; Wang et al. 2021, arXiv 2105.14500; van de Geijn, Watts
1997 (SUMMA)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fastpar.axes import Axis, Making
from fastpar.axes.step import CommOp, Setup, Workload
from fastpar.axes.tensor import tp_sizes
from fastpar.axes.tensor.declared import split_model
from fastpar.axes.tensor.functional import (
    Grads,
    Needed,
    TensorParallel,
    define_linear,
    gather,
    handle_of,
    reduce_from,
    rows_of,
)
from fastpar.comm.collectives import Collectives, Handle, OneRank
from fastpar.kernels.linear import matmul
from fastpar.kernels.loss.linear_cross_entropy import default_chunk_rows
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward
from fastpar.kernels.philox import Rng, keep_mask, quantize_p
from fastpar.settings.mesh import divisors, parse_grid
from fastpar.settings.model import (
    GPTConfig,
    block_parts,
    first_parts,
    last_parts,
    shapes_of,
    split_products,
    widths,
)
from fastpar.settings.rules import DEFAULTS, check, of_shape
from fastpar.sharding.placements import Partial, Shard, State

_DEVICES = ("CPU", "CUDA")


class Grid(TensorParallel):
    """One rank's position in a grid; as a TensorParallel, its position in the row.

    Args:
        group: the ranks of its row; down: of its column; batch: all ranks that split a batch,
            along depth and rows.
    """

    def __init__(self, group: Collectives, down: Collectives, batch: Collectives) -> None:
        super().__init__(group, sequence_parallel=False)
        self.shared_dim = -1
        self.down = TensorParallel(down, sequence_parallel=False)
        self.batch = TensorParallel(batch, sequence_parallel=False)
        self.depth = self.batch.size // self.down.size
        self.groups = {"rows": down, "tp": group}
        self.label = f"tp_grid={down.world_size}x{self.size}" + f"x{self.depth}" * (self.depth > 1)
        self.tokens = "samples by rows, features by columns"

    @property
    def per_token(self) -> State:
        return Partial()

    def states_of(self, state: State, dims: int) -> Mapping[str, State]:
        """States along rows and tp; see the top of this file."""
        if isinstance(state, Shard) and dims == 2:
            return {"rows": Shard(1 - state.dim), "tp": state}
        return {"rows": Partial(), "tp": state if isinstance(state, Shard) else Shard(dims - 1)}

    def table(self, weight: Tensor) -> Tensor:
        """[V/c, C/r] -> [V/c, C]: all features of this column's rows of a vocabulary."""
        return weight if self.down.size == 1 else gather(weight, 1, self.down, partial=True)

    def on_grid(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Any, *, column: bool
    ) -> Tensor:
        """column_linear() and row_linear()."""
        if fp8 is not None:
            raise ValueError(
                f"linear: fp8 does not work with {self.label}, got {fp8}; drop it, or use Mesh(tp=)"
            )
        return (_column if column else _row)(x, weight, bias, self.number)

    # The batch

    def check_batch(self, idx: Tensor, positions: Tensor | None) -> None:
        """Refuse a batch that rows and depth do not divide, and packed documents."""
        if len(idx) % self.batch.size:
            raise ValueError(
                f"GPT: expected a batch of a multiple of {self.batch.size} samples with "
                f"{self.label}, got B={len(idx)}; pass another micro_batch_size, or fewer rows"
            )
        if positions is not None:  # their dropout masks are numbered over the whole batch
            raise ValueError(
                f"GPT: positions do not work with {self.label}, got positions.shape="
                f"{list(positions.shape)}; let each row be one document, or use Mesh(tp=)"
            )

    def key(self, rng_key: Tensor, samples: int) -> Tensor:
        """The first rank's rng key of a batch, for this rank's samples of it."""
        first = self.batch.rank * (samples // self.batch.size)
        same = gather(rng_key[None], 0, self.batch, partial=False)[:1]
        same = gather(same, 0, self, partial=False)[0]
        return same + same.new_tensor([0, first])

    def whole_batch(self, x: Tensor) -> Tensor:
        """[B, ...] of every rank's samples; all ranks compute the same with it."""
        return gather(_Times.apply(x, self.depth), 0, self.batch, partial=False)

    def sum_of_parts(self, x: Tensor) -> Tensor:
        """The sum of every rank's part of a loss."""
        return reduce_from(_Times.apply(x, self.depth), self.batch)


def grid_of(number: int) -> Grid:
    """The Grid that an operator's integer argument stands for."""
    grid = handle_of(number)
    assert isinstance(grid, Grid)
    return grid


class _Times(torch.autograd.Function):
    """x, with its gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.factor, None


# Linear layers


class _Gathering:
    """A running gather of slices; frees its memory when they are joined."""

    def __init__(self, x: Tensor, dim: int, tp: TensorParallel) -> None:
        self.dim, self.tp = dim, tp
        alone = tp.size == 1
        self.started: tuple[Tensor, Handle | None] | None
        self.started = (x[None], None) if alone else tp.begin_all_gather(x)

    def join(self) -> Tensor:
        assert self.started is not None
        started, self.started = self.started, None
        return self.tp.finish_all_gather(*started, self.dim)


def _sum(x: Tensor, dim: int, tp: TensorParallel) -> tuple[Tensor, Handle | None]:
    """This rank's slice of a running sum; with one rank x itself."""
    return (x, None) if tp.size == 1 else tp.begin_reduce_scatter(x, dim)


def _summed(x: Tensor, dim: int, tp: TensorParallel) -> Tensor:
    return x if tp.size == 1 else tp.reduce_scatter(x, dim)


def grid_column_fwd(grid: Grid, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias, [..., F/c]."""
    gathering = _Gathering(weight, 1, grid.down)
    flat = _Gathering(rows_of(x), 1, grid).join()
    y = matmul(flat, gathering.join().t(), bias=bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def grid_row_fwd(grid: Grid, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias, [..., C/c]."""
    y = matmul(rows_of(x), _Gathering(weight, 0, grid.down).join().t())
    y = _summed(y, 1, grid)
    y = y if bias is None else y.add_(bias)
    return y.view(*x.shape[:-1], y.shape[-1])


def grid_column_bwd(grid: Grid, need: Needed, dy: Tensor, x: Tensor, weight: Tensor) -> Grads:
    """The bias' gradient is of this rank's samples."""
    gathering = _Gathering(weight, 1, grid.down) if need.dx else None
    moving = _Gathering(rows_of(x), 1, grid) if need.dweight else None
    flat, dx, dweight, summing = rows_of(dy), None, None, None
    dbias = flat.sum(0) if need.dbias else None
    if gathering is not None:
        dx, summing = _sum(matmul(flat, gathering.join()), 1, grid)
        dx = dx.view(x.shape)
    if moving is not None:
        dweight = _summed(matmul(flat.t(), moving.join()), 1, grid.down)
    if summing is not None:
        summing.wait()
    return dx, dweight, dbias


def grid_row_bwd(grid: Grid, need: Needed, dy: Tensor, x: Tensor, weight: Tensor) -> Grads:
    """Like grid_column_bwd()."""
    gathering = _Gathering(weight, 0, grid.down) if need.dx else None
    flat, dx, dweight = rows_of(dy), None, None
    dbias = flat.sum(0) if need.dbias else None
    flat = _Gathering(flat, 1, grid).join()
    if gathering is not None:
        dx = matmul(flat, gathering.join()).view(x.shape)
    if need.dweight:
        dweight = _summed(matmul(flat.t(), rows_of(x)), 0, grid.down)
    return dx, dweight, dbias


def _column_fake(grid, x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _row_fake(grid, x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0] * grid.down.size // grid.size)


_column = define_linear("grid_column", grid_column_fwd, grid_column_bwd, _column_fake)
_row = define_linear("grid_row", grid_row_fwd, grid_row_bwd, _row_fake)


# Norms


def grid_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y [..., C/c] of x [..., C/c], mean and rstd of the whole rows; sums in the order of ranks."""
    grid, wide = grid_of(number), _wide(x)
    n, partial_mean = x.shape[-1], wide.mean(-1)
    spread = (wide - partial_mean[..., None]).square_().sum(-1)
    means, spreads = grid.group.gathered(torch.stack([partial_mean, spread])).unbind(1)
    mean = means.sum(0) / grid.size
    total = spreads.sum(0) + n * (means - mean).square().sum(0)
    rstd = (total / (n * grid.size) + eps).rsqrt()
    y = (wide - mean[..., None]).mul_(rstd[..., None]).mul_(weight).add_(bias)
    return y.to(x.dtype), mean, rstd


def grid_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and dweight and dbias of this rank's samples."""
    grid, wide_dy = grid_of(number), _wide(dy)
    normed = (_wide(x) - mean[..., None]).mul_(rstd[..., None])
    g = wide_dy * weight
    partial = torch.stack([g.sum(-1), (g * normed).sum(-1)])
    by_one, by_normed = grid.group.gathered(partial).sum(0)[..., None] / (x.shape[-1] * grid.size)
    dweight, dbias = rows_of(wide_dy * normed).sum(0), rows_of(wide_dy).sum(0)
    dx = g.sub_(by_one).sub_(normed.mul_(by_normed)).mul_(rstd[..., None])
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _norm_fake(x, weight, bias, eps, number):
    row = _wide(x.new_empty(x.shape[:-1]))
    return torch.empty_like(x), row, torch.empty_like(row)


_norm = define_op(
    "grid_norm(Tensor x, Tensor weight, Tensor bias, float eps, int grid)"
    " -> (Tensor, Tensor, Tensor)",
    grid_norm_fwd,
    _norm_fake,
    _DEVICES,
)
_norm_bwd = define_op(
    "grid_norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, int grid)"
    " -> (Tensor, Tensor, Tensor)",
    grid_norm_bwd,
    lambda dy, x, w, *_: (torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)),
    _DEVICES,
)


def _setup_norm(ctx, inputs, output):
    x, weight, _, _, ctx.number = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, *output[1:])


def _backward_norm(ctx, dy, *_):
    refuse_double_backward("grid_norm")
    return *_norm_bwd(dy, *ctx.saved_tensors, ctx.number), None, None


define_autograd(_norm, _setup_norm, _backward_norm)


class _Dropped(torch.autograd.Function):
    """x with this rank's columns of the mask, which is drawn again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rng: Rng, p: float, grid: Grid) -> Tensor:
        ctx.mask = rng, p, grid
        return _drop(x, rng, p, grid)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _drop(dy, *ctx.mask), None, None, None


def _drop(x: Tensor, rng: Rng, p: float, grid: Grid) -> Tensor:
    keep = keep_mask(rng, p, [*x.shape[:-1], x.shape[-1] * grid.size], x.device)
    return torch.where(grid.slice(keep, -1), x * (256.0 / (256 - quantize_p(p))), 0.0)


def grid_dropout(x: Tensor, grid: Grid, dropout_p: float = 0.0, rng: Rng | None = None) -> Tensor:
    """dropout() of this rank's features, [..., C/c], with its columns of the whole mask.

    Every rank draws the mask of whole rows. rng None: no dropout.
    """
    return x if rng is None else _Dropped.apply(x, rng, dropout_p, grid)


def grid_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    grid: Grid,
    *,
    x_bias: Tensor | None = None,
    eps: float = 1e-5,
    **dropout: Any,
) -> tuple[Tensor, Tensor]:
    """(norm of x + dropout(delta + x_bias), that sum): residual_layer_norm() on a grid.

    Args:
        x, delta: [B/r, T, C/c]; delta None: nothing is added. weight, bias, x_bias: [C/c].
    Ranks: all of a row. Wire: two numbers of 4 bytes (8 of fp64) per token, forward and backward.
    Deterministic: yes.
    """
    if delta is not None:
        delta = delta if x_bias is None else delta + x_bias
        x = x + grid_dropout(delta, grid, **dropout)
    assert bias is not None, "GPT's norms have one"
    return _norm(x, weight, bias, eps, grid.number)[0], x


MOST_ROWS = 16


class Gridded(Axis):
    """Each layer split over a grid of ranks."""

    name = "grid"
    order = 49
    place = 5

    def comms(self, workload: Workload, setup: Setup) -> Iterator[CommOp]:
        """Activations along the row, weights along the column."""
        if setup.mesh.tp_grid is None:
            return
        shape, c, r, n_micro = workload.shape, setup.tp, setup.rows, setup.grad_accum_steps
        n, width, item = setup.tokens_of_rank(workload), shape.n_embd, setup.weight_bytes
        layers, full = shape.n_layer, setup.recompute.activation_checkpointing == "full"
        passes, forwards = n_micro * layers, 2 if full else 1
        parts, sizes, split = block_parts(shape), widths(shape, c), split_products(shape)
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
        norms = forwards + 1 + (setup.recompute.activation_checkpointing == "selective")
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
        # Gradients of positions, norms and biases, which are partial sums on the rows.
        vectors, ends, positions = (
            [math.prod(s) for s in shapes_of(some, shape, c, r) if len(s) == n]
            for some, n in ((parts, 1), (last_parts(shape), 1), (first_parts(shape)[1:], 2))
        )
        partial = sum(positions) + sum(ends) + layers * sum(vectors)
        grad_bytes = partial * setup.grad_bytes / setup.n_shards
        yield column("all_reduce", n_micro if setup.stage == 0 else 1, grad_bytes)
        yield CommOp("all_reduce", "tp", wide, r * setup.depth, c, n_micro, "")  # the loss

    def header(self, setup: Setup, shape: GPTConfig) -> dict[str, str]:
        grid = setup.mesh.tp_grid
        return {"ranks": f"grid {grid} (samples by rows, features by columns)"} if grid else {}

    def split(self, making: Making) -> None:
        model, mesh = making.model, making.mesh
        if mesh.tp_grid is None:
            return
        grid = "x".join(map(str, mesh.tp_grid))
        if not getattr(model, "splits_on_grid", False):
            raise ValueError(
                f"parallelize: tp_grid={grid} needs a fastpar.GPT of GPT-2's block, got "
                f"{type(model).__name__}; use Mesh(tp=), or load its weights into a fastpar.GPT"
            )
        if making.tp_plan is not None:
            raise ValueError(
                f"parallelize: tp_plan does not work with tp_grid={grid}, got tp_plan="
                f"{making.tp_plan!r}; drop it, or use Mesh(tp=)"
            )

        def along(*axes: str) -> Collectives:
            alone = mesh.size(*axes) == 1
            return OneRank(mesh.device) if alone else making.make(mesh.new_group(*axes), "tp")

        tp = Grid(along("tp"), along("rows"), along("depth", "rows"))
        split_model(making, tp, None)
        making.same_inputs["rows"] = tp.batch.group

    def candidates(self, workload: Workload, setup: Setup, per_node: int) -> Iterator[Setup]:
        """Grids of at least two rows and columns; the ranks of a row share a node."""
        yield setup
        mesh = setup.mesh
        if mesh.tp_grid is not None or mesh.pp > 1 or setup.parallel.offload.what is not None:
            return
        if not workload.shape.is_gpt2:
            return
        world, width = setup.world_size, workload.shape.n_embd
        for columns in tp_sizes(workload, setup, per_node):
            for rows in divisors(world // columns):
                if 1 < rows <= MOST_ROWS and columns > 1 and not (width % columns or width % rows):
                    yield setup.change(tp_grid=f"{rows}x{columns}")

    def compared(self, setup: Setup) -> tuple[Any, ...]:
        return (setup.mesh.tp_grid,)

    def text(self, setup: Setup) -> str:
        return "" if setup.mesh.tp_grid is None else f"grid {setup.mesh.tp_grid}"

    def check(self, command: Any, workload: Workload) -> None:
        """Refuse grids that the trainer or the search does not support, or with wrong sizes."""
        if command.tp_grid in (None, "none"):
            return
        names = ("optimizer", "moment_dtype", "fp8", "tp_grid", "n_expert")
        sizes = {name: getattr(command, name) for name in names}
        values = {**DEFAULTS, **sizes, "pp": command.pp or 1, **of_shape(workload.shape)}
        check("plan", values, ("tp_grid",))
        grid = parse_grid(command.tp_grid)
        assert grid is not None
        if command.gpus % math.prod(grid):
            raise ValueError(
                f"plan: expected the {math.prod(grid)} ranks of tp_grid={command.tp_grid} to "
                f"divide gpus={command.gpus}; change --gpus or --tp-grid"
            )
        sharing = command.gpus // grid[1]  # data-parallel ranks times rows
        if workload.batch_size % sharing:
            raise ValueError(
                f"plan: expected batch_size as a multiple of {sharing} (data-parallel ranks times "
                f"rows of tp_grid={command.tp_grid}), got batch_size={workload.batch_size}; change "
                "--batch-size or --tp-grid"
            )


AXIS = Gridded()
