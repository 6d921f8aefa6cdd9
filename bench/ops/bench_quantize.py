"""Blockwise codes of a gradient bucket in 8 and 4 bits, and back; back from 8-bit floats too.

"eager" is the same arithmetic in plain torch: rounded to nearest, at random with torch's own random
numbers ("seeded"), and with what was lost added to the next ("error feedback"). It neither takes
blocks that are not finite apart nor packs 4 bits, as "fastpar" does not either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Bench, Case, short
from fastpar.kernels import dequantize_blockwise, keep_freed_memory, quantize_blockwise
from fastpar.kernels.reference import dequantize_blockwise_ref

TIME_LIMIT_S = {"cpu": 300, "cuda": 60}
WAYS = ("", "seeded", "error feedback")


class Form(NamedTuple):
    """Of the codes."""

    name: str
    bits: int
    block: int

    @property
    def how(self) -> dict[str, Any]:
        return {"bits": self.bits, "block": self.block}


INT8, INT4, FP8 = Form("int8", 8, 256), Form("int4", 4, 128), Form("float8_e4m3fn", 8, 256)


def eager_codes(x: Tensor, form: Form, way: str, error: Tensor) -> tuple[Tensor, Tensor]:
    v = x + error if way == "error feedback" else x
    blocks = v.view(-1, form.block)
    scales = blocks.abs().amax(1) / float(2 ** (form.bits - 1) - 1)
    codes = blocks / scales[:, None]
    codes = (codes + torch.rand_like(codes)).floor() if way else codes.round()
    codes = codes.to(torch.int8)
    if way == "error feedback":
        error.copy_(v - (codes.float() * scales[:, None]).view(x.shape))
    return codes.view(x.shape), scales


def eager_values(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.view(len(scales), -1).float() * scales[:, None]).view(codes.shape)


def quantize_case(n: int, form: Form, way: str, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        size = 16 * form.block if small else n
        x, error = (torch.randn(size, generator=generator, device=device) for _ in range(2))
        return x, error * 1e-3

    def own(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        seed, kept = 1 if way else None, error if way == "error feedback" else None
        return quantize_blockwise(x, **form.how, seed=seed, error=kept)

    each = 13 if way == "error feedback" else 5
    return Case(
        f"quantize {form.name} {short(n)}{f', {way}' if way else ''}",
        make_inputs,
        {"eager": lambda x, error: eager_codes(x, form, way, error), "fastpar": own},
        None,
        torch.float32,
        bytes_moved={"call": n * (each + 4 / form.block)},
        directions=("call",),
        check=lambda variant: check(variant, form, way, device),
    )


def check(variant: str, form: Form, way: str, device: str) -> None:
    """The values of the codes are within one level of x (half a level to nearest)."""
    if not variant.startswith("fastpar"):
        return
    generator = torch.Generator(device).manual_seed(5)
    x = torch.randn(64 * form.block, generator=generator, device=device)
    error = torch.zeros_like(x)
    how: dict[str, Any] = {"seed": 1} if way else {}
    if way == "error feedback":
        how["error"] = error
    codes, scales = quantize_blockwise(x, **form.how, **how)
    values = eager_values(codes, scales)
    share = 1.0 if way else 0.5
    # A tie may be off by the rounding of x / scale.
    bound = scales.repeat_interleave(form.block) * (share + 64 * torch.finfo(torch.float32).eps)
    off = (values - x).abs()
    assert (off <= bound).all(), f"codes: expected errors within {share} level, got {off.max()}"
    if "error" in how:
        torch.testing.assert_close(values + error, x, rtol=0, atol=2 * torch.finfo(x.dtype).eps * 8)


def dequantize_case(n: int, form: Form, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        size = 16 * form.block if small else n
        x = torch.randn(size, generator=generator, device=device)
        codes, scales = quantize_blockwise(x, **form.how)
        return (x * 64).to(torch.float8_e4m3fn) if form is FP8 else codes, scales

    return Case(
        f"dequantize {form.name} {short(n)}",
        make_inputs,
        {
            "eager": eager_values,
            "fastpar": lambda codes, scales: dequantize_blockwise(codes, scales, block=form.block),
        },
        lambda codes, scales: dequantize_blockwise_ref(codes, scales, block=form.block),
        torch.float32,
        bytes_moved={"call": n * (5 + 4 / form.block)},
        directions=("call",),
    )


def run(bench: Bench) -> None:
    keep_freed_memory()  # as training does: else page faults of 100 MB are what is timed
    n = INT8.block * (100 if bench.quick else 100_000)  # a bucket of 100 MB
    for form in (INT8, INT4):
        bench.run([quantize_case(n, form, way, bench.device) for way in WAYS])
    bench.run([dequantize_case(n, form, bench.device) for form in (INT8, INT4, FP8)])
