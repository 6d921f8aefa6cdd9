"""How AdamW keeps moments in 8 bits and the lower half of a master weight; the tensors' side.

The step itself works on these forms in the compiled kernel (csrc/adamw_math.h, which says why they
are what they are). Here they are made, and turned into fp32 and back for state dicts.

Moments of torch.uint8 are codes in the order of memory and fp32 scales, one for each MOMENT_BLOCK
codes: exp_avg is scale * sign(k) * (k / 127)^2, k being the code as int8; exp_avg_sq is
scale * (k / 255)^4.
"""

import torch
from torch import Tensor

MOMENT_BLOCK = 256


def is_dense(t: Tensor) -> bool:
    """Whether t's elements fill one block of memory without overlap."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def in_order(g: Tensor, p: Tensor) -> Tensor:
    """g, its elements lying in memory in the order of p's: both are updated as flat memory."""
    if g.stride() == p.stride() or (g.is_contiguous() and p.is_contiguous()):
        return g
    return torch.empty_strided(p.shape, p.stride(), dtype=g.dtype, device=g.device).copy_(g)


def _in_memory_order(t: Tensor, op: str) -> Tensor:
    if not is_dense(t):
        raise ValueError(
            f"{op}: expected a dense tensor, got stride={t.stride()} for shape={list(t.shape)}; "
            "make it contiguous"
        )
    return t.as_strided((t.numel(),), (1,))


def new_moment(param: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A moment of zeros for a dense parameter, and its scales where dtype is torch.uint8."""
    if dtype not in (torch.float32, torch.bfloat16, torch.uint8):
        raise ValueError(
            "new_moment: expected dtype torch.float32, torch.bfloat16 or torch.uint8, got "
            f"dtype={dtype}; choose one of these"
        )
    moment = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if dtype != torch.uint8:
        return moment, None
    blocks = -(-param.numel() // MOMENT_BLOCK)
    return moment, torch.zeros(blocks, dtype=torch.float32, device=param.device)


def _levels(signed: bool, device: torch.device) -> Tensor:
    """The value of each code for a scale of 1."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if signed:
        t = codes.view(torch.int8).float() * (
            torch.ones((), device=device, dtype=torch.float32) / 127
        )
        return t * t.abs()
    t = codes.float() * (torch.ones((), device=device, dtype=torch.float32) / 255)
    return t * t * (t * t)


@torch.no_grad()
def decode_moment(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values of an 8-bit moment, with the codes' shape and strides.

    Args:
        codes: uint8, dense.
        scale: [ceil(codes.numel() / MOMENT_BLOCK)] fp32.
        signed: True for exp_avg, False for exp_avg_sq.
    """
    flat = _in_memory_order(codes, "decode_moment")
    blocks = -(-flat.numel() // MOMENT_BLOCK)
    if codes.dtype != torch.uint8 or scale.shape != (blocks,) or scale.dtype != torch.float32:
        raise ValueError(
            f"decode_moment: expected uint8 codes and fp32 scale of shape [{blocks}], got "
            f"{codes.dtype} and {scale.dtype} {list(scale.shape)}; pass what new_moment made"
        )
    values = torch.empty_like(codes, dtype=torch.float32)
    wide = scale.repeat_interleave(MOMENT_BLOCK)[: flat.numel()]
    _in_memory_order(values, "decode_moment").copy_(
        _levels(signed, codes.device)[flat.int()] * wide
    )
    return values


@torch.no_grad()
def encode_moment(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The nearest codes of an fp32 moment, with its shape and strides, and the scales.

    exp_avg_sq > 0 gets a code of at least 1, as in the step.
    """
    flat = _in_memory_order(values, "encode_moment").float()
    blocks = -(-flat.numel() // MOMENT_BLOCK)
    padded = flat.new_zeros(blocks * MOMENT_BLOCK)
    padded[: flat.numel()] = flat
    scale = padded.view(blocks, MOMENT_BLOCK).abs().amax(1)
    wide = scale.repeat_interleave(MOMENT_BLOCK)[: flat.numel()]
    levels = _levels(signed, values.device)
    if signed:
        levels = levels[:128]
    ratio = torch.where(wide > 0, flat.abs() / wide, 0.0)
    middles = (levels[:-1].double() + levels[1:].double()) / 2
    found = torch.bucketize(ratio.double(), middles)
    if signed:
        found = torch.where(flat < 0, 256 - found, found) % 256
    else:
        found = torch.where(flat > 0, found.clamp(min=1), found)
    codes = torch.empty_like(values, dtype=torch.uint8)
    _in_memory_order(codes, "encode_moment").copy_(found)
    return codes, scale


@torch.no_grad()
def round_to_bf16(master: Tensor) -> Tensor:
    """The bf16 parameter of an fp32 master: to nearest, ties away from zero, one nan."""
    return _upper_half(_bits(master))


def _bits(master: Tensor) -> Tensor:
    """The fp32 values' bits as a new int32 tensor, with one nan."""
    return torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))


def _upper_half(bits: Tensor) -> Tensor:
    """The bf16 half, as in round_to_bf16. Overwrites bits: a copy would not fit in memory."""
    bits += 0x8000
    bits >>= 16
    return bits.to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def master_split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master as (bf16 parameter, int16 remainder), which master_join puts together again.

    Exact for every value; nan becomes the nan 0x7fc00000. Strides are kept.
    """
    if master.dtype != torch.float32:
        raise ValueError(
            f"master_split: expected an fp32 master, got dtype={master.dtype}; pass param.float()"
        )
    bits = _bits(master)
    remainder = bits.to(torch.int16)
    return _upper_half(bits), remainder


@torch.no_grad()
def master_join(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and its int16 remainder."""
    if param.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise ValueError(
            "master_join: expected a bf16 parameter and an int16 remainder, got "
            f"{param.dtype} and {remainder.dtype}; pass what master_split made"
        )
    low = remainder.to(torch.int32)
    bits = param.view(torch.int16).to(torch.int32)
    bits += low >> 31  # -1 where the remainder is negative
    bits <<= 16
    low &= 0xFFFF
    bits |= low
    return bits.view(torch.float32)
