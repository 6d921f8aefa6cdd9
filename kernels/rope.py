"""Rotary positions of queries and keys (RoPE), with the norm of each head before.

    n = x * rstd * weight,  rstd = 1 / sqrt(mean(x * x) + eps)      if heads are normalized
    y1 = n1 cos - n2 sin,  y2 = n2 cos + n1 sin                     n1, n2: the halves of D features
    angle of pair i at position t: t * theta ** (-2 i / D)
    backward   dn = dy turned by the negative angle,  h = dn * weight,  m = x * rstd
               dx = rstd * (h - m * mean(h * m)),  dweight = sum of dn * m

A rotation keeps lengths, so that RoPE and then a norm without weights is the same. From the packed
projection to q, k and v, and from their gradients to the projection's, is one pass each; all of it
is in fp32. Saved for backward: the projection if heads are normalized (rstd is computed again), the
sines, weights. Gradients of weights sum fixed blocks of rows, the blocks in order. fp64 and
FASTPAR_BACKEND=torch are composed from torch ops.

Sines are a tensor, fp32 as in other implementations: the layers of a model share it.
"""

import torch
from torch import Tensor

from fastpar.kernels.backend import triton_module, use_cpp, use_triton, wide
from fastpar.kernels.op import check_dense, check_eps, check_float, check_vector, define_kernels


def sines(positions: Tensor, theta: float, dim: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) fp32 [..., D/2] of positions [...]."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / theta ** (steps / dim))
    return angles.cos(), angles.sin()


def rope_turns(positions: Tensor, theta: float, dim: int) -> Tensor:
    """What rope() turns heads of `dim` features by at these positions.

    Args:
        positions: [...], integers.
        theta: base of the angles.
    Returns:
        [..., dim] fp32: cosines, then sines.
    Oracle: fastpar.kernels.reference.rope_turns_ref
    """
    return torch.cat(sines(positions, theta, dim), -1)


def _check(
    qkv: Tensor, turns: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, norm: bool,
    eps: float,
) -> None:  # fmt: skip
    """csrc/torch/rope.cpp is_usual() allows the same."""
    check_float("rope", "qkv", qkv)
    if qkv.dim() < 3 or qkv.shape[-3] < 3 or 0 in qkv.shape[-2:]:
        raise ValueError(
            "rope: expected qkv of shape [..., R + 2, G, D] with R, G and D of at least 1, got "
            f"qkv={list(qkv.shape)}; unflatten the projection's last dimension"
        )
    if turns is not None:
        _check_turns(turns, qkv)
    if (q_weight is None) != (k_weight is None) or (q_weight is not None and not norm):
        given = [name for name, w in (("q", q_weight), ("k", k_weight)) if w is not None]
        raise ValueError(
            "rope: expected weights of queries and keys, with norm=True, got weights of "
            f"{' and '.join(given)} with norm={norm}; give both or none"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_vector("rope", name, weight, qkv)
    check_eps("rope", eps)


def _check_turns(turns: Tensor, qkv: Tensor) -> None:
    check_dense("rope", "turns", turns)
    lead, D = qkv.shape[:-3], qkv.shape[-1]
    dims = turns.dim() - 1
    fits = 0 <= dims <= len(lead) and turns.shape[-1] == D and D % 2 == 0
    rows = zip(turns.shape[:-1], lead[len(lead) - dims :])
    if not fits or any(n not in (1, m) for n, m in rows):
        raise ValueError(
            f"rope: expected turns [..., D] for the rows and the even D of qkv={list(qkv.shape)}, "
            f"got turns={list(turns.shape)}; make them by rope_turns(positions, theta, D)"
        )
    if turns.dtype != torch.float32 and turns.dtype != qkv.dtype:
        raise ValueError(
            f"rope: expected turns of float32, got turns={turns.dtype}; make them by "
            "rope_turns(positions, theta, D)"
        )
    if turns.device != qkv.device:
        raise ValueError(
            f"rope: expected turns on qkv's device {qkv.device}, got turns on {turns.device}; "
            "move one of them"
        )


# Triton's kernels; kernels/op.py define_kernels says for which calls.


def _run(qkv, turns, q_weight, k_weight, norm, eps):
    _check(qkv, turns, q_weight, k_weight, norm, eps)
    return triton_module("rope_triton").rope_fwd(qkv, turns, q_weight, k_weight, norm, eps)


def _fake(qkv, turns, q_weight, k_weight, norm, eps):
    _check(qkv, turns, q_weight, k_weight, norm, eps)
    *lead, many, G, D = qkv.shape
    return tuple(qkv.new_empty((*lead, heads, D)) for heads in ((many - 2) * G, G, G))


def _run_bwd(*args):
    return triton_module("rope_triton").rope_bwd(*args)


def _bwd_fake(dq, dk, dv, qkv, turns, q_weight, k_weight, norm, eps):
    *lead, G, D = dv.shape
    sums = (
        dv.new_empty(0, dtype=torch.float32) if w is None else w.new_empty(w.shape)
        for w in (q_weight, k_weight)
    )
    return dv.new_empty((*lead, dq.shape[-2] // G + 2, G, D)), *sums


_rope = define_kernels("rope", _run, _fake)
define_kernels("rope_bwd", _run_bwd, _bwd_fake)


# Composed of torch's ops.


def _normalized(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def _composed(qkv, turns, q_weight, k_weight, norm, eps):
    *q, k, v = qkv.unbind(-3)
    dtype = wide(qkv.dtype)
    x, y = torch.stack(q, -2).flatten(-3, -2).to(dtype), k.to(dtype)
    if norm:
        x, y = _normalized(x, q_weight, eps), _normalized(y, k_weight, eps)
    if turns is not None:
        cos, sin = turns.to(dtype)[..., None, :].chunk(2, -1)
        x, y = _turned(x, cos, sin), _turned(y, cos, sin)
    return x.to(qkv.dtype), y.to(qkv.dtype), v


def rope(
    qkv: Tensor,
    turns: Tensor | None,
    *,
    norm: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of attention from a packed projection, in one pass.

    Args:
        qkv: [..., R + 2, G, D], bf16 | fp16 | fp32 | fp64 (by torch ops): for each of G groups R
            heads of queries, keys and values; R is 1 without grouped heads.
        turns: of rope_turns(), [..., D] fp32 in a shape that broadcasts to the rows; None: no
            rotation.
        norm: RMSNorm over D of queries and keys first, with eps.
        q_weight, k_weight: of that norm, [D], dtype of qkv or fp32; None is 1 for both.
    Returns:
        q [..., G * R, D], where head h belongs to group h // R; k, v [..., G, D]. With norm, qkv is
        kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; weights without norm or
            of one of both; an odd D with turns.
        RuntimeError: a second derivative is requested.
    Traffic: 2 * qkv.numel() * qkv.element_size() bytes forward and backward, 3 * ... backward with
        norm.
    Deterministic: yes, bitwise, forward and backward, for any number of threads.
    Oracle: fastpar.kernels.reference.rope_ref
    Source: Su et al. 2021, arXiv 2104.09864; Henry et al. 2020, arXiv 2010.04245 (the norm)
    """
    given = qkv, turns, q_weight, k_weight, norm, eps
    if use_cpp("rope", qkv) or use_triton("rope", qkv):
        return _rope(*given)
    _check(*given)
    return _composed(*given)
