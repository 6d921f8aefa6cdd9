"""Linear layer, and the matrix product that the other ops use.

    y = x @ weight.T + bias
    dx = dy @ weight,  dweight = dy.T @ x,  dbias = sum of dy over the rows

On CUDA these are torch's own GEMMs: with GELU or sums over rows in cublasLt's epilogues forward and
backward took longer in total (an H200, C=768). In fp32 on CPU torch calls MKL, which uses AVX-512
on Intel machines only. On other makers' the products are our own (csrc/gemm_cpu.cpp): at GPT-2's
shapes on one EPYC 9005 core 190 to 220 Gflop/s against MKL's 100, of any strides. oneDNN is as fast
but sums in one long chain: its error is 2 to 3 times MKL's, ours is below MKL's.
Saved for backward: x and weight, the inputs.

[Note: bf16 on AMX] Our products (csrc/gemm_cpu.cpp) run where they are faster: oneDNN's time
divided by ours, one Intel CPU, 1024 rows:
                       C = 384: one thread   two      C = 768: one thread   two
    forward, dx        0.64 to 0.93   0.72 to 1.01    0.66 to 0.90   1.07 to 2.06
    dweight            1.05 to 1.08   1.09 to 1.27    1.04 to 1.16   1.27 to 1.51
Ours have the same bits for any threads, rows and strides; oneDNN's do not.
"""

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import _C, backend
from fastpar.kernels.backend import has_bf16_gemm, has_gemm
from fastpar.kernels.choice import ignores_times, ignoring_times
from fastpar.kernels.op import COMPILED, define_op, is_eager, is_plain

if TYPE_CHECKING:
    from fastpar.kernels.linear.fp8 import Fp8

# Multiply-adds of a product above which ours is faster than MKL's: measured equal at 64^3.
_OURS_FROM = 1 << 18
# The same for bf16, see [Note: bf16 on AMX].
_TILE = 32  # rows and columns that are computed at once
_WIDE = 768


def use_gemm(x: Tensor, m: int, n: int, k: int, *, turned: bool = False) -> bool:
    """Whether an [M, K] @ [K, N] product of tensors like x is our own; turned: the columns of the
    left matrix are contiguous, as in a weight's gradient. In deterministic mode the bits must not
    depend on threads: every fp32 product is ours then, and a bf16 one for any number of them."""
    if not x.is_cpu or backend.choice == "torch":
        return False
    large = m * n * k >= _OURS_FROM
    if x.dtype != torch.bfloat16:
        ours = has_gemm and x.dtype == torch.float32
        return ours and (large or (m * n * k > 0 and ignores_times()))
    if not (has_bf16_gemm and large) or min(m, n) < _TILE:
        return False
    if turned or ignores_times():
        return True
    return min(n, k) >= _WIDE and torch.get_num_threads() > 1


def _use_gemm_for(a: Tensor, b: Tensor) -> bool:
    return a.is_cpu and use_gemm(a, a.shape[0], b.shape[1], a.shape[1], turned=a.stride(0) == 1)


def _gemm_run(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    if bias is not None:
        bias = bias.contiguous()
    _C.gemm(a, b, out, accumulate, bias, torch.get_num_threads())


_gemm_op = define_op(
    "gemm_(Tensor(a!) out, Tensor a, Tensor b, Tensor? bias, bool accumulate) -> ()", _gemm_run,
    devices=("CPU",),
)  # fmt: skip


def _gemm(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, accumulate: bool) -> None:
    """Our product, also outside of the ops below: in whoever's backward."""
    straight = is_eager() and all(x is None or is_plain(x) for x in (out, a, b, bias))
    (_gemm_run if straight else _gemm_op)(out, a, b, bias, accumulate)


def matmul(
    a: Tensor, b: Tensor, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N], any strides, outside autograd; in `out` (rows contiguous)."""
    if not _use_gemm_for(a, b):
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    _gemm(a, b, out, bias, accumulate=False)
    return out


def add_matmul_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """out [M, N] += a [M, K] @ b [K, N], any strides of a and b, outside autograd."""
    if not _use_gemm_for(a, b):
        return torch.addmm(out, a, b, out=out)
    _gemm(a, b, out, None, accumulate=True)
    return out


# [M, K] @ [K, N] that depends_on_threads tries. Libraries have other code for few rows or columns
# and for remainders, and choose it by the number of threads, too.
_TRIED = tuple(itertools.product((3, 7, 10, 97), (32, 1024), (13, 33, 100)))


@functools.cache
def depends_on_threads(dtype: torch.dtype) -> str:
    """A product of _TRIED, as "[7, 32] @ [32, 13]", that in deterministic mode has different bits
    with two threads than with one on this CPU; "" if there is none.

    Sums cancel: the rest is their rounding, which shows the order in 16 bits too."""
    random = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    try:
        for m, k, n in _TRIED:
            drawn = torch.randn(m + n, k // 2, generator=random, dtype=torch.float32, device="cpu")
            x, weight = drawn.split((m, n))
            order = torch.randperm(k, generator=random, device="cpu")
            x = torch.cat([x, -x], 1)[:, order].to(dtype)
            weight = torch.cat([weight, weight], 1)[:, order].to(dtype)
            found = []
            for count in (1, 2):
                torch.set_num_threads(count)
                with ignoring_times():
                    found.append(matmul(x, weight.t()))
            if not torch.equal(*found):
                return f"[{m}, {k}] @ [{k}, {n}]"
    finally:
        torch.set_num_threads(threads)
    return ""


WIDE_ROWS = 4096  # that are multiplied in fp32 at a time


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] of 16 bits in fp32, as it is summed; added to `out`, if given."""
    if _use_gemm_for(a, b):
        adds = out is not None
        out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32) if out is None else out
        _gemm(a, b, out, None, accumulate=adds)
        return out
    if a.device.type == "cpu":
        if out is None:
            out = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float32)
        wide = b.float()
        for rows, part in zip(out.split(WIDE_ROWS), a.split(WIDE_ROWS)):
            rows.addmm_(part.float(), wide)
        return out
    if out is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


_linear: Any = F.linear
if _C is not None:
    _linear = torch.ops.fastpar.linear.default
    COMPILED.update(("linear", "linear_bwd"))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, fp8: "Fp8 | None" = None
) -> Tensor:
    """x @ weight.T + bias, drop-in for F.linear.

    Args:
        x: [..., C], any dtype that F.linear takes (fp64 too); strides are free.
        weight: [F, C], dtype of x.
        bias: [F], dtype of x, or None.
        fp8: how to round the products' operands to 8 bits, in forward and backward; fp8.py.
    Returns:
        y: [..., F]. x (with fp8 its codes) and weight are kept for backward.
    Raises:
        ValueError: shapes that do not fit; fp8 with C or F not a multiple of 16, or on a device
            without such products and without emulate.
    Traffic: x, weight, bias and y once, if the blocks fit into the machine's caches.
    Deterministic: yes, bitwise; our own products for any number of threads.
    Oracle: fastpar.kernels.reference.linear_ref
    """
    if fp8 is not None:
        return fp8.linear(x, weight, bias)
    return _linear(x, weight, bias)
