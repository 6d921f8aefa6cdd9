"""The 2-norm over a list of tensors, the factor that clips it, and whether everything is finite.

    norm = sqrt(sum of squares of all elements) / loss_scale
    grad_scale = min(1, max_norm / (norm + eps)) / loss_scale
    found_inf = 1 where the norm is inf or nan, else 0

The sum of squares is kept as exact integer totals (csrc/norm_math.h, [Note: exact sum of squares]),
so its bits depend only on the elements: not on their order, on how tensors, buckets or ranks divide
them, on threads, instruction set or device. Ranks add their bins with one int64 all-reduce between
norm_bins and norm_from_bins. On CUDA everything stays on the device: one launch reads the tensors,
one computes the result, both can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import _C, backend
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_cuda
from fastpar.kernels.lists import are_usual, goes_at_once, rows_of
from fastpar.kernels.op import check_scalar, define_op

# As in csrc/norm_math.h.
_BINS, _BIN_BITS, _LOWEST_UNIT = 12, 52, -350
NORM_WORDS = 2 * _BINS + 2  # low and high word of each bin, infinities, nans


class GlobalNorm(NamedTuple):
    """Three fp32 tensors [] on the device of the tensors; see the top of the file."""

    norm: Tensor
    grad_scale: Tensor
    found_inf: Tensor


def _partials(rows: Tensor, counted: Sequence[bool], like: Tensor) -> tuple[Tensor, int]:
    """CUDA's bins of parts of the tensors of these rows, and how many of them are filled."""
    kernels = backend.cuda_kernels
    bins = like.new_empty(kernels.norm_rows_cuda(len(rows)), NORM_WORDS, dtype=torch.int64)
    return bins, kernels.norm_partials_cuda(rows, counted, bins, backend.cuda_stream(like))


def _finish(
    rows: Tensor, count: int, clip: tuple[float, float, float], *tensors: Tensor | None
) -> None:
    """tensors: loss scale, bins and result."""
    backend.cuda_kernels.norm_finish_cuda(rows, count, *clip, *tensors, backend.cuda_stream(rows))


def _composed_bins(tensors: list[Tensor], counted: list[bool]) -> Tensor:
    """The same bins in plain torch, in pieces that bound its memory."""
    bins = tensors[0].new_zeros(NORM_WORDS, dtype=torch.int64)
    units = _units(bins.device)
    pieces = [(p, c) for t, c in zip(tensors, counted) for p in t.reshape(-1).split(1 << 22)]
    for piece, is_counted in pieces:
        bins[-2] += piece.isinf().sum()
        bins[-1] += piece.isnan().sum()
        if not is_counted or piece.numel() == 0:
            continue
        left = piece.double().nan_to_num(0.0, 0.0, 0.0).square()
        reached = (left.max() > units / 2).sum() - 1
        for below in (0, 1):
            b = (reached.clamp(min=1) - below).view(1)
            rounder = units.take(b) * (1.5 * 2.0**52)
            rounded = left + rounder
            left = left - (rounded - rounder)
            count = rounded.view(torch.int64) - rounder.view(torch.int64)
            bins.index_add_(0, 2 * b, (count & 0xFFFFFFFF).sum().view(1))
            bins.index_add_(0, 2 * b + 1, (count >> 32).sum().view(1))
    return bins


def _units(device: torch.device) -> Tensor:
    exponents = torch.arange(_BINS, device=device, dtype=torch.float64) * _BIN_BITS + _LOWEST_UNIT
    return torch.exp2(exponents)


def _composed_result(
    bins: Tensor, max_norm: float, eps: float, loss_scale: float, loss_scale_at: Tensor | None
) -> Tensor:
    low, high = bins[:-2].view(_BINS, 2).unbind(1)
    high, low = high + (low >> 32), low & 0xFFFFFFFF
    totals = (high.double() * 2.0**32 + low.double()) * _units(bins.device)
    filled = (high != 0) | (low != 0)
    top = (filled * torch.arange(_BINS, device=bins.device)).max().clamp(min=1)
    scale = loss_scale_at
    if scale is None:
        scale = torch.tensor(loss_scale, dtype=torch.float32, device="cpu")
    scale = scale.to(bins.device, torch.float64).view(())
    norm = ((totals.take(top) + totals.take(top - 1)).sqrt() / scale).float()
    norm = norm.masked_fill(bins[-2] != 0, math.inf).masked_fill(bins[-1] != 0, math.nan)
    factor = torch.ones_like(norm, dtype=torch.float64)
    if max_norm >= 0:
        factor = (max_norm / (norm.double() + eps)).clamp(max=1.0)
    return torch.stack([norm, (factor / scale).float(), (~norm.isfinite()).float()])


def _bins_of(rows: Tensor, counted: Sequence[bool], like: Tensor) -> Tensor:
    """The bins of usual tensors; counted: [] counts all; like: one of them."""
    if use_cuda("norm_bins", like):
        bins = torch.empty(NORM_WORDS, dtype=torch.int64, device=like.device)
        with torch.cuda.device_of(like):
            _finish(*_partials(rows, counted, like), (-1.0, 0.0, 1.0), None, bins, None)
        return bins
    bins = torch.zeros(NORM_WORDS, dtype=torch.int64, device="cpu")
    _C.norm_bins(rows, counted, bins, torch.get_num_threads())
    return bins


def _is_compiled(op: str, like: Tensor) -> bool:
    """Whether a compiled kernel serves tensors like this."""
    return use_cuda(op, like) or use_cpp(op, like)


def _norm_bins(tensors: list[Tensor], counted: list[bool]) -> Tensor:
    if not _is_compiled("norm_bins", tensors[0]):
        return _composed_bins(tensors, counted)
    return _bins_of(rows_of(tensors), counted, tensors[0])


def _norm_from_bins(
    bins: Tensor, max_norm: float, eps: float, loss_scale: float, loss_scale_at: Tensor | None
) -> Tensor:
    clip = (max_norm, eps, loss_scale)
    cuda = use_cuda("norm_from_bins", bins)
    if not cuda and (bins.device.type != "cpu" or backend.choice == "torch"):
        return _composed_result(bins, *clip, loss_scale_at)
    result = torch.empty(3, dtype=torch.float32, device=bins.device)
    if cuda:
        with torch.cuda.device_of(bins):
            _finish(bins, 1, clip, loss_scale_at, None, result)
    else:
        _C.norm_from_bins(bins, *clip, loss_scale_at, result)
    return result


def _norm_of(rows: Tensor, counted: Sequence[bool], like: Tensor, clip: tuple) -> Tensor:
    """global_norm of usual tensors."""
    if not use_cuda("global_norm", like):
        return _norm_from_bins(_bins_of(rows, counted, like), *clip)
    result = torch.empty(3, dtype=torch.float32, device=like.device)
    with torch.cuda.device_of(like):
        *numbers, loss_scale_at = clip
        _finish(*_partials(rows, counted, like), tuple(numbers), loss_scale_at, None, result)
    return result


def _global_norm(
    tensors: list[Tensor], counted: list[bool], max_norm: float, eps: float, loss_scale: float,
    loss_scale_at: Tensor | None,
) -> Tensor:  # fmt: skip
    clip = max_norm, eps, loss_scale, loss_scale_at
    if _is_compiled("norm_bins", tensors[0]):
        return _norm_of(rows_of(tensors), counted, tensors[0], clip)
    return _norm_from_bins(_norm_bins(tensors, counted), *clip)


_norm_bins_op = define_op(
    "norm_bins(Tensor[] tensors, bool[] counted) -> Tensor",
    _norm_bins,
    lambda tensors, counted: tensors[0].new_empty(NORM_WORDS, dtype=torch.int64),
)
_CLIP = "float max_norm, float eps, float loss_scale, Tensor? loss_scale_at"
_norm_from_bins_op = define_op(
    f"norm_from_bins(Tensor bins, {_CLIP}) -> Tensor",
    _norm_from_bins,
    lambda bins, *args: bins.new_empty(3, dtype=torch.float32),
)
_global_norm_op = define_op(
    f"global_norm(Tensor[] tensors, bool[] counted, {_CLIP}) -> Tensor",
    _global_norm,
    lambda tensors, *args: tensors[0].new_empty(3, dtype=torch.float32),
)


def _checked(
    op: str, tensors: Sequence[Tensor], counted: Sequence[bool] | None
) -> tuple[list[Tensor], list[bool]]:
    counted = [True] * len(tensors) if counted is None else [bool(c) for c in counted]
    if len(counted) != len(tensors):
        raise ValueError(
            f"{op}: expected one entry of counted for each tensor, got {len(counted)} for "
            f"{len(tensors)} tensors; pass lists of one length"
        )
    for i, t in enumerate(tensors):
        if t.dtype not in DTYPE_CODES and t.dtype != torch.float64:
            raise ValueError(
                f"{op}: expected a float tensor of 16, 32 or 64 bits, got tensors[{i}]={t.dtype}; "
                "cast it"
            )
        if t.layout != torch.strided:
            raise ValueError(
                f"{op}: expected dense tensors, got tensors[{i}]={t.layout}; pass to_dense()"
            )
        if t.device != tensors[0].device:
            raise ValueError(
                f"{op}: expected one device, got tensors[{i}] on {t.device} and tensors[0] on "
                f"{tensors[0].device}; add norm_bins of each device"
            )
    tensors = [t.float() if t.dtype == torch.float64 else t for t in tensors]
    return [t.resolve_neg().contiguous() for t in tensors], counted


def _rows_at_once(tensors: Sequence[Tensor], counted: Sequence[bool] | None) -> Tensor | None:
    """The rows of usual tensors that a compiled kernel takes past the dispatcher, which no tool
    then sees; None: a call goes through the op."""
    fits = tensors and len(counted or tensors) == len(tensors) and goes_at_once(tensors)
    if not fits or torch.autograd._profiler_enabled():
        return None
    rows = rows_of(tensors)
    return rows if are_usual(rows) and _is_compiled("norm_bins", tensors[0]) else None


def _clip(
    op: str, max_norm: float | None, loss_scale: float | Tensor | None, eps: float,
    device: torch.device,
) -> tuple[float, float, float, Tensor | None]:  # fmt: skip
    """(max_norm or -1, eps, loss scale by value, or the tensor to read it from)"""
    if max_norm is not None and not max_norm > 0:
        raise ValueError(
            f"{op}: expected max_norm > 0 or None, got max_norm={max_norm}; None does not clip"
        )
    if not 0 <= eps < math.inf:
        raise ValueError(f"{op}: expected 0 <= eps < inf, got eps={eps}; 1e-6 is torch's")
    limit = -1.0 if max_norm is None else float(max_norm)
    if isinstance(loss_scale, Tensor):
        check_scalar(op, "loss_scale", loss_scale, device)
        return limit, float(eps), 1.0, loss_scale
    scale = 1.0 if loss_scale is None else loss_scale
    if isinstance(scale, str) or not 0 < scale < math.inf:
        raise ValueError(
            f"{op}: expected 0 < loss_scale < inf, got loss_scale={loss_scale}; gradients are "
            "divided by it"
        )
    return limit, float(eps), float(scale), None


@torch.no_grad()
def global_norm(
    tensors: Sequence[Tensor], *, counted: Sequence[bool] | None = None,
    max_norm: float | None = None, loss_scale: float | Tensor | None = None, eps: float = 1e-6,
) -> GlobalNorm:  # fmt: skip
    """2-norm of all elements of all tensors, with the clip factor and the overflow flag.

    Args:
        tensors: fp32 | bf16 | fp16 in any mixture, any shapes, size 0 included, one device; an
            empty list has norm 0 (on CPU). fp64 is rounded to fp32 first: beyond its range is inf.
        counted: False for a tensor that another rank counts: only its non-finite elements are
            found. None counts all.
        max_norm, eps: grad_scale = min(1, max_norm / (norm + eps)) / loss_scale; None: no clipping.
        loss_scale: the tensors are gradients of a loss multiplied by it, a number or fp32 [] on
            their device: the norm is divided by it, and grad_scale does the same to gradients.
    Returns:
        GlobalNorm(norm, grad_scale, found_inf): fp32 [] each, on the tensors' device. With inf or
        nan among the elements the norm is inf or nan and found_inf 1, also where a sum of finite
        elements exceeds fp32.
    Raises:
        ValueError: lists of unequal length; another dtype, layout or device; max_norm, loss_scale
            or eps outside their range.
    Traffic: the bytes of the tensors once; a strided tensor is copied first.
    Deterministic: yes, the same bits for any order and division of the tensors, any number of
        threads, instruction set and device. Error of the norm: one fp32 rounding and a relative
        2^-53 per element.
    Oracle: fastpar.kernels.reference.global_norm_ref
    Source: the binned sum of Demmel, Nguyen 2015, 10.1109/TC.2014.2345391, with integer bins
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    clip = _clip("global_norm", max_norm, loss_scale, eps, device)
    rows = _rows_at_once(tensors, counted)
    if rows is not None:
        return GlobalNorm(*_norm_of(rows, [*map(bool, counted or ())], tensors[0], clip).unbind())
    lists = _checked("global_norm", tensors, counted)
    if not tensors:
        bins = torch.zeros(NORM_WORDS, dtype=torch.int64, device="cpu")
        return GlobalNorm(*_norm_from_bins_op(bins, *clip).unbind())
    return GlobalNorm(*_global_norm_op(*lists, *clip).unbind())


def norm_of_rows(
    rows: Tensor, like: Tensor, *, max_norm: float | None, loss_scale: float | Tensor | None
) -> GlobalNorm | None:
    """global_norm of the tensors of usual rows, like one of them, for a caller that has read
    them. None: global_norm has to see them."""
    if torch.autograd._profiler_enabled() or not _is_compiled("norm_bins", like):
        return None
    clip = _clip("global_norm", max_norm, loss_scale, 1e-6, like.device)
    return GlobalNorm(*_norm_of(rows, (), like, clip).unbind())


@torch.no_grad()
def norm_bins(
    tensors: Sequence[Tensor], *, counted: Sequence[bool] | None = None, out: Tensor | None = None
) -> Tensor:
    """The exact sum of squares of all elements: int64 [NORM_WORDS], for norm_from_bins.

    Bins of disjoint parts, also of ranks, add up to those of the whole: same norm, bit for bit.

    Args:
        tensors, counted: as in global_norm; the list may be empty if out is given.
        out: int64 [NORM_WORDS] on the tensors' device; the bins are added to it and it is returned.
    Raises:
        ValueError: as global_norm; an out that does not fit.
    Traffic: the bytes of the tensors once.
    Deterministic: single words may depend on the division, norm_from_bins's result does not.
    Oracle: fastpar.kernels.reference.global_norm_ref
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    if out is not None:
        check_bins("norm_bins", out, device if tensors else out.device)
    if not tensors:
        return torch.zeros(NORM_WORDS, dtype=torch.int64, device="cpu") if out is None else out
    rows = _rows_at_once(tensors, counted)
    if rows is not None:
        bins = _bins_of(rows, [*map(bool, counted or ())], tensors[0])
    else:
        bins = _norm_bins_op(*_checked("norm_bins", tensors, counted))
    return bins if out is None else out.add_(bins)


@torch.no_grad()
def norm_from_bins(
    bins: Tensor, *, max_norm: float | None = None, loss_scale: float | Tensor | None = None,
    eps: float = 1e-6,
) -> GlobalNorm:  # fmt: skip
    """global_norm's result, from the bins of norm_bins or from sums of such bins.

    Args:
        bins: int64 [NORM_WORDS].
        max_norm, loss_scale, eps: as in global_norm.
    Raises:
        ValueError: bins of another shape or dtype; options as in global_norm.
    Deterministic: yes, see global_norm.
    Oracle: fastpar.kernels.reference.global_norm_ref
    """
    check_bins("norm_from_bins", bins, bins.device)
    clip = _clip("norm_from_bins", max_norm, loss_scale, eps, bins.device)
    return GlobalNorm(*_norm_from_bins_op(bins, *clip).unbind())


def check_bins(op: str, bins: Tensor, device: torch.device) -> None:
    """Refuses tensors that norm_bins does not return."""
    fits = bins.shape == (NORM_WORDS,) and bins.dtype == torch.int64 and bins.is_contiguous()
    if not fits or bins.device != device:
        raise ValueError(
            f"{op}: expected contiguous bins of shape [{NORM_WORDS}] int64 on {device}, got bins="
            f"{list(bins.shape)} {bins.dtype} on {bins.device}; make them with norm_bins"
        )
