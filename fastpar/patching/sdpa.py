"""fastpar's attention behind torch's own scaled_dot_product_attention, for models nobody patched.

torch (2.13 or later) keeps a registry of flash-attention implementations. One of them puts kernels
of its own before torch's in two ops of a device: SDPA's flash forward and that forward's backward.
torch's autograd stands between the two and stays as it is, so a call gives back what its formula
keeps for the backward: the output, each row's natural logarithm of a sum of exponentials, fp32
[B, H, T], and two tensors for the mask. In the first of these we keep the mask's key; the second
says by its dtype (_OURS) that the mask is ours. What we do not serve goes to the kernels that were
there before.

[Note: a backward stays] A forward's mask can be drawn again only by whoever drew it. So our
backward stays in place after the registry has removed our forward: it serves what that forward
left, and hands on everything else.

[Note: a proof needs autograd] torch calls these kernels with autograd's dispatch keys excluded. The
first call of a class of shapes may have its kernel proven (kernels/choice.py), which takes
gradients and would find none. So the question who serves is asked with these keys back.

[Note: who is asked first] On some GPUs torch asks cuDNN before flash. While ours is active flash is
asked first; the order of the others, to which calls with a mask go, stays. torch sets its order at
its first choice, so there has to be one before ours is set.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as registry

from fastpar.kernels.attention import MAX_HEAD_DIM, TRITON_HEAD_DIM
from fastpar.kernels.attention_peers import from_natural, serving, to_natural
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_triton
from fastpar.kernels.philox import MAX_HEADS, draw_key, quantize_p
from fastpar.patching.fused_modules import rate_fits

NAME = "fastpar"  # in torch's registry
DEVICE = "CUDA"  # the dispatch key; tests put CPU here
_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = f"{_FORWARD}_backward"
_OURS = torch.int32  # torch's own forward gives uint64


def register_sdpa() -> None:
    """Has torch's scaled_dot_product_attention run fastpar's kernels on GPUs, dropout included.

    For calls that torch gives to flash attention: 16-bit tensors without attn_mask. Of these we
    serve head dims 16 to 128, and a causal mask where there are as many queries as keys; the rest,
    and whatever failed its proof on this machine, runs as before. Dropout has other masks than
    torch's from the same seed, in units of 1/256; torch.manual_seed rules them.

    torch.nn.attention.restore_flash_attention_impl() switches it off, and
    activate_flash_attention_impl("fastpar") on again. Call it after torch.cuda.set_device.

    Raises:
        RuntimeError: a torch without this registry, or without flash attention for GPUs.
    """
    way_out = "use fastpar.patch(model)"
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise RuntimeError(
            "register_sdpa: expected a torch with a registry of flash-attention implementations, "
            f"2.13 or later, got torch {torch.__version__}; update it, or {way_out}"
        )
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_FORWARD}", DEVICE):
        raise RuntimeError(
            "register_sdpa: expected a torch with flash attention for GPUs, got torch "
            f"{torch.__version__} without; install one with CUDA, or {way_out}"
        )
    registry.register_flash_attention_impl(NAME, register_fn=_activate)
    registry.activate_flash_attention_impl(NAME)


class _Active:
    """What the registry removes."""

    def __init__(self, library: Library, order: list[int]):
        self._library, self._order = library, order

    def remove(self) -> None:
        self._library._destroy()
        torch._C._set_sdp_priority_order(self._order)


def _activate() -> _Active:
    """Called by the registry, which has removed what was active before."""
    library = _put_before(_FORWARD, _forward, DEVICE)
    _keep_backward(DEVICE)
    if torch.cuda.is_available():  # see [Note: who is asked first]
        x = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)
    order = torch._C._get_sdp_priority_order()
    flash = registry.SDPBackend.FLASH_ATTENTION.value
    torch._C._set_sdp_priority_order([flash, *(other for other in order if other != flash)])
    return _Active(library, order)


def _put_before(name: str, ours: Any, device: str) -> Library:
    """Registers ours(kernel that was there, dispatch keys, the op's arguments)."""
    before = torch.library.get_kernel(f"aten::{name}", device)
    library = Library("aten", "IMPL")
    library.impl(name, functools.partial(ours, before), device, with_keyset=True)
    return library


@functools.cache
def _keep_backward(device: str) -> Library:
    """See [Note: a backward stays]."""
    return _put_before(_BACKWARD, _backward, device)


def _serves(
    q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, scale: float, direction: int
) -> bool:
    """Whether our op serves a call of [B, T, H, D], and not by torch's flash kernel itself."""
    least, most, step = TRITON_HEAD_DIM if q.is_cuda else (1, MAX_HEAD_DIM, 1)
    (T, H, D), (Tk, Hkv) = q.shape[1:], k.shape[1:3]
    if not (
        q.dtype in DTYPE_CODES
        and all(x.numel() and x.stride(-1) == 1 for x in (q, k, v))
        and D == k.shape[-1] == v.shape[-1]
        and least <= D <= most
        and D % step == 0
        and H % Hkv == 0
        and H < MAX_HEADS
        and (not causal or Tk == T)
        and 0.0 < scale < math.inf
        and rate_fits(p)
    ):
        return False
    op = "attention_masked" if p else "attention"
    with _with_autograd():
        own = use_triton(op, q) or use_cpp(op, q)
        return own and serving(op, q, k, v, causal, direction) != "flash"


def _with_autograd() -> Any:
    """See [Note: a proof needs autograd]; autocast's keys stay as they are."""
    key, excluded = torch._C.DispatchKey, torch._C._dispatch_tls_local_exclude_set()
    # One backend's key stands for all.
    excluded = excluded.remove(key.AutogradCUDA).remove(key.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _heads_last(*tensors: Tensor) -> list[Tensor]:
    """[B, H, T, D] as [B, T, H, D]."""
    return [x.transpose(1, 2) for x in tensors]


def _laid_out_like(x: Tensor, found: Tensor) -> Tensor:
    """found [B, T, H, D] as [B, H, T, D] in the memory format that torch.compile expects."""
    found, expected = found.transpose(1, 2), torch.empty_like(x, device="meta")
    if found.stride() == expected.stride():
        return found
    return torch.empty_like(x).copy_(found)


def _forward(
    before: Any,
    keys: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple:
    q, k, v = _heads_last(query, key, value)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if return_debug_mask or not _serves(q, k, v, dropout_p, is_causal, factor, 0):
        return before.call_boxed(
            keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale
        )
    threshold = quantize_p(dropout_p)
    seed = draw_key(q.device) if threshold else None
    o, stats = torch.ops.fastpar.attention(q, k, v, is_causal, factor, seed, 0, threshold, None)
    kept = q.new_empty(2, dtype=torch.uint64) if seed is None else seed.view(torch.uint64)
    mark, debug_mask = q.new_empty((), dtype=_OURS), q.new_empty(0)
    lse, sizes = to_natural(stats, q), (q.shape[1], k.shape[1])
    return _laid_out_like(query, o), lse, None, None, *sizes, kept, mark, debug_mask


def _backward(
    before: Any,
    keys: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple:
    do, q, k, v, o = _heads_last(grad_out, query, key, value, out)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    ours = philox_offset.dtype == _OURS
    # Without a mask any backward goes with any forward, and may have been found faster.
    if not ours or not (dropout_p or _serves(q, k, v, 0.0, is_causal, factor, 1)):
        inputs = (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
        settings = (dropout_p, is_causal, philox_seed, philox_offset)
        return before.call_boxed(keys, *inputs, *settings, scale=scale)
    threshold = quantize_p(dropout_p)
    seed = philox_seed.view(torch.int64) if threshold else None
    stats = from_natural(logsumexp, use_triton("attention_masked" if threshold else "attention", q))
    grads = torch.ops.fastpar.attention_bwd(
        do, q, k, v, o.contiguous(), stats, is_causal, factor, seed, 0, threshold, None
    )
    return tuple(_laid_out_like(x, grad) for x, grad in zip((query, key, value), grads))
