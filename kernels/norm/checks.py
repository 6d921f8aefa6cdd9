"""What the norms refuse: shapes, dtypes and devices of rows and of the vectors beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from fastpar.kernels.backend import FLOATS
from fastpar.kernels.op import check_float

MAX_COLUMNS = 16384


def check(name: str, x: Tensor, **vectors: Tensor | None) -> None:
    """x is [..., C] with 1 <= C <= MAX_COLUMNS; each vector is [C], of x's dtype or fp32."""
    check_float(name, "x", x)
    c = x.shape[-1] if x.dim() else 0
    if not 1 <= c <= MAX_COLUMNS:
        raise ValueError(
            f"{name}: expected x of shape [..., C] with 1 <= C <= {MAX_COLUMNS}, got "
            f"x={list(x.shape)}; normalize narrower rows"
        )
    for key, vector in vectors.items():
        if vector is None:
            continue
        if vector.shape != (c,):
            raise ValueError(
                f"{name}: expected {key} of shape [C]=[{c}], got {key}={list(vector.shape)}; "
                "it goes with x's last dimension"
            )
        if vector.dtype != x.dtype and vector.dtype != torch.float32:
            raise ValueError(
                f"{name}: expected {key} of x's dtype {x.dtype} or float32, got "
                f"{key}={vector.dtype}; cast one of them"
            )
        if vector.device != x.device:
            raise ValueError(
                f"{name}: expected {key} on x's device {x.device}, got {key} on {vector.device}; "
                "move one of them"
            )


def is_usual(x: Tensor, residual: Tensor | None, *vectors: Tensor | None) -> bool:
    """Whether all are of one dtype and device and of the right shapes: what check and
    check_residual look at one by one is right then."""
    dtype, device, shape = x.dtype, x.device, x.shape
    if residual is not None and (
        residual.dtype != dtype or residual.shape != shape or residual.device != device
    ):
        return False
    row = shape[-1:]
    for v in vectors:
        if v is not None and (v.shape != row or v.dtype != dtype or v.device != device):
            return False
    return dtype in FLOATS and len(row) == 1 and 1 <= row[0] <= MAX_COLUMNS and not x.is_sparse


def check_residual(
    name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_bias: Tensor | None,
) -> None:
    """x like residual, or narrower; vectors as check() wants them."""
    check(name, residual, weight=weight, bias=bias)
    if x.shape != residual.shape:
        raise ValueError(
            f"{name}: expected x and residual of one shape, got x={list(x.shape)} "
            f"residual={list(residual.shape)}; they are added element by element"
        )
    narrow = residual.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    if x.dtype != residual.dtype and not narrow:
        raise ValueError(
            f"{name}: expected x of residual's dtype {residual.dtype}, or 16 bits with a float32 "
            f"residual, got x={x.dtype}; cast one of them"
        )
    if x.device != residual.device:
        raise ValueError(
            f"{name}: expected x on residual's device {residual.device}, got x on {x.device}; "
            "move one of them"
        )
    if x_bias is not None:
        check(name, x, x_bias=x_bias)
