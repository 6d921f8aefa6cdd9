"""Triton's interpreter with the arithmetic of a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def gpu_arithmetic() -> Iterator[None]:
    """Makes Triton's interpreter round as a GPU does.

    fp32 -> bf16 or 8 bits rounds to nearest (the interpreter truncates; for 8 bits it loses NaN).
    Matrix products of bf16 multiply values (the interpreter multiplies their bits as integers).
    Matrix products of fp32 are summed in fp64 and rounded once, so that an element has the same
    bits in tiles of any shape, as on a GPU (BLAS chooses an order of sums by the shape); kernels
    that compute scores twice rely on it.
    """
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    tl, handle = interpreter.tl, interpreter.TensorHandle
    cast, dot, convert = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp
    eights = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def cast_impl(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16)
        return handle(rounded.numpy().view("uint16"), dst_type.scalar)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        form = eights.get(dst_type.scalar)
        if form is None or src.dtype.scalar != tl.float32:
            return convert(self, src, dst_type, rounding_mode)
        codes = torch.from_numpy(src.data.copy()).to(form).view(torch.uint8)
        return handle(codes.numpy(), dst_type.scalar)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast(self, x, tl.float32) for x in (a, b))
        elif a.dtype.scalar != tl.float32:
            return dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        total = a.data.astype("float64") @ b.data.astype("float64") + d.data
        return handle(total.astype(d.data.dtype), d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    builder.create_fp_to_fp = create_fp_to_fp
    try:
        yield
    finally:
        builder.cast_impl, builder.create_dot = cast, dot
        builder.create_fp_to_fp = convert
