"""Linear layers of several experts: each processes its own rows.

    y = x @ weight[g % E].T + bias[g % E]           for the rows of group g
    dx = dy @ weight[g % E],  dweight[e] = sum over its groups of dy.T @ x,  dbias[e] likewise

counts [S, E] is the number of rows of group s * E + e; groups are stored one after another. S is 1,
or the number of ranks that sent rows: the rows of each rank stay together.

[Note: rows of others] The products run group by group, so a row's bits depend only on the rows of
its own group. The ranks of an expert-parallel run therefore compute what one process does with the
same micro-batch, whatever the GEMM does with other numbers of rows. For the same reason a function
set as weight.apart gets the gradients [S, E, F, C] of the separate groups: sums over the
micro-batches of several ranks have one order (fastpar/axes/experts/__init__.py).

On a CPU the products are matmul's (linear). On CUDA, in bf16, torch's grouped product runs if a
proof at first use found it right and faster and S is 1, without the host knowing the counts.
Saved for backward: x, weight, counts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import backend
from fastpar.kernels.choice import is_proven, is_real
from fastpar.kernels.linear import add_matmul_, matmul
from fastpar.kernels.op import define_autograd, define_op


def use_grouped(x: Tensor, weight: Tensor, counts: Tensor) -> bool:
    """Whether torch's grouped product serves tensors like these."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or backend.choice != "auto" or not is_real(x):
        return False
    fits = counts.dim() == 1 or counts.shape[0] == 1
    fits = fits and len(x) > 0 and x.is_contiguous() and not any(n % 8 for n in weight.shape[1:])
    return fits and hasattr(F, "grouped_mm") and is_proven("grouped_linear", x)


def _groups(counts: Tensor, n_expert: int) -> list[tuple[int, slice]]:
    """(expert, its rows) of each group. The host waits for the counts here."""
    found, start = [], 0
    for g, count in enumerate(counts.flatten().tolist()):
        found.append((g % n_expert, slice(start, start + count)))
        start += count
    return found


def _expert_of_rows(x: Tensor, ends: Tensor) -> Tensor:
    return torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)


def grouped_linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """y [M, F] of x [M, C], weight [E, F, C] and bias [E, F]."""
    if use_grouped(x, weight, counts):
        ends = counts.flatten().cumsum(0)
        y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.int())
        if bias is not None:
            y += bias[_expert_of_rows(x, ends)]
        return y
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in _groups(counts, len(weight)):
        if rows.stop > rows.start:
            b = None if bias is None else bias[e]
            matmul(x[rows], weight[e].t(), bias=b, out=y[rows])
    return y


def _bwd_grouped(dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor, need: list[bool]) -> tuple:
    offs, dbias = counts.flatten().cumsum(0).int(), x.new_empty(0)
    if need[2]:
        numbers = torch.arange(len(weight), device=x.device)
        dbias = (_expert_of_rows(x, offs)[None] == numbers[:, None]).to(dy.dtype) @ dy
    return (
        F.grouped_mm(dy, weight, offs=offs) if need[0] else x.new_empty(0),
        F.grouped_mm(dy.t(), x, offs=offs) if need[1] else x.new_empty(0),
        dbias,
    )


def grouped_linear_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor, need: list[bool], apart: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; [0] for those not needed. apart: the last two as [S, E, ...]."""
    dy = dy.contiguous()
    if use_grouped(x, weight, counts) and not apart:
        return _bwd_grouped(dy, x, weight, counts, need)
    n, sources = len(weight), counts.numel() // len(weight) if apart else 1
    dx = torch.empty_like(x) if need[0] else x.new_empty(0)
    dweight = x.new_zeros((sources, *weight.shape) if need[1] else (0,))
    dbias = x.new_zeros((sources, *weight.shape[:2]) if need[2] else (0,))
    for g, (e, rows) in enumerate(_groups(counts, n)):
        if rows.stop == rows.start:
            continue
        source = g // n if apart else 0
        if need[0]:
            matmul(dy[rows], weight[e], out=dx[rows])
        if need[1]:
            add_matmul_(dweight[source, e], dy[rows].t(), x[rows])
        if need[2]:
            dbias[source, e] += dy[rows].sum(0)
    if apart:
        return dx, dweight, dbias
    return dx, dweight[0] if need[1] else dweight, dbias[0] if need[2] else dbias


def summed(parts: Tensor) -> Tensor:
    """The sum over the first dimension as a pairwise tree: ((0 + 1) + (2 + 3)) + ..., in place."""
    n, step = parts.shape[0], 1
    while step < n:
        for left in range(0, n - step, 2 * step):
            parts[left].add_(parts[left + step])
        step *= 2
    return parts[0] if n == 1 else parts[0].clone()


def _bwd_fake(dy, x, weight, counts, need, apart):
    lead = (counts.numel() // weight.shape[0],) if apart else ()
    shapes = (*lead, *weight.shape), (*lead, *weight.shape[:2])
    sums = (x.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, need[1:]))
    return torch.empty_like(x) if need[0] else x.new_empty(0), *sums


_grouped_linear = define_op(
    "grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor counts) -> Tensor",
    grouped_linear_fwd,
    lambda x, weight, bias, counts: x.new_empty(x.shape[0], weight.shape[1]),
)
_grouped_linear_bwd = define_op(
    "grouped_linear_bwd(Tensor dy, Tensor x, Tensor weight, Tensor counts, bool[] need, bool apart)"
    " -> (Tensor, Tensor, Tensor)",
    grouped_linear_bwd,
    _bwd_fake,
)


def _setup_context(ctx, inputs, output):
    x, weight, bias, counts = inputs
    ctx.takers = tuple(None if p is None else getattr(p, "apart", None) for p in (weight, bias))
    ctx.save_for_backward(x, weight, counts)


def _backward(ctx, dy):
    need = list(ctx.needs_input_grad[:3])
    apart = any(take is not None for take in ctx.takers)
    grads = list(_grouped_linear_bwd(dy, *ctx.saved_tensors, need, apart))
    if apart:
        for i, take in enumerate(ctx.takers, 1):
            if need[i] and take is not None:
                take(grads[i])
            grads[i] = summed(grads[i].clone()) if need[i] else grads[i]
    return *(grad if needed else None for grad, needed in zip(grads, need)), None


define_autograd(_grouped_linear, _setup_context, _backward, once="grouped_linear")


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Each group of rows times its expert's weight; see the top of the file.

    Args:
        x: [M, C], rows of the groups one after another.
        weight: [E, F, C], dtype of x; bias: [E, F], or None.
        counts: [E] or [S, E] int64, rows of each group; their sum is M.
    Returns:
        y: [M, F].
    Raises:
        ValueError: shapes that do not fit; on a CPU also counts whose sum is not M.
        RuntimeError: a second derivative is requested.
    Traffic: x, y and the weights of groups with rows once.
    Deterministic: yes, bitwise; a row's bits depend on its group alone if the products are
        matmul's.
    Oracle: fastpar.kernels.reference.grouped_linear_ref
    """
    fits = x.dim() == 2 and weight.dim() == 3 and x.shape[1] == weight.shape[2]
    if not fits or counts.shape[-1:] != weight.shape[:1]:
        raise ValueError(
            "grouped_linear: expected x [M, C], weight [E, F, C] and counts [..., E], got "
            f"x={list(x.shape)} weight={list(weight.shape)} counts={list(counts.shape)}; pass one "
            "weight and one count for each expert"
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ValueError(
            f"grouped_linear: expected bias [E, F] with weight [E, F, C], got "
            f"bias={list(bias.shape)} weight={list(weight.shape)}; pass one bias for each expert"
        )
    if counts.is_cpu and is_real(counts) and int(counts.sum()) != len(x):
        raise ValueError(
            f"grouped_linear: expected counts of the {len(x)} rows of x, got counts that add up to "
            f"{int(counts.sum())}; pass the counts that permute() returned"
        )
    return _grouped_linear(x, weight, bias, counts)
