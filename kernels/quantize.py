"""Blockwise codes of 8 bits for compressed collectives.

Each block of x has scale = max|x| / 127, and an element becomes x * (1 / scale) rounded to the
nearest integer, ties to even, or, unbiased, randomly to one of its two neighbours: the upper one
with the probability of the distance from the lower one. The random bits depend only on (seed,
index), so dividing x at multiples of the block changes nothing.

Scales are at least 2^-126, except that of a block of zeros, which is 0. A block with an inf or nan
has that scale and decodes to nan as a whole, so that an overflow is visible after the collective
too. The bits are the same for any number of threads, instruction set and device
(csrc/quantize_math.h).
"""

import torch
from torch import Tensor

from fastpar.kernels import backend
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_cuda
from fastpar.kernels.op import define_op

_CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)  # accepted for decoding
_MIN_BLOCK, _MAX_BLOCK = 16, 4096


_TOP = 127.0  # the largest code


def _quantize_torch(x: Tensor, block: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """The composed path, with rounding to nearest."""
    if seed is not None:
        raise RuntimeError(
            "quantize_blockwise: expected the compiled kernel for stochastic rounding, got "
            f"device={x.device} FASTPAR_BACKEND={backend.choice} seed={seed}; "
            f"{backend.way_to_cpp()}, or pass seed=None"
        )
    n = x.numel()
    rows = torch.nn.functional.pad(x.flatten().float(), (0, -n % block)).view(-1, block)
    top = rows.abs().amax(1)  # nan stays
    scales = top / _TOP
    below = scales.nextafter(torch.zeros_like(scales))
    scales = torch.where((scales * _TOP).isinf() & scales.isfinite(), below, scales)
    scales = torch.where(top > 0, scales.clamp(min=2.0**-126), scales)
    usable = scales.isfinite() & (scales > 0)
    inverse = torch.where(usable, 1 / scales, torch.zeros_like(scales))
    scaled = torch.where(usable[:, None], rows * inverse[:, None], torch.zeros_like(rows))
    codes = scaled.clamp(-_TOP, _TOP).round().to(torch.int8)
    return codes.view(-1)[:n].view(x.shape), scales


def _quantize(x: Tensor, block: int, seed: int | None, first_index: int) -> tuple[Tensor, Tensor]:
    cuda = use_cuda("quantize_blockwise", x)
    if not (cuda or use_cpp("quantize_blockwise", x)):
        return _quantize_torch(x, block, seed)
    x = x.contiguous()
    codes, scales = _outputs(x, block)
    seed = None if seed is None else seed % 2**64
    args = x, codes, scales, block, seed, first_index
    backend.run_compiled("quantize_blockwise", cuda, x, *args)
    return codes, scales


def _outputs(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return codes, x.new_empty((x.numel() + block - 1) // block, dtype=torch.float32)


def _dequantize(codes: Tensor, scales: Tensor, dtype: int, block: int) -> Tensor:
    out_dtype = tuple(DTYPE_CODES)[dtype]
    op = "dequantize_blockwise"
    cuda = use_cuda(op, scales)
    if not (cuda or use_cpp(op, scales)):
        each = scales.repeat_interleave(block)[: codes.numel()].view(codes.shape)
        return (codes.float() * each).to(out_dtype)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty(codes.shape, dtype=out_dtype, device=codes.device)
    backend.run_compiled(op, cuda, codes, codes, scales, block, out)
    return out


_quantize_op = define_op(
    "quantize_blockwise(Tensor x, int block, int? seed, int first_index) -> (Tensor, Tensor)",
    _quantize,
    lambda x, block, *_: _outputs(x, block),
)
_dequantize_op = define_op(
    "dequantize_blockwise(Tensor codes, Tensor scales, int dtype, int block) -> Tensor",
    _dequantize,
    lambda codes, *args: codes.new_empty(codes.shape, dtype=tuple(DTYPE_CODES)[args[1]]),
)


def _check_block(op: str, block: int) -> None:
    if not _MIN_BLOCK <= block <= _MAX_BLOCK or block & (block - 1):
        raise ValueError(
            f"{op}: expected a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}, got block={block}; "
            "256 costs 1.6 % for the scales"
        )


@torch.no_grad()
def quantize_blockwise(
    x: Tensor, *, block: int = 256, seed: int | None = None, first_index: int = 0
) -> tuple[Tensor, Tensor]:
    """Codes of x in 8 bits, with one fp32 scale per block of consecutive elements.

    Args:
        x: fp32 | bf16 | fp16, any shape; blocks go through x.flatten(), the last may be shorter.
        block: elements that share a scale, a power of two from 16 to 4096.
        seed: None rounds to nearest even; a number from 0 to 2^64 - 1 rounds stochastically with
            the random bits of (seed, first_index + i). Use another seed for each step and rank.
        first_index: index of x's first element in the array that contains x.
    Returns:
        codes: [shape of x] int8, and scales: [ceil(x.numel() / block)] fp32.
    Raises:
        ValueError: other block, seed or first_index.
        RuntimeError: seed with FASTPAR_BACKEND=torch.
    Traffic: bytes of x read, 1 + 4 / block bytes written per element.
    Deterministic: yes, bitwise, for any threads, device, instruction set and cut at whole blocks.
    Oracle: fastpar.kernels.reference.quantize_blockwise_ref
    """
    op = "quantize_blockwise"
    if x.dtype not in DTYPE_CODES:
        raise ValueError(f"{op}: expected fp32, bf16 or fp16, got x={x.dtype}; cast it")
    _check_block(op, block)
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"{op}: expected 0 <= seed < 2**64, got seed={seed}; reduce it")
    if not 0 <= first_index < 2**63:
        raise ValueError(
            f"{op}: expected 0 <= first_index < 2**63, got first_index={first_index}; "
            "count from the array's first element"
        )
    if seed is not None and seed >= 2**63:
        seed -= 2**64  # the op's integers are signed
    return _quantize_op(x, block, seed, first_index)


@torch.no_grad()
def dequantize_blockwise(
    codes: Tensor, scales: Tensor, *, out_dtype: torch.dtype = torch.float32, block: int = 256
) -> Tensor:
    """Values of codes: code * scale, rounded to out_dtype.

    Args:
        codes: int8, from quantize_blockwise, or float8_e4m3fn | float8_e5m2.
        scales: [ceil(codes.numel() / block)] fp32, of blocks of codes.flatten().
        out_dtype: fp32 | bf16 | fp16.
    Returns:
        x: [shape of codes] of out_dtype, on the codes' device.
    Raises:
        ValueError: another dtype or block; scales that do not fit codes.
    Traffic: 1 + 4 / block bytes read and out_dtype's bytes written per element.
    Deterministic: yes, bitwise, for any number of threads, device and instruction set.
    Oracle: fastpar.kernels.reference.dequantize_blockwise_ref
    """
    op = "dequantize_blockwise"
    if codes.dtype not in _CODES or out_dtype not in DTYPE_CODES:
        raise ValueError(
            f"{op}: expected codes of int8, float8_e4m3fn or float8_e5m2 and out_dtype fp32, bf16 "
            f"or fp16, got codes={codes.dtype} out_dtype={out_dtype}; cast them"
        )
    _check_block(op, block)
    count = (codes.numel() + block - 1) // block
    if scales.shape != (count,) or scales.dtype != torch.float32 or scales.device != codes.device:
        raise ValueError(
            f"{op}: expected {count} fp32 scales on {codes.device} for {codes.numel()} codes in "
            f"blocks of {block}, got scales={list(scales.shape)} {scales.dtype} on "
            f"{scales.device}; pass one scale per block"
        )
    return _dequantize_op(codes, scales, DTYPE_CODES[out_dtype], block)
