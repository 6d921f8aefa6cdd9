"""Bias + GELU.

u = x + bias, then
    tanh form  y = 0.5 * u * (1 + tanh(k * (u + 0.044715 * u^3))),  k = sqrt(2 / pi)
    erf form   y = 0.5 * u * (1 + erf(u / sqrt(2)))
    backward   dx = dy * y'(u),  dbias = sum of dx over the rows

The compiled tanh form (C++) and both forms in Triton are one pass each way. The tanh form is
evaluated as u * sigmoid(2k(u + 0.044715u^3)), the same function with one exp and one division; on
CPU the erf form is torch's. Saved for backward: x and bias, the inputs, so that nothing extra is
kept; u and the sigmoid are recomputed. dbias sums fixed blocks of rows, the blocks in order, so its
bits depend neither on threads nor on the run. Tile sizes of the Triton kernels per GPU:
gelu_configs.json is arch -> Config; see config_table.py.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.backend import triton_module, use_cpp, use_triton
from fastpar.kernels.config_table import ConfigTable
from fastpar.kernels.linear import linear
from fastpar.kernels.op import check_float, check_vector, define_autograd, define_kernels, define_op


class Config(NamedTuple):
    """Tile and occupancy of one architecture. Bandwidth times latency, by the data sheets: an H200
    needs about 25 KB in flight per multiprocessor, an A100 12 KB. A program of backward loads 8 KB
    at a time with 2048 elements; its 80 to 96 registers per thread let five be resident."""

    tile: int  # elements a program has in flight
    num_warps: int
    programs_per_sm: int  # of backward, all resident at once


def candidates(arch: int) -> list[Config]:
    """Configs worth timing: 8 to 32 elements per thread."""
    found = itertools.starmap(Config, itertools.product((1024, 2048, 4096), (4, 8), (3, 4, 5, 6)))
    return [config for config in found if 8 <= config.tile // (32 * config.num_warps) <= 32]


TABLE = ConfigTable("gelu_configs", Config, candidates)

_FORMS = ("none", "tanh")  # torch's names, by whether it is the tanh form


def _pre_activation(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else (x + bias).to(x.dtype)


def _check(x: Tensor, bias: Tensor | None) -> None:
    """csrc/torch/gelu.cpp is_usual() allows the same."""
    check_float("bias_gelu", "x", x)
    if bias is not None:
        check_vector("bias_gelu", "bias", bias, x)


def _run(x, bias, tanh):
    """Triton's kernel; kernels/op.py define_kernels says for which calls."""
    _check(x, bias)
    return triton_module("gelu.triton").bias_gelu_fwd(x, bias, tanh)


def _fake(x, bias, tanh):
    _check(x, bias)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _bwd_fake(dy, x, bias, tanh):
    like = x.new_empty(0, dtype=torch.float32) if bias is None else bias
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, like))


_bias_gelu = define_kernels("bias_gelu", _run, _fake)
define_kernels(
    "bias_gelu_bwd", lambda *args: triton_module("gelu.triton").bias_gelu_bwd(*args), _bwd_fake
)


# Composed of torch's ops.


def composed_fwd(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """y = gelu(x + bias), contiguous."""
    return F.gelu(_pre_activation(x, bias).contiguous(), approximate=_FORMS[tanh])


def composed_bwd(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    """dx and dbias ([0] fp32 without a bias), contiguous."""
    u = _pre_activation(x, bias).contiguous()
    dx = torch.ops.aten.gelu_backward(dy.contiguous(), u, approximate=_FORMS[tanh])
    if bias is None:
        return dx, x.new_empty(0, dtype=torch.float32)
    rows = dx.reshape(-1, dx.shape[-1]) if dx.numel() else dx.new_zeros(1, dx.shape[-1])
    wide = torch.promote_types(dx.dtype, torch.float32)  # 16-bit sums are kept in fp32
    return dx, rows.sum(0, dtype=wide).to(bias.dtype)


_composed = define_op(
    "bias_gelu_composed(Tensor x, Tensor? bias, bool tanh) -> Tensor", composed_fwd, _fake
)
_composed_bwd = define_op(
    "bias_gelu_composed_bwd(Tensor dy, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    composed_bwd,
    _bwd_fake,
)


def _setup_context(ctx, inputs, output):
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, dy):
    x, bias = ctx.saved_tensors
    dx, dbias = _composed_bwd.after(dy)(dy, x, bias, ctx.tanh)
    return dx, None if bias is None else dbias, None


define_autograd(_composed, _setup_context, _backward, once="bias_gelu")


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """GELU of x + bias in one pass: y = gelu(x + bias).

    Args:
        x: [..., C], bf16 | fp16 | fp32; fp64 by torch, which rounds the last numel % 16 elements
            differently.
        bias: [C], dtype of x or fp32, on x's device, or None.
        approximate: "tanh" (GPT-2's) or "none" (the erf form).
    Returns:
        y: shape and dtype of x. x and bias are kept for backward.
    Raises:
        ValueError: bias is not [C], of another dtype or on another device; x has no floating
            dtype; approximate is neither form.
        RuntimeError: a second derivative is requested.
    Traffic: 2 * x.numel() * x.element_size() bytes forward, 3 * ... backward.
    Deterministic: yes, bitwise, forward and backward, for any number of threads.
    Oracle: fastpar.kernels.reference.bias_gelu_ref
    Source: Hendrycks, Gimpel 2016, arXiv 1606.08415
    """
    if approximate not in ("tanh", "none"):
        raise ValueError(
            f"bias_gelu: expected tanh or none, got approximate={approximate}; "
            "GPT-2 uses tanh, torch's default is none"
        )
    tanh = approximate == "tanh"
    if (use_cpp("bias_gelu", x) and tanh) or use_triton("bias_gelu", x):
        return _bias_gelu(x, bias, tanh)
    _check(x, bias)
    return _composed(x, bias, tanh)


def gelu_mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """gelu(x @ weight1.T + bias1) @ weight2.T + bias2 by linear, bias_gelu (tanh form) and linear.

    Args:
        x: [..., C]; weight1: [F, C]; bias1: [F] or None.
        weight2: [G, F]; bias2: [G] or None.
    Returns:
        y: [..., G]. x, the weights and two tensors [..., F] are kept for backward.
    Raises:
        ValueError, RuntimeError: as these ops.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.gelu_mlp_ref
    """
    return linear(bias_gelu(linear(x, weight1), bias1), weight2, bias2)
