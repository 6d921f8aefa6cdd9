"""The activations of MLPs, with the bias of the linear before.

u = x + bias, then
    gelu       y = 0.5 * u * (1 + tanh(k * (u + 0.044715 * u^3))),  k = sqrt(2 / pi)
    gelu_erf   y = 0.5 * u * (1 + erf(u / sqrt(2)))
    relu2      y = max(u, 0)^2
    swiglu     y = gate * sigmoid(gate) * up,  u = [gate, up]
    backward   dx = dy * y'(u),  dbias = sum of dx over the rows

All but the compiled erf form (on CPU it is torch's) are one pass each way, in C++ and in Triton.
The tanh form is evaluated as u * sigmoid(2k(u + 0.044715u^3)), the same function with one exp and
one division. Saved for backward: x and bias, the inputs, so that nothing extra is kept; u and the
sigmoid are recomputed. dbias sums fixed blocks of rows, the blocks in order, so its bits depend
neither on threads nor on the run. Tile sizes of the Triton kernels per GPU: activation_configs.json
is arch -> Config; see config_table.py.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.backend import triton_module, use_cpp, use_triton
from fastpar.kernels.config_table import ConfigTable
from fastpar.kernels.op import check_float, check_vector, define_kernels


class Config(NamedTuple):
    """Tile and occupancy of one architecture. Bandwidth times latency, by the data sheets: an H200
    needs about 25 KB in flight per multiprocessor, an A100 12 KB. A program of backward has 8 KB in
    flight all the time with 2048 elements; its 72 to 96 registers per thread let five be
    resident."""

    tile: int  # elements a program has in flight
    num_warps: int
    programs_per_sm: int  # of backward, all resident at once


def candidates(arch: int) -> list[Config]:
    """Configs worth timing: 8 to 32 elements per thread."""
    found = itertools.starmap(Config, itertools.product((1024, 2048, 4096), (4, 8), (3, 4, 5, 6)))
    return [config for config in found if 8 <= config.tile // (32 * config.num_warps) <= 32]


TABLE = ConfigTable("activation_configs", Config, candidates)

KINDS = ("gelu", "gelu_erf", "relu2", "swiglu")  # the op takes their numbers
GELU, GELU_ERF, RELU2, SWIGLU = range(4)
_FORMS = ("tanh", "none")  # of GELU, torch's names


def _check(x: Tensor, bias: Tensor | None, kind: int) -> None:
    """csrc/torch/activation.cpp is_usual() allows the same."""
    name = "bias_gelu" if kind < RELU2 else "activation"
    check_float(name, "x", x)
    if kind == SWIGLU and (not x.dim() or x.shape[-1] % 2):
        raise ValueError(
            f"activation: expected x of shape [..., 2 * F] with swiglu, got x={list(x.shape)}; "
            "gate and up are its halves"
        )
    if bias is not None:
        check_vector(name, "bias", bias, x)


def _run(x, bias, kind):
    """Triton's kernel; kernels/op.py define_kernels says for which calls."""
    _check(x, bias, kind)
    return triton_module("activation.triton").activation_fwd(x, bias, kind)


def _fake(x, bias, kind):
    _check(x, bias, kind)
    if kind == SWIGLU:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _bwd_fake(dy, x, bias, kind):
    like = x.new_empty(0, dtype=torch.float32) if bias is None else bias
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, like))


_activation = define_kernels("activation", _run, _fake)
define_kernels(
    "activation_bwd",
    lambda *args: triton_module("activation.triton").activation_bwd(*args),
    _bwd_fake,
)


def _composed(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    """Of torch's ops."""
    u = x if bias is None else (x + bias).to(x.dtype)
    if kind < RELU2:
        return F.gelu(u, approximate=_FORMS[kind])
    if kind == RELU2:
        return F.relu(u).square()
    gate, up = u.chunk(2, -1)
    return F.silu(gate) * up


def activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """The activation of x + bias in one pass.

    Args:
        x: [..., F], with swiglu [..., 2 * F]: the gates, then what they multiply. bf16 | fp16 |
            fp32; fp64 by torch.
        bias: of x's last dimension, dtype of x or fp32, on x's device, or None.
        kind: "gelu" (tanh form), "gelu_erf", "relu2" or "swiglu"; formulas at the top of the file.
    Returns:
        y: [..., F], dtype of x. x and bias are kept for backward.
    Raises:
        ValueError: another kind; an odd last dimension with swiglu; bias of another shape, dtype or
            device; x has no floating dtype.
        RuntimeError: a second derivative is requested of a kernel (torch's erf form has it).
    Traffic: 2 * x.numel() * x.element_size() bytes forward, 3 * ... backward; swiglu 1.5, 2.5.
    Deterministic: yes, bitwise, forward and backward, for any number of threads.
    Oracle: fastpar.kernels.reference.activation_ref
    Source: So et al. 2021, arXiv 2109.08668 (relu2); Shazeer 2020, arXiv 2002.05202 (swiglu)
    """
    if kind not in KINDS:
        raise ValueError(
            f"activation: expected one of {', '.join(KINDS)}, got kind={kind}; choose one"
        )
    number = KINDS.index(kind)
    op = "bias_gelu" if number < RELU2 else kind
    if (use_cpp(op, x) and number != GELU_ERF) or use_triton(op, x):
        return _activation(x, bias, number)
    _check(x, bias, number)
    return _composed(x, bias, number)


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
        RuntimeError: a second derivative is requested of a kernel (torch's erf form has it).
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
    return activation(x, bias, "gelu" if approximate == "tanh" else "gelu_erf")
