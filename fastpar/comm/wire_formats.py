"""What a number becomes on the wire: messages of codes and scales, or of bf16, and back.

A message holds n elements: an fp32 scale for each block of them, then their codes (of 4 bits two in
a byte), padded to 16 bytes. Blocks begin with the message, and slices of a bucket are multiples of
a block, as its parameters are (ALIGN of sharding/layout.py): no two parameters share a scale.

[Note: rounding] Codes of gradients are rounded at random, without bias (kernels/quantize.py), by
the random bits of (step, bucket, rank) and the element's place; bf16 to nearest, as are weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import dequantize_blockwise, quantize_blockwise
from fastpar.kernels.quantize import pack_int4, unpack_int4

_PAD = 16


@dataclass(frozen=True)
class WireFormat:
    """One format; block: elements that share a scale, 0 without scales."""

    name: str
    dtype: torch.dtype
    bits: int
    block: int = 0

    def nbytes(self, n: int) -> int:
        """Of the message of n elements."""
        scales = -(-n // self.block) * 4 if self.block else 0
        return -(-(scales + -(-n * self.bits // 8)) // _PAD) * _PAD

    @property
    def bytes_per_element(self) -> float:
        """Of long messages."""
        return self.bits / 8 + (4 / self.block if self.block else 0)

    def encode(
        self,
        x: Tensor,
        message: Tensor,
        *,
        seed: int | None = None,
        index: int = 0,
        error: Tensor | None = None,
    ) -> None:
        """Write x[n] into message[nbytes].

        Args:
            seed: None rounds to nearest; index: of x's first element in its bucket.
            error: fp32 [n], or x itself: see quantize_blockwise.
        """
        if not self.block:
            self._round(x, message, error)
            return
        how: Any = {"bits": self.bits, "block": self.block, "seed": seed, "error": error}
        codes, scales = quantize_blockwise(x, first_index=index, **how)
        start = scales.nbytes
        message[:start].view(torch.float32).copy_(scales)
        if self.bits == 4:
            codes = pack_int4(torch.nn.functional.pad(codes, (0, codes.numel() % 2)))
        message[start : start + codes.numel()].copy_(codes.view(torch.uint8))

    def _round(self, x: Tensor, message: Tensor, error: Tensor | None) -> None:
        v = x.float() if error is None or error is x else x + error
        sent = message[: self.dtype.itemsize * x.numel()].view(self.dtype)
        sent.copy_(v)
        if error is not None:
            lost = v - sent
            kept = torch.zeros((), device=x.device, dtype=torch.float32) if error is x else error
            error.copy_(torch.where(lost.isfinite(), lost, kept))

    def decode(self, message: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The n elements that a message holds, as another reads them."""
        if not self.block:
            return message[: self.dtype.itemsize * n].view(self.dtype).to(dtype)
        start = -(-n // self.block) * 4
        scales = message[:start].view(torch.float32)
        codes = message[start : start + -(-n * self.bits // 8)]
        codes = unpack_int4(codes)[:n] if self.bits == 4 else codes.view(self.dtype)
        return dequantize_blockwise(codes, scales, out_dtype=dtype, block=self.block)


FORMATS = {
    f.name: f
    for f in (
        WireFormat("bf16", torch.bfloat16, 16),
        WireFormat("int8", torch.int8, 8, 256),
        WireFormat("int4", torch.int8, 4, 128),
    )
}
CODES = "fp8"  # of weights: the codes of 8-bit products; see wires.py
OF_GRADIENTS, OF_WEIGHTS = ("fp32", *FORMATS), ("bf16", "int8", CODES)
