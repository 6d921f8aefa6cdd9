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
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import _C, backend
from fastpar.kernels.backend import has_bf16_gemm, has_gemm
from fastpar.kernels.choice import ignores_times, ignoring_times
from fastpar.kernels.op import define_autograd, define_op, goes_straight

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
    args = out, a, b, bias, accumulate
    (_gemm_run if goes_straight(args) else _gemm_op)(*args)


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


def wide_product(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a [M, K] @ b [K, N] of 16 bits in fp32, as it is summed; in `out`, or added to it."""
    if _use_gemm_for(a, b):
        if out is None:
            out = a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
        _gemm(a, b, out, None, accumulate=add)
        return out
    if a.device.type == "cpu":  # torch has it on CUDA
        product = a.float() @ b.float()
        return product if out is None else out.add_(product) if add else out.copy_(product)
    if out is None or not add:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., F] of x [..., C] and weight [F, C]."""
    y = matmul(x.reshape(-1, x.shape[-1]), weight.t(), bias=bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias; None for those not needed."""
    rows, x_rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return (
        matmul(rows, weight).view(x.shape) if need_dx else None,
        matmul(rows.t(), x_rows) if need_dweight else None,
        rows.sum(0) if need_dbias else None,
    )


def _bwd_fake(dy, x, weight, *needed):
    shapes = zip(needed, (x.shape, weight.shape, weight.shape[:1]))
    return tuple(x.new_empty(shape if need else (0,)) for need, shape in shapes)


_linear = define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear_fwd,
    lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]), ("CPU",),
)  # fmt: skip
_linear_bwd = define_op(
    "linear_bwd(Tensor dy, Tensor x, Tensor weight, bool need_dx, bool need_dweight, "
    "bool need_dbias) -> (Tensor, Tensor, Tensor)", linear_bwd, _bwd_fake, ("CPU",),
)  # fmt: skip


def _setup_context(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.need_dbias = bias is not None and ctx.needs_input_grad[2]


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.need_dbias)
    grads = _linear_bwd(dy, x, weight, *needed)
    return tuple(grad if need else None for grad, need in zip(grads, needed))


define_autograd(_linear, _setup_context, _backward, once="linear")


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
        RuntimeError: a second derivative is requested and the product is our own.
    Traffic: x, weight, bias and y once, if the blocks fit into the machine's caches.
    Deterministic: yes, bitwise; our own products for any number of threads.
    Oracle: fastpar.kernels.reference.linear_ref
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: expected x [..., C] and weight [F, C], got x={list(x.shape)} "
            f"weight={list(weight.shape)}; pass the weight as F.linear takes it"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: expected bias [F] with weight [F, C], got bias={list(bias.shape)} "
            f"weight={list(weight.shape)}; pass one bias for each row of weight"
        )
    if fp8 is not None:
        return fp8.linear(x, weight, bias)
    if (has_gemm or x.dtype != torch.float32) and _is_ours(x, weight):
        return _linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Whether the op runs, because some of its products are ours: at least dweight's."""
    return use_gemm(x, x.numel() // max(1, x.shape[-1]), *weight.shape, turned=True)
