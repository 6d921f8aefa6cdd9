"""Linear layers split over the ranks of tp, and the operators that join their results.

    column    x[N, C] @ w[F/tp, C].T -> y[N, F/tp]        each rank some of the features
    row       x[N, F/tp] @ w[C, F/tp].T -> a part of y[N, C]; the sum over the ranks is y

A block is a column layer, something that works feature by feature (GELU, attention on some of the
heads), and a row layer. Between blocks all ranks have all N tokens, or N/tp each with sequence
parallelism:

                    into a column layer                      out of a row layer
                    forward        backward                  forward          backward
    without         -              all-reduce                all-reduce       -
    sequence par.   all-gather     reduce-scatter            reduce-scatter   all-gather

With sequence parallelism a rank has N/tp consecutive tokens of the batch, seen as [N, C], so that
gathers and scatters need no copies. Tensors of more dimensions are split along the last but one,
which needs a copy unless it is the first (modules of other libraries, foreign/tp_plan.py).

Overlap: the sum of a column layer's input gradient overlaps with the product of the weight's
gradient. With sequence parallelism only N/tp tokens of its input are kept; they are gathered again
in backward, during the product of the input's gradient.

Handles: the layers are ops of torch.library, so that torch.compile and selective recomputation see
one op each. An op's arguments are tensors and numbers, so the TensorParallel is passed by its
number.

Source: Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.comm.collectives import Collectives, Handle
from fastpar.kernels import Fp8, linear
from fastpar.kernels.linear import matmul
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward
from fastpar.sharding.placements import Partial, Replicate, State

_numbers = itertools.count(1)
_handles: weakref.WeakValueDictionary[int, TensorParallel] = weakref.WeakValueDictionary()


class TensorParallel:
    """One rank's position in the axis tp. Made by parallelize(), used by split modules.

    Args:
        group: the ranks along tp.
        sequence_parallel: whether a rank has N/tp tokens between blocks, see above.
    Attributes:
        rank, size: along tp.
        number: its number in calls of ops.
        per_token: the state of a parameter that is used token by token, outside split layers.
        groups: the ranks along each axis that splits layers, outermost first.
        same_keys: the ranks that share a head of keys; None: each has its own.
        label, tokens: text: its name, and how tokens between layers are split.
    """

    # The dim along which ranks split activations between layers; None: they do not.
    shared_dim: int | None
    on_grid: Callable[..., Tensor] | None = None  # Grid's split layers
    same_keys: TensorParallel | None = None

    def __init__(self, group: Collectives, *, sequence_parallel: bool = True) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.shared_dim = 0 if sequence_parallel else None
        self.rank, self.size = group.rank, group.world_size
        self.groups, self.label = {"tp": group}, f"tp={self.size}"
        self.tokens = "sequence parallel" if sequence_parallel else "whole sequences"
        self.number = next(_numbers)
        _handles[self.number] = self

    @property
    def per_token(self) -> State:
        return Partial() if self.sequence_parallel else Replicate()

    def states_of(self, state: State, dims: int) -> Mapping[str, State]:
        """States by axis of a parameter that a module declares with this state."""
        return {"tp": state}

    def table(self, weight: Tensor) -> Tensor:
        """This rank's rows of a vocabulary, with all features."""
        return weight

    def __deepcopy__(self, memo: dict) -> TensorParallel:
        return self  # a copy of a split model is split, too

    def __reduce__(self) -> tuple:
        raise RuntimeError(
            f"TensorParallel: cannot save the model itself, of which rank {self.rank} of "
            f"{self.size} has a slice; save model.state_dict()"
        )

    # Collectives. Results are new tensors.

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(total)
        return total

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The slices of all ranks along dim, as one tensor."""
        return self.finish_all_gather(*self.begin_all_gather(x, async_op=False), dim)

    def begin_all_gather(self, x: Tensor, async_op: bool = True) -> tuple[Tensor, Handle | None]:
        """Start a gather; finish_all_gather() of both results returns the tensor."""
        out = x.new_empty(self.size, *x.shape)
        mine = x.contiguous().view(-1)
        return out, self.group.all_gather(out.view(-1), mine, async_op=async_op)

    def finish_all_gather(self, out: Tensor, handle: Handle | None, dim: int) -> Tensor:
        if handle is not None:
            handle.wait()
        dim %= out.dim() - 1
        return out.flatten(0, 1) if dim == 0 else out.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice along dim of the sum over the ranks."""
        return self.begin_reduce_scatter(x, dim, async_op=False)[0]

    def begin_reduce_scatter(
        self, x: Tensor, dim: int, async_op: bool = True
    ) -> tuple[Tensor, Handle | None]:
        """Start a sum; returns (the result, its handle)."""
        dim %= x.dim()
        x = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        out = x.new_empty(x.shape[1:])
        return out, self.group.reduce_scatter(out.view(-1), x.view(-1), async_op=async_op)

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice along dim."""
        size = x.shape[dim] // self.size
        part = x.narrow(dim, self.rank * size, size)
        return part.clone(memory_format=torch.contiguous_format)


def handle_of(number: int) -> TensorParallel:
    """The TensorParallel that an operator's integer argument stands for."""
    tp = _handles.get(number)
    assert tp is not None, "the model keeps it"
    return tp


# Conjugate operators: the forward of one is the backward of the other.


def _check_slices(op: str, x: Tensor, dim: int, tp: TensorParallel) -> None:
    if x.shape[dim] % tp.size:
        raise ValueError(
            f"{op}: expected tp={tp.size} to divide dimension {dim}, got x={list(x.shape)}; "
            "pad it to a multiple"
        )


def _gathered(x: Tensor, dim: int, number: int) -> Tensor:
    size = handle_of(number).size
    return x.new_empty([n * size if d == dim % x.dim() else n for d, n in enumerate(x.shape)])


def _scattered(x: Tensor, dim: int, number: int) -> Tensor:
    size = handle_of(number).size
    return x.new_empty([n // size if d == dim % x.dim() else n for d, n in enumerate(x.shape)])


_DEVICES = ("CPU", "CUDA")
_all_reduce_op = define_op(
    "tp_all_reduce(Tensor x, int tp) -> Tensor",
    lambda x, number: handle_of(number).all_reduce(x),
    lambda x, number: torch.empty_like(x, memory_format=torch.contiguous_format),
    _DEVICES,
)


def _define(name: str, fake: Callable[[Tensor, int, int], Tensor]) -> Callable[..., Tensor]:
    """Define an op that calls the method of TensorParallel with this name."""

    def run(x: Tensor, dim: int, number: int) -> Tensor:
        return getattr(handle_of(number), name)(x, dim)

    return define_op(f"tp_{name}(Tensor x, int dim, int tp) -> Tensor", run, fake, _DEVICES)


_OPERATORS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "same": lambda x, dim, number: x.view_as(x),
    "all_reduce": lambda x, dim, number: _all_reduce_op(x, number),
    "all_gather": _define("all_gather", _gathered),
    "reduce_scatter": _define("reduce_scatter", _scattered),
    "slice": _define("slice", _scattered),
}


class _Conjugate(torch.autograd.Function):
    """One operator in forward, another in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, number: int, forward: str, backward: str) -> Tensor:
        ctx.backward_of = backward, dim, number
        return _OPERATORS[forward](x, dim, number)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        backward, dim, number = ctx.backward_of
        return _OPERATORS[backward](dy, dim, number), None, None, None, None


def copy_to(x: Tensor, tp: TensorParallel) -> Tensor:
    """x, equal on all ranks, as input of different computations: the gradient is their sum."""
    return _Conjugate.apply(x, 0, tp.number, "same", "all_reduce")


def reduce_from(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of every rank's part x; the gradient goes to each part."""
    return _Conjugate.apply(x, 0, tp.number, "all_reduce", "same")


def gather(x: Tensor, dim: int, tp: TensorParallel, *, partial: bool) -> Tensor:
    """The slices of all ranks along dim, joined.

    Args:
        partial: ranks compute different things with it, so that the gradient is the slice of a sum
            (a reduce-scatter); False: all compute the same, and the gradient is a slice.
    """
    backward = "reduce_scatter" if partial else "slice"
    return _Conjugate.apply(x, dim, tp.number, "all_gather", backward)


def scatter(x: Tensor, dim: int, tp: TensorParallel, *, partial: bool) -> Tensor:
    """This rank's slice along dim; the gradient is gathered.

    Args:
        partial: each rank's x is a part of a sum, of which the slice is taken (a reduce-scatter);
            False: x is equal on all ranks.
    Raises:
        ValueError: tp does not divide dim.
    """
    _check_slices("scatter", x, dim, tp)
    forward = "reduce_scatter" if partial else "slice"
    return _Conjugate.apply(x, dim, tp.number, forward, "all_gather")


# Split linear layers


def rows_of(x: Tensor) -> Tensor:
    """[..., C] as [N, C]."""
    return x.reshape(-1, x.shape[-1])


class Needed(NamedTuple):
    """The gradients that a backward must compute."""

    dx: bool
    dweight: bool
    dbias: bool


Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, weight and bias


def column_linear_fwd(tp: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., F/tp] of x [..., C], or of its slice of the tokens."""
    if tp.sequence_parallel:
        x = tp.all_gather(x, -2)
    y = matmul(rows_of(x), weight.t(), bias=bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def column_linear_bwd(
    tp: TensorParallel, need: Needed, dy: Tensor, x: Tensor, weight: Tensor
) -> Grads:
    """The backward of a column layer; see "Overlap" above."""
    gathering = tp.begin_all_gather(x) if tp.sequence_parallel and need.dweight else None
    dx, part, dweight, summing = None, None, None, None
    if need.dx:
        dx = part = matmul(rows_of(dy), weight).view(*dy.shape[:-1], x.shape[-1])
        if tp.sequence_parallel:  # part is freed by this thread, which may check it (StepMemory)
            dx, summing = tp.begin_reduce_scatter(part, -2)
        else:
            summing = tp.group.all_reduce(dx, async_op=True)
    if need.dweight:
        if gathering is not None:
            x = tp.finish_all_gather(*gathering, -2)
        dweight = matmul(rows_of(dy).t(), rows_of(x))
    dbias = rows_of(dy).sum(0) if need.dbias else None
    if summing is not None:
        summing.wait()
    return dx, dweight, dbias


def row_linear_fwd(tp: TensorParallel, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., C], or this rank's slice of its tokens, of x [..., F/tp]."""
    y = matmul(rows_of(x), weight.t()).view(*x.shape[:-1], weight.shape[0])
    if tp.sequence_parallel:
        y = tp.reduce_scatter(y, -2)
    else:
        tp.group.all_reduce(y)
    return y if bias is None else y.add_(bias)


def row_linear_bwd(
    tp: TensorParallel, need: Needed, dy: Tensor, x: Tensor, weight: Tensor
) -> Grads:
    """The bias' gradient is of this rank's tokens."""
    dbias = rows_of(dy).sum(0) if need.dbias else None
    if tp.sequence_parallel:
        dy = tp.all_gather(dy, -2)
    dx = matmul(rows_of(dy), weight).view(x.shape) if need.dx else None
    return dx, matmul(rows_of(dy).t(), rows_of(x)) if need.dweight else None, dbias


def _column_fake(tp, x, weight):
    y = x.new_empty([*x.shape[:-1], weight.shape[0]])
    return _gathered(y, -2, tp.number) if tp.sequence_parallel else y


def _row_fake(tp, x, weight):
    y = x.new_empty([*x.shape[:-1], weight.shape[0]])
    return _scattered(y, -2, tp.number) if tp.sequence_parallel else y


def _bwd_fake(dy, x, weight, *needed):
    shapes = (x.shape, weight.shape, dy.shape[-1:])
    return tuple(x.new_empty(s if need else (0,)) for s, need in zip(shapes, needed))


_LINEAR = "(Tensor x, Tensor weight, Tensor? bias, int tp) -> Tensor"
_NEEDED = "bool need_dx, bool need_dweight, bool need_dbias, int tp"
_LINEAR_BWD = f"(Tensor dy, Tensor x, Tensor weight, {_NEEDED}) -> (Tensor, Tensor, Tensor)"


def _setup_context(ctx, inputs, output):
    x, weight, bias, ctx.number = inputs
    ctx.save_for_backward(x, weight)
    ctx.need_dbias = bias is not None and ctx.needs_input_grad[2]


def _backward_of(op: Any, name: str) -> Any:
    def backward(ctx, dy):
        refuse_double_backward(name)
        x, weight = ctx.saved_tensors
        needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.need_dbias)
        grads = op(dy, x, weight, *needed, ctx.number)
        return *(grad if need else None for grad, need in zip(grads, needed)), None

    return backward


def define_linear(name: str, fwd: Any, bwd: Any, fake: Any) -> Any:
    """Define an op of x, weight, bias and a number; fwd, bwd and fake get the number's
    TensorParallel as first argument."""

    def run_bwd(dy: Tensor, x: Tensor, weight: Tensor, *needed: Any) -> Grads:
        return bwd(handle_of(needed[-1]), Needed(*needed[:-1]), dy, x, weight)

    op = define_op(
        name + _LINEAR,
        lambda x, weight, bias, number: fwd(handle_of(number), x, weight, bias),
        lambda x, weight, bias, number: fake(handle_of(number), x, weight),
        _DEVICES,
    )
    bwd_op = define_op(f"{name}_bwd{_LINEAR_BWD}", run_bwd, _bwd_fake, _DEVICES)
    define_autograd(op, _setup_context, _backward_of(bwd_op, name))
    return op


_column = define_linear("column_linear", column_linear_fwd, column_linear_bwd, _column_fake)
_row = define_linear("row_linear", row_linear_fwd, row_linear_bwd, _row_fake)


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tp: TensorParallel | None = None,
    fp8: Fp8 | None = None,
) -> Tensor:
    """This rank's features of x @ weight.T + bias; see the top of the file.

    Args:
        x: [..., C]; with sequence parallelism this rank's tokens, [N/tp, C].
        weight: [F/tp, C]; bias: [F/tp].
        tp: None: the plain linear.
        fp8: as linear's; then the gathered x is kept, and nothing overlaps with the products.
    Returns:
        y: [..., F/tp], of all tokens.
    Ranks: all of tp.
    Wire: with sequence parallelism x, (tp - 1) / tp of [N, C], forward and twice in backward;
        without, 2 * (tp - 1) / tp of [N, C] in backward.
    Raises:
        ValueError: shapes that do not match.
    """
    if tp is None:
        return linear(x, weight, bias, fp8=fp8)
    if tp.on_grid is not None:
        return tp.on_grid(x, weight, bias, fp8, column=True)
    _check_linear("column_linear", x, weight, bias)
    if fp8 is not None:
        fp8.check_split("column_linear", weight.shape[0], tp.size)
        whole = gather(x, x.dim() - 2, tp, partial=True) if tp.sequence_parallel else None
        return linear(copy_to(x, tp) if whole is None else whole, weight, bias, fp8=fp8)
    return _column(x, weight, bias, tp.number)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tp: TensorParallel | None = None,
    fp8: Fp8 | None = None,
) -> Tensor:
    """The sum over the ranks of x @ weight.T, plus the bias once; see the top of the file.

    Args:
        x: [..., F/tp], of all tokens.
        weight: [C, F/tp]; bias: [C].
        tp: None: the plain linear.
        fp8: as linear's.
    Returns:
        y: [..., C]; with sequence parallelism of this rank's tokens, [N/tp, C].
    Ranks: all of tp.
    Wire: with sequence parallelism (tp - 1) / tp of [N, C] forward and backward; without, twice
        that in forward.
    Raises:
        ValueError: shapes that do not match; tokens that tp does not divide.
    """
    if tp is None:
        return linear(x, weight, bias, fp8=fp8)
    if tp.on_grid is not None:
        return tp.on_grid(x, weight, bias, fp8, column=False)
    _check_linear("row_linear", x, weight, bias)
    if tp.sequence_parallel:
        _check_slices("row_linear", x, x.dim() - 2, tp)
    if fp8 is not None:
        fp8.check_split("row_linear", weight.shape[1], tp.size)
        y = linear(x, weight, fp8=fp8)
        sp = tp.sequence_parallel
        y = scatter(y, y.dim() - 2, tp, partial=True) if sp else reduce_from(y, tp)
        return y if bias is None else y + bias
    return _row(x, weight, bias, tp.number)


def _check_linear(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: expected x [..., N, C] and weight [F, C], got x={list(x.shape)} "
            f"weight={list(weight.shape)}; pass this rank's slice of the weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: expected bias [F] with weight [F, C], got bias={list(bias.shape)} "
            f"weight={list(weight.shape)}; pass this rank's slice of it"
        )
