"""Rotary positions of queries and keys (RoPE), with the norm of each head before.

    n = x * rstd * weight,  rstd = 1 / sqrt(mean(x * x) + eps)      if heads are normalized
    y1 = n1 cos - n2 sin,  y2 = n2 cos + n1 sin                     n1, n2: the halves of D features
    angle of pair i at position t: t * theta ** (-2 i / D)

A rotation keeps lengths, so that RoPE and then a norm without weights is the same. Angles, sines
and norms are in fp32 (fp64 tensors use the same fp32 sines, as other implementations do).
"""

import torch
from torch import Tensor

from fastpar.kernels.backend import wide
from fastpar.kernels.op import check_eps, check_float


def sines(positions: Tensor, theta: float, dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 [..., D/2] of positions [...]."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / theta ** (steps / dim))
    return angles.cos(), angles.sin()


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def rope(
    qkv: Tensor,
    positions: Tensor,
    theta: float | None,
    *,
    norm: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of attention from a packed projection.

    Args:
        qkv: [..., R + 2, G, D], fp32 | bf16 | fp16 | fp64: for each of G groups R heads of queries,
            keys and values; R is 1 without grouped heads.
        positions: int64, of a shape that broadcasts to [...].
        theta: base of the angles; None: no rotation.
        norm: RMSNorm over D of queries and keys first, with q_weight and k_weight [D] and eps.
    Returns:
        q [..., G * R, D], where head h belongs to group h // R; k, v [..., G, D].
    Raises:
        ValueError: another dtype; fewer than three groups of heads, or an odd D with theta.
    """
    check_float("rope", "qkv", qkv)
    if qkv.dim() < 3 or qkv.shape[-3] < 3 or (theta is not None and qkv.shape[-1] % 2):
        raise ValueError(
            "rope: expected qkv of shape [..., R + 2, G, D] with an even D, got "
            f"qkv={list(qkv.shape)}; unflatten the projection's last dimension"
        )
    check_eps("rope", eps)
    many = qkv.shape[-3] - 2
    q, k, v = (
        qkv[..., :many, :, :].transpose(-3, -2),
        qkv[..., many, :, :],
        qkv[..., many + 1, :, :],
    )
    q, k, dtype = q.flatten(-3, -2), k, wide(qkv.dtype)
    x, y = q.to(dtype), k.to(dtype)
    if norm:
        x, y = _normalized(x, q_weight, eps), _normalized(y, k_weight, eps)
    if theta is not None:
        cos, sin = (s.to(dtype)[..., None, :] for s in sines(positions, theta, qkv.shape[-1]))
        x, y = _turned(x, cos, sin), _turned(y, cos, sin)
    return x.to(qkv.dtype), y.to(qkv.dtype), v
