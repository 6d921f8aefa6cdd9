"""The orthogonal factor of a matrix, U V^T for X = U S V^T, by matrix products (Newton-Schulz).

    X <- X / |X|                       Frobenius norm: no singular value above 1
    each step:  A = X X^T,  X <- a X + (b A + c A^2) X

A step maps every singular value s to a s + b s^3 + c s^5 and leaves the singular vectors. With
POLAR_EXPRESS's five steps, values from 0.01 to 1 end between 0.87 and 1.13 (test_singular_values).
A matrix with more rows than columns is treated as its transpose, so that A is the smaller one.
A and A^2 are symmetric; computing one half of them in blocks of 128 to 384 rows gained nothing on a
CPU (768x768: 177 to 182 ms against 182 ms on one core), so products are full.

No gradient; nothing is saved. Temporary: two matrices like A and one like X.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.kernels.global_norm import global_norm
from fastpar.kernels.linear import add_matmul_, matmul

Coefficients = Sequence[tuple[float, float, float]]


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
    if dtype is None:
        wide = torch.promote_types(x.dtype, torch.float32)
        dtype = torch.bfloat16 if x.is_cuda and wide == torch.float32 else wide
    wide = torch.promote_types(dtype, torch.float32)
    y = x.detach().to(wide)
    if wide == torch.float64:
        norm = torch.linalg.vector_norm(y)
    else:
        norm = global_norm([y.contiguous()]).norm
    norm = norm + (norm - norm)  # nan where it is infinite
    y = (y / norm.clamp(min=eps)).to(dtype)
    transposed = y.shape[0] > y.shape[1]
    y = (y.t() if transposed else y).contiguous()
    for a, b, c in coefficients if y.numel() else ():
        y = _step(y, a, b, c)
    return y.t() if transposed else y
