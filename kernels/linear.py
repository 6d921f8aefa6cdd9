"""Linear layer, and the matrix product that the other ops use.

    y = x @ weight.T + bias
    dx = dy @ weight,  dweight = dy.T @ x,  dbias = sum of dy over the rows

On CUDA, and in 16 bits, these are torch's own GEMMs. In fp32 on CPU torch calls MKL, which uses
AVX-512 on Intel machines only: on an EPYC 9005 its sgemm ran at 100 Gflop/s a core where oneDNN,
which is in the same torch, ran at 190 to 240. So on other makers' AVX-512 machines products that
are large enough go to oneDNN, by the op that torch.compile calls it with. It reads any strides.
Saved for backward: x and weight, the inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import backend
from fastpar.kernels.backend import has_onednn, refuse_double_backward

# Multiply-adds of a product from which oneDNN's host time (10 us a call) is won back: measured
# equal at 100^3 on one core.
_ONEDNN_FROM = 1 << 20


def use_onednn(x: Tensor, m: int, n: int, k: int) -> bool:
    """Whether an [M, K] @ [K, N] product of tensors like x goes to oneDNN."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and m * n * k >= _ONEDNN_FROM
        and backend.choice != "torch"
        and has_onednn
    )


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N], any strides. Outside autograd."""
    if use_onednn(a, a.shape[0], b.shape[1], a.shape[1]):
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y [..., F] of x [..., C] and weight [F, C]."""
    y = matmul(x.reshape(-1, x.shape[-1]), weight.t(), bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def linear_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; [0] for what is not needed."""
    rows, x_rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    none = x.new_empty(0)
    return (
        matmul(rows, weight).view(x.shape) if need_dx else none,
        matmul(rows.t(), x_rows) if need_dweight else none.clone(),
        rows.sum(0) if need_dbias else none.clone(),
    )


@torch.library.custom_op("fastpar::linear", mutates_args=(), device_types="cpu")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_fwd(x, weight, bias)


@torch.library.custom_op("fastpar::linear_bwd", mutates_args=(), device_types="cpu")
def _linear_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool, need_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return linear_bwd(dy, x, weight, need_dx, need_dweight, need_dbias)


@_linear.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_linear_bwd.register_fake
def _(dy, x, weight, need_dx, need_dweight, need_dbias):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight.shape if need_dweight else (0,)),
        x.new_empty((weight.shape[0],) if need_dbias else (0,)),
    )


def _setup_context(ctx, inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.need_dbias = bias is not None and ctx.needs_input_grad[2]


def _backward(ctx, dy):
    refuse_double_backward("linear")
    x, weight = ctx.saved_tensors
    needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.need_dbias)
    grads = _linear_bwd(dy, x, weight, *needed)
    return tuple(grad if need else None for grad, need in zip(grads, needed))


_linear.register_autograd(_backward, setup_context=_setup_context)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, drop-in for F.linear.

    Args:
        x: [..., C], any dtype that F.linear takes; strides are free.
        weight: [F, C], dtype of x.
        bias: [F], dtype of x, or None.
    Returns:
        y: [..., F]. x and weight are kept for backward.
    Raises:
        ValueError: shapes that do not fit.
        RuntimeError: a second derivative is asked for where oneDNN is used.
    Deterministic: yes, bitwise, for a given number of threads.
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
    rows = x.numel() // max(1, x.shape[-1])
    if use_onednn(x, rows, *weight.shape):
        return _linear(x, weight, bias)
    return F.linear(x, weight, bias)
