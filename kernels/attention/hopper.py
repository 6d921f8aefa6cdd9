"""What the Hopper kernels of attention (attention_hopper_triton.py, attention_hopper_bwd_triton.py)
can serve, and their calls.

They are alternatives to attention_triton.py's forward and to attention_bwd_triton.py's dk and dv,
each with the other's o and lse; attention_peers.py offers them. On one H200 both were right at all
lengths from 2 to 2,048; at 32 x 1,024 tokens and 12 heads of 64 the whole backward took 0.438 ms
with this dk and dv and 0.521 without.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

_HEAD_DIMS = (64, 128)
_DTYPES = (torch.bfloat16, torch.float16)


def _gluon_found() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ModuleNotFoundError:  # no triton at all, or one before Gluon
        return False


def refusal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    dropout: bool = False,
    documents: bool = False,
) -> str:
    """Why attention_forward_hopper cannot serve such a call; "" if it can."""
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    if arch != (9, 0):
        return "needs a GPU of sm_90 (H100, H200)"
    if not _gluon_found():
        return "needs Triton 3.6 or later, with triton.experimental.gluon"
    if dropout:
        return "has no dropout"
    if documents:
        return "knows no documents (cu_seqlens)"
    if not causal or q.shape[1] != k.shape[1]:
        return "is causal, with as many keys as queries"
    if q.shape[-1] not in _HEAD_DIMS:
        return f"has head dimensions {_HEAD_DIMS}, not {q.shape[-1]}"
    if q.dtype not in _DTYPES:
        return f"takes bfloat16 and float16, not {q.dtype}"
    from fastpar.kernels.attention_plans import tma_reads

    if not all(tma_reads(x) for x in (q, k, v)):
        return "needs addresses and steps of 16 bytes"
    return ""


def attention_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention's forward on a Hopper GPU, without dropout.

    Args:
        q: [B, T, H, D], bf16 | fp16, D 64 | 128, last dimension contiguous.
        k, v: [B, T, Hkv, D], H a multiple of Hkv.
        scale: of the scores; 1 / sqrt(D) by default.
    Returns:
        o: [B, T, H, D], contiguous. lse: [B, H, T], fp32, base 2: what attention's backward takes.
    Raises:
        RuntimeError: refusal() says why it cannot serve this call.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.attention_ref
    """
    why = refusal(q, k, v)
    if why:
        raise RuntimeError(
            f"attention_forward_hopper: expected a call that it can serve, got one that it cannot: "
            f"it {why}; call attention"
        )
    from fastpar.kernels.attention_hopper_triton import attention_hopper_fwd

    return attention_hopper_fwd(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)


def refusal_of_backward(q: Tensor) -> str:
    """Why attention_backward_hopper cannot serve what refusal() does not refuse; "" if it can."""
    if q.shape[-1] != 64:
        return f"has a backward for head dimension 64, not {q.shape[-1]}"
    if q.shape[1] % 4:
        return f"reads statistics of rows by 16 bytes, not T={q.shape[1]} of them"
    return ""


def attention_backward_hopper(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, scale: float | None = None,
) -> None:  # fmt: skip
    """Writes dq, dk and dv of attention_forward_hopper: dq by the same kernel as everywhere.

    Args:
        do, q, k, v, o: as in the forward, D 64. lse: [B, H, T], fp32, base 2, contiguous.
        dq, dk, dv: shapes of q, k and v, last dimension contiguous, maybe parts of one tensor.
        scale: of the scores; 1 / sqrt(D) by default.
    Raises:
        RuntimeError: refusal() or refusal_of_backward() says why it cannot serve this call.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.attention_ref
    """
    why = refusal(q, k, v) or refusal_of_backward(q)
    if why:
        raise RuntimeError(
            f"attention_backward_hopper: expected a call that it can serve, got one that it "
            f"cannot: it {why}; call attention"
        )
    from fastpar.kernels.attention_bwd_triton import attention_bwd
    from fastpar.kernels.attention_plans import tma_reads

    do = do if tma_reads(do) else do.contiguous()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = None, 0, 0, None
    attention_bwd(do, q, k, v, o, lse, dq, dk, dv, True, scale, *mask, hopper=True)
