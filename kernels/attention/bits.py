"""Whether attention's dropout mask is kept as bits from the forward on, or drawn again each time.

Kept, a layer's mask takes B * H * T * Tk / 8 bytes from forward to backward (T and Tk rounded up to
256): 12.6 MB for 8 samples of GPT-2 124M at T = 1024, 151 MB for its twelve layers. Drawn, it takes
nothing, but each of the three kernels draws all of it. Which is faster a GPU decides:
attention_bits.json says it for each architecture, `python -m bench tune` measures it. Until then it
is 1, kept, on Hopper, where kernels that draw cannot load keys ahead: with registers for Philox and
tiles on their way the assembler waits for each matrix product. The masks are the same. Calls with
documents draw: how many blocks of keys a document has is known on the GPU alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.backend import triton_module
from fastpar.kernels.config_table import ConfigTable
from fastpar.kernels.op import define_op


class Mask(NamedTuple):
    """What is done with the mask of a call."""

    kept: int  # 1: as bits, from forward to backward; 0: it is drawn again


TABLE = ConfigTable(
    "attention_bits",
    Mask,
    (80, 90),
    [()],
    lambda arch, mask: None if mask.kept in (0, 1) else ("0 or 1", "kept"),
    lambda arch: 90 if 90 <= arch < 120 else 80,
    lambda arch: [Mask(0), Mask(1)],
)


def bits_shape(B: int, H: int, T: int, Tk: int) -> tuple[int, int, int, int]:
    """See [Note: kept bits] of attention_bits_triton.py."""
    return B, H, -(-Tk // 256) * 4, -(-T // 256) * 256


def _keeps(device: torch.device) -> int:
    if device.index is not None and not torch.cuda.is_initialized():  # traced, by fake tensors
        return 0
    kept: int = TABLE.get(triton_module("attention").gpu_arch(device)).kept
    return kept


def _fake(*mask: Any) -> Tensor:
    *_, sizes, device = mask
    shape = bits_shape(*sizes) if _keeps(device) else (0,)
    return torch.empty(shape, dtype=torch.uint64, device=device)


def _run(*mask: Any) -> Tensor:
    bits = _fake(*mask)
    if bits.numel():
        from fastpar.kernels.attention_bits_triton import attention_bits_fwd

        key, site_head, threshold, causal, sizes, _ = mask
        attention_bits_fwd(key, site_head, threshold, causal, bits, tuple(sizes))
    return bits


_attention_bits = define_op(
    "attention_bits(Tensor key, SymInt site_head, int threshold, bool causal, SymInt[] sizes, "
    "Device device) -> Tensor",
    _run,
    _fake,
    ("CPU", "CUDA"),
)


def kept_bits(
    q: Tensor, Tk: int, causal: bool, key: Tensor, site_head: int, threshold: int
) -> Tensor | None:
    """The mask of a call with q [B, T, H, D] (or packed) and Tk keys; None where it is drawn."""
    if not torch.compiler.is_compiling() and not _keeps(q.device):
        return None  # without a call of the op
    sizes = (q.shape[0], q.shape[-2], q.shape[1], Tk)
    bits: Tensor = _attention_bits(key, site_head, threshold, causal, sizes, q.device)
    return bits if bits.numel() else None
