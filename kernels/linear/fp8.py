"""Linear layers with matrix products of 8-bit floats, summed in fp32: linear(fp8=).

    y = x8 @ w8.T      dx = dy8 @ w8      dweight = dy.T @ x8, or dy8.T @ x8      dbias = sum of dy

x8 and w8 are e4m3 (largest 448), dy8 is e5m2 (57344). A code stands for code * scale, and scales
are powers of two, so that scaling rounds nothing and a code's value is exact in bf16. Saved for
backward: the weight, and x as 8-bit codes with their scales.

[Note: scales] The granularity of scales decides whether results depend on how ranks divide a batch
and a model:
    row     a row of a product's operand: a token's features, an output's weights. Tokens may be
            divided anywhere, features nowhere.
    block   128 neighbours in a row. Features may be divided at multiples of 128.
    tensor  all of it, on all ranks. Known only afterwards: DelayedScales uses those of earlier
            steps, so values can exceed the largest code. They become that code and are counted.
A row's or block's scale is the least 2^k with which its largest value fits. dweight sums over
tokens, of which a rank has only some: with row or block scales it is a product in x's format.

[Note: not finite] An infinity or NaN makes its row or block NaN, with a tensor's scale only itself:
the norm of the gradients shows that a step overflowed, as without fp8.

[Note: emulation] The codes' values, multiplied in fp32: what a GPU computes, up to the order of
sums. With blocks the halves of a sum over features are added last, so that two ranks with half of
the features each, which add up their sums, have the same bits.

Source: Micikevicius et al. 2022, arXiv 2209.05433 (formats, scales of steps before); DeepSeek-AI
2024, arXiv 2412.19437 (scales of 128 values)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import backend
from fastpar.kernels.backend import use_triton, wide
from fastpar.kernels.linear import matmul
from fastpar.kernels.op import refuse_double_backward
from fastpar.kernels.quantize import dequantize_blockwise

BLOCK = 128  # values of a row that share a scale
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_RUN = 4096  # most values that are read at once
HISTORY = 16  # steps whose largest values determine a tensor's scale
LEAST_CAPABILITY = (8, 9)  # of a GPU with products of 8-bit floats
X, WEIGHT, DY = range(3)  # a layer's tensors
_FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)


def power_of_two(top: Tensor, largest: float) -> Tensor:
    """The least 2^k, at least 2^-126, with top / 2^k <= largest; nan if top is not finite."""
    bits = (top.float() / largest).view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    scale = (exponent.clamp(1, 254) << 23).view(torch.float32)
    return torch.where(top < torch.inf, scale, torch.nan)


class Codes(NamedTuple):
    """A matrix in 8 bits: codes[N, K], and a scale per `group` values of a row. scales: fp32, [N, K
    / group], [] for all; None: codes are the values, which are not rounded. flipped: codes[K, N] by
    rows, if requested."""

    codes: Tensor
    scales: Tensor | None
    group: int = 0
    flipped: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values of the codes; sizes are multiples of 16, as a layer's widths."""
        codes, scales, k = self.codes, self.scales, self.codes.shape[1]
        if scales is None:
            return codes.to(dtype)
        # Runs with one scale, of as many values as are read at once.
        run = math.gcd(_RUN, *((self.group, k) if scales.dim() else (codes.numel(),)))
        if scales.dim():
            scales = scales.repeat_interleave(self.group // run, 1)[:, : k // run]
        else:
            scales = scales.expand(codes.numel() // run)
        # Codes are exact in all formats, scales where there are fp32's exponents.
        form = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return dequantize_blockwise(codes, scales.flatten(), out_dtype=form, block=run).to(dtype)

    def t(self) -> Codes:
        """The transpose, of values or of flipped codes."""
        if self.scales is None:
            return Codes(self.codes.t(), None)
        assert self.flipped is not None
        return Codes(self.flipped, self.scales, flipped=self.codes)


def round_rows(x: Tensor, dtype: torch.dtype, group: int) -> Codes:
    """Codes of x[N, K], with a scale per group of a row."""
    n, k = x.shape
    groups = -(-k // group)
    rows = F.pad(x, (0, groups * group - k)).view(n, groups, group)
    rows = rows.to(wide(x.dtype))
    scales = power_of_two(rows.abs().amax(-1), LARGEST[dtype])
    codes = (rows / scales[..., None]).to(torch.float32).to(dtype)
    return Codes(codes.view(n, -1)[:, :k].contiguous(), scales, group)


def round_all(
    x: Tensor, dtype: torch.dtype, scale: Tensor, flip: bool = False
) -> tuple[Codes, Tensor]:
    """Codes of x with a given scale, with flip also those of the transpose; and [2]: its largest
    value, and the number of overflows."""
    scaled, largest = x.to(wide(x.dtype)) / scale, LARGEST[dtype]
    size = scaled.abs()
    lost = ~(size < torch.inf)
    size.masked_fill_(lost, 0.0)
    top, over = size.amax() * scale, (size > largest).sum()
    del size
    codes = scaled.clamp_(-largest, largest).masked_fill_(lost, torch.nan).float().to(dtype)
    flipped = codes.t().contiguous() if flip else None
    return Codes(codes.contiguous(), scale, 0, flipped), torch.stack((top, over)).double()


def note_(noted: Tensor, layer: int, found: Sequence[Tensor]) -> None:
    """Adds round_all()'s findings for x, weight, dy, [2] or in parts [2, P], to noted[2, L, 3]."""
    tops, over = zip(*(each.double().view(2, -1) for each in found))
    noted[0, layer] = torch.maximum(noted[0, layer], torch.stack([top.amax() for top in tops]))
    noted[1, layer] += torch.stack([each.sum() for each in over])


def _kernels(own: bool) -> Any:
    """The module with round_rows(), round_all() and note_()."""
    return backend.triton_module("linear.fp8_triton") if own else sys.modules[__name__]


class DelayedScales:
    """Scales of whole tensors, from the largest values of the last steps on all ranks.

    The first step has no scales: it computes without fp8 and records the values. Only backwards
    record. An engine sums the records of all ranks in the exchange of a step (take, give, forget:
    Tally of engine/control.py); update() is for one process without an engine.

    Args:
        layers: number of linear layers, counted from 0, also if a rank has only some.
    Attributes:
        averaged: ranks whose gradients are averaged: the ratio of dy to that of one process.
        overflows: fp64 [layers, 3], values of x, weight, dy that overflowed in the last step.
    """

    def __init__(self, layers: int):
        self.history = torch.zeros(HISTORY, layers, 3, dtype=torch.float32, device="cpu")
        self.overflows = torch.zeros(layers, 3, dtype=torch.float64, device="cpu")
        self.steps, self.averaged = 0, 1
        self._noted: Tensor | None = None  # [2, layers, 3]: largest values, overflows
        self._scales: Tensor | None = None

    def scale(self, layer: int, which: int, device: torch.device) -> Tensor | None:
        """fp32 []; None in the first step."""
        if not self.steps:
            return None
        if self._scales is None or self._scales.device != device:
            with torch.inference_mode(False):  # the first forward may be a validation's
                tops, (e4m3, e5m2) = self.history.amax(0).to(device), LARGEST.values()
                tops[:, DY] *= self.averaged * e4m3 / e5m2  # the ratio is a power of two
                scales = power_of_two(tops, e4m3)
                scales = torch.where(scales > 2.0**-126, scales, 1.0)
                # cublasLt reads a scale at a multiple of 16 bytes.
                self._scales = F.pad(scales[..., None], (0, 3))
        return self._scales[layer, which, 0]

    def note(self, layer: int, found: Sequence[Tensor], *, own: bool = False) -> None:
        """Adds round_all()'s findings in a backward for x, weight and dy; own: by Triton."""
        x, weight, dy = found
        if self._noted is None or self._noted.device != dy.device:
            self._noted = dy.new_zeros(2, *self.overflows.shape, dtype=torch.float64)
        _kernels(own).note_(self._noted, layer, (x, weight, dy))

    def take(self, device: torch.device) -> Tensor:
        """This rank's records of the step, flat; the next step begins."""
        noted, self._noted = self._noted, None
        if noted is None:
            noted = torch.zeros(2, *self.overflows.shape, dtype=torch.float64, device=device)
        return noted.flatten()

    def give(self, total: Tensor, rows: Tensor) -> None:
        """Takes the records of all ranks, their sum and one row each: the next step's scales."""
        tops = rows.unflatten(1, (2, *self.overflows.shape))[:, 0].amax(0)
        tops[:, DY] /= self.averaged
        self.history = torch.cat((tops[None].float(), self.history.to(tops.device)[:-1]))
        self.overflows = total.view(2, *self.overflows.shape)[1]
        self.steps, self._scales = self.steps + 1, None

    def forget(self) -> None:
        """Drops the records: the gradients of this step were zeroed."""
        self._noted = None

    def update(self) -> None:
        """Ends a step of one process."""
        mine = self.take(self.history.device)
        self.give(mine, mine[None])

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint, written between steps."""
        return {"history": self.history.tolist(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads state_dict() of as many layers."""
        self.history = torch.tensor(state["history"], dtype=torch.float32, device="cpu")
        self.steps, self._noted, self._scales = state["steps"], None, None


@dataclass(frozen=True)
class Fp8:
    """How linear() rounds the operands of its products to 8 bits.

    Args:
        scaling: the granularity of scales: "row", "block" or "tensor"; see [Note: scales].
        weight_gradient: "bf16": dy is not rounded in it; "fp8", with tensor: dy is rounded.
        emulate: compute what a GPU would, on any device: slower than without fp8.
        scales: for tensor; and layer: the index of this layer in them.
        keeps: x is kept for backward in 8 bits; False: as it is, if others keep it anyway.
    Raises:
        ValueError: contradictory values.
    """

    scaling: Literal["row", "block", "tensor"] = "row"
    weight_gradient: Literal["bf16", "fp8"] = "bf16"
    emulate: bool = False
    scales: DelayedScales | None = None
    layer: int = 0
    keeps: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in ("row", "block", "tensor"):
            raise ValueError(
                f"Fp8: expected scaling row, block or tensor, got scaling={self.scaling}; choose "
                "one"
            )
        if self.weight_gradient not in (("bf16", "fp8") if self.scaling == "tensor" else ("bf16",)):
            raise ValueError(
                "Fp8: expected weight_gradient=bf16, or fp8 with scaling=tensor, got "
                f"weight_gradient={self.weight_gradient} with scaling={self.scaling}; use "
                "scaling=tensor (the gradient sums over tokens, of which a rank has only some)"
            )
        if (self.scaling == "tensor") != (self.scales is not None):
            raise ValueError(
                "Fp8: expected scales with scaling=tensor only, got scaling="
                f"{self.scaling} scales={type(self.scales).__name__}; pass one "
                "DelayedScales(layers) for all layers with scaling=tensor, else none"
            )

    def check_split(self, op: str, width: int, tp: int) -> None:
        """Refuses features split over tp ranks if scales would depend on the split."""
        if self.scaling == "row" or (self.scaling == "block" and width % BLOCK):
            raise ValueError(
                f"{op}: expected scaling=tensor, or block with a multiple of {BLOCK} features on "
                f"each rank, with tp={tp}, got scaling={self.scaling} with {width}; change "
                "--fp8-scaling or tp (scales would depend on tp)"
            )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """linear(x, weight, bias, fp8=self), for shapes that fit."""
        self._check(x, weight)
        return _Linear.apply(x, weight, bias, self)

    def _runs_own(self, x: Tensor) -> bool:
        return not self.emulate and use_triton("linear_fp8", x)

    def _check(self, x: Tensor, weight: Tensor) -> None:
        if any(n % 16 for n in weight.shape):
            raise ValueError(
                "linear: expected widths that are multiples of 16 with fp8, got weight="
                f"{list(weight.shape)}; use no fp8 for this layer"
            )
        if self.emulate or backend.recording or backend.choice == "triton":
            return
        device = f"device={x.device.type}"
        if x.is_cuda:
            found = torch.cuda.get_device_capability(x.device)
            device = f"compute capability {found[0]}.{found[1]}"
            if found >= LEAST_CAPABILITY and x.dtype == torch.bfloat16:
                return
        raise ValueError(
            "linear: expected bf16 on a GPU of compute capability 8.9 or newer with fp8, got "
            f"{device} dtype={x.dtype}; pass emulate=True for the same numbers at lower speed"
        )

    def _round(self, x: Tensor, which: int, own: bool) -> tuple[Codes, Tensor | None]:
        """x[N, K] in 8 bits, and the findings for DelayedScales."""
        form = _FORMATS[which]
        if self.scales is not None:
            scale = self.scales.scale(self.layer, which, x.device)
            if scale is None:
                _, found = round_all(x, form, x.new_ones((), dtype=torch.float32))
                return Codes(x, None), found
            flip = which != WEIGHT and self.weight_gradient == "fp8"  # x and dy have tokens as K
            codes, told = _kernels(own).round_all(x, form, scale, flip)
            return codes, told
        group = BLOCK if self.scaling == "block" else x.shape[1]
        return _kernels(own).round_rows(x, form, group), None

    def _product(self, a: Codes, b: Codes, bias: Tensor | None, like: Tensor, own: bool) -> Tensor:
        """a[M, K] @ b[N, K].T + bias, in the dtype of `like`."""
        if a.scales is None or b.scales is None:
            return matmul(a.codes, b.codes.t(), bias=bias)
        whole = self.scaling != "block"  # rows or tensors: torch has such products on a GPU
        if not (own or (whole and like.is_cuda and not self.emulate)):
            left, right = (each.values(wide(like.dtype)) for each in (a, b))
            y = _by_halves(left, right, a.group if a.group == BLOCK else 0)
            return (y if bias is None else y.add_(bias)).to(like.dtype)
        if not whole:
            return _kernels(True).block_product(a, b, bias, like.dtype)
        if backend.recording:
            return like.new_empty(len(a.codes), len(b.codes))
        of_rows, beyond = a.scales.dim() > 0, -a.codes.shape[1] % 16
        # Only a number of tokens may not be a multiple of 16. Zeros change no sum.
        a8, b8 = (
            F.pad(x.codes.view(torch.uint8), (0, beyond)).view(x.codes.dtype) if beyond else x.codes
            for x in (a, b)
        )
        return torch._scaled_mm(
            a8, b8.t(), a.scales, b.scales.t() if of_rows else b.scales, bias=bias,
            out_dtype=like.dtype,
        )  # fmt: skip


def _by_halves(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a[M, K] @ b[N, K].T; see [Note: emulation]."""
    half = a.shape[1] // 2
    if not block or half % block or not half:
        return matmul(a, b.t())
    low = _by_halves(a[:, :half], b[:, :half], block)
    return low.add_(_by_halves(a[:, half:], b[:, half:], block))


class _Linear(torch.autograd.Function):
    """The layer; all its tensors are first reshaped to matrices of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Fp8) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        own = how._runs_own(x)
        x8, found = how._round(rows, X, own)
        w8, ctx.of_weight = how._round(weight, WEIGHT, own)
        y = how._product(x8, w8, bias, x, own)
        ctx.how, ctx.own, ctx.shape, ctx.found, ctx.group = how, own, x.shape, found, x8.group
        ctx.has_bias = bias is not None
        if how.keeps and x8.scales is not None:
            if how.weight_gradient == "fp8":
                x8 = x8.t()
            ctx.save_for_backward(weight, x8.codes, x8.scales)
        else:
            ctx.save_for_backward(weight, x)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_double_backward("linear")
        how, own = ctx.how, ctx.own
        weight, x, *scales = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dy8, found = how._round(rows, DY, own)
        if how.scales is not None:
            how.scales.note(how.layer, (ctx.found, ctx.of_weight, found), own=own)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            w8 = how._round(weight.t(), WEIGHT, own)[0]
            dx = how._product(dy8, w8, None, dy, own).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if scales:
                x8 = Codes(x, scales[0], ctx.group)
            else:
                x8 = how._round(x.reshape(-1, x.shape[-1]), X, own)[0]
                x8 = x8.t() if how.weight_gradient == "fp8" else x8
            if how.weight_gradient == "fp8":
                dweight = how._product(dy8.t(), x8, None, weight, own)
            else:
                dweight = matmul(rows.t(), x8.values(dy.dtype))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dweight, dbias, None
