"""The orthogonal factor of a matrix, U V^T for X = U S V^T, by matrix products (Newton-Schulz).

    X <- X / |X|                       Frobenius norm: no singular value above 1
    each step:  A = X X^T,  X <- a X + (b A + c A^2) X

A step maps every singular value s to a s + b s^3 + c s^5 and leaves the singular vectors. With
POLAR_EXPRESS's five steps, values from 0.01 to 1 end between 0.87 and 1.13 (test_singular_values).
A matrix with more rows than columns is treated as its transpose, so that A is the smaller one.
A and A^2 are symmetric; computing one half of them in blocks of 128 to 384 rows gained nothing on a
CPU (768x768: 177 to 182 ms against 182 ms on one core), so products are full.

[Note: many at once] On a GPU matrices of one shape go through the steps together, in products of
batches: one of 768 x 768 has 36 tiles of 128 x 128 for more than 100 multiprocessors, and GPT-2
124M has 72 matrices of 25 launches each. Which algorithm the library takes, and so the bits, may
depend on how many there are; in deterministic mode they go one by one.

No gradient; nothing is saved. Temporary: two matrices like A and one like X.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.kernels.choice import ignores_times
from fastpar.kernels.global_norm import global_norm
from fastpar.kernels.linear import add_matmul_, matmul

Coefficients = Sequence[tuple[float, float, float]]
TOGETHER = 1 << 24  # elements of matrices that a GPU works on together, at most


# Amsel, Persson, Musco, Gower 2025, arXiv 2505.16932, algorithm 1, of p(s / 1.01): singular values
# that rounding put above 1 do not grow.
POLAR_EXPRESS: Coefficients = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
# Jordan et al. 2024, the Muon optimizer; torch.optim.Muon's.
QUINTIC = ((3.4445, -4.775, 2.0315),) * 5


def _step(x: Tensor, a: float, b: float, c: float) -> Tensor:
    if x.dim() == 3:
        gram = torch.bmm(x, x.mT)
        mixed = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        return torch.baddbmm(x, mixed, x, beta=a)
    gram = matmul(x, x.t())
    if x.is_cpu:
        mixed = matmul(gram, gram).mul_(c).add_(gram.mul_(b))
        return add_matmul_(x * a, mixed, x)
    mixed = torch.addmm(gram, gram, gram, beta=b, alpha=c)
    return torch.addmm(x, mixed, x, beta=a)


@torch.no_grad()
def orthogonalize(
    x: Tensor, *, coefficients: Coefficients = POLAR_EXPRESS, eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Approximates the nearest matrix with orthonormal rows or columns: singular values near 1.

    Args:
        x: [M, N], any floating dtype and strides.
        coefficients: (a, b, c) of each step.
        eps: lower bound of the norm that divides x; a zero matrix stays zero.
        dtype: of the products and the result; None: bf16 on CUDA, fp32 on a CPU, fp64 for fp64.
    Returns:
        [M, N], contiguous unless M > N. Non-finite entries of x make all of it nan.
    Raises:
        ValueError: another number of dims, dtype, or coefficients.
    Traffic: 3 products per step, 4 m^2 n + 2 m^3 FLOPs with m <= n.
    Deterministic: yes, bitwise; on a CPU with fastpar's products, for any number of threads.
    Oracle: fastpar.kernels.reference.orthogonalize_ref
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"orthogonalize: expected a floating-point matrix [M, N], got x={list(x.shape)} of "
            f"dtype={x.dtype}; pass one matrix at a time"
        )
    if not coefficients or any(len(each) != 3 for each in coefficients):
        raise ValueError(
            "orthogonalize: expected coefficients as (a, b, c) of at least one step, got "
            f"coefficients={coefficients}; use POLAR_EXPRESS"
        )
    return orthogonalize_each([x], coefficients=coefficients, eps=eps, dtype=dtype)[0]


def at_once(x: Tensor) -> int:
    """How many matrices like x go through the steps together; [Note: many at once]."""
    if not x.is_cuda or ignores_times():
        return 1
    return max(1, TOGETHER // max(1, x.numel()))


@torch.no_grad()
def orthogonalize_each(
    xs: Sequence[Tensor], *, coefficients: Coefficients = POLAR_EXPRESS, eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:  # fmt: skip
    """orthogonalize() of each."""
    found: list[Tensor] = [*xs]
    alike: dict[tuple, list[int]] = {}
    for i, x in enumerate(xs):
        alike.setdefault((*sorted(x.shape), x.dtype, x.device), []).append(i)
    for places in alike.values():
        n = at_once(xs[places[0]])
        for start in range(0, len(places), n):
            some = places[start : start + n]
            tall = [xs[i].shape[0] > xs[i].shape[1] for i in some]
            given = [xs[i].t() if is_tall else xs[i] for i, is_tall in zip(some, tall)]
            made = _together(given, coefficients, eps, dtype)
            for i, is_tall, y in zip(some, tall, made):
                found[i] = y.t() if is_tall else y
    return found


def _together(
    xs: list[Tensor], coefficients: Coefficients, eps: float, dtype: torch.dtype | None
) -> Sequence[Tensor]:
    """Of matrices of one shape with no more rows than columns."""
    x = xs[0]
    if dtype is None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        dtype = torch.bfloat16 if x.is_cuda and dtype == torch.float32 else dtype
    wide = torch.promote_types(dtype, torch.float32)
    y = (torch.stack(xs) if len(xs) > 1 else x).detach().to(wide)
    if wide == torch.float64 or y.dim() == 3:
        norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    else:
        norm = global_norm([y.contiguous()]).norm
    norm = norm + (norm - norm)  # nan where it is infinite
    y = (y / norm.clamp(min=eps)).to(dtype).contiguous()
    for a, b, c in coefficients if y.numel() else ():
        y = _step(y, a, b, c)
    return y.unbind() if y.dim() == 3 else [y]
