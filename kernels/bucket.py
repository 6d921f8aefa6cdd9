"""Bucket operations: a list of tensors to and from one flat buffer, sums of lists, sums of shards.

    pack_         flat[o_i : o_i + n_i] = tensors[i] * scale
    unpack_       tensors[i] = flat[o_i : o_i + n_i] * scale
    accumulate_   totals[i] = totals[i] + values[i] * scale
    sum_shards    out = ((received[0] + received[1]) + (received[2] + received[3]) + ...) * scale

Every product and sum is rounded in fp32 and stored in the destination's dtype with one more
rounding, element by element, so the bits depend neither on how a list is divided nor on threads,
device or instruction set (a nan's sign and payload excepted). One pass over memory, whose work is
divided into chunks across the whole list; on CUDA one launch for any mixture of dtypes
(csrc/bucket_cuda.cu, [Note: one launch]).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import backend
from fastpar.kernels.adamw import in_order, is_dense
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_cuda
from fastpar.kernels.global_norm import check_bins, norm_bins
from fastpar.kernels.op import check_scalar, define_op


def _copy(
    op: str, to: list[Tensor], source: list[Tensor], to_offsets: list[int], offsets: list[int],
    *how: Any,
) -> None:  # fmt: skip
    """Runs the compiled copy; a list with offsets is one buffer. how: add, scale, its tensor."""
    cuda = use_cuda(op, to[0])
    backend.run_compiled("bucket_copy", cuda, to[0], op, to, source, to_offsets, offsets, *how)


def _is_compiled(op: str, x: Tensor) -> bool:
    return use_cuda(op, x) or use_cpp(op, x)


def _scaled(x: Tensor, scale: float, at: Tensor | None) -> Tensor:
    return x.float() * (scale if at is None else at)


def _bump(tensors: Sequence[Tensor]) -> None:
    # Memory written through pointers: autograd must know that these tensors changed.
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _give_back(tensors: list[Tensor], outputs: list[Tensor]) -> None:
    for t, output in zip(tensors, outputs):
        if t is not output:
            t.copy_(output)
    _bump(tensors)


def _pack(
    flat: Tensor, tensors: list[Tensor], offsets: list[int], scale: float, at: Tensor | None
) -> None:
    if not _is_compiled("pack_", flat):
        for t, o in zip(tensors, offsets):
            flat[o : o + t.numel()].copy_(_scaled(t, scale, at).reshape(-1))
        return
    _copy("pack_", [flat], [t.contiguous() for t in tensors], offsets, [], False, scale, at)
    _bump([flat])


def _unpack(
    tensors: list[Tensor], flat: Tensor, offsets: list[int], scale: float, at: Tensor | None
) -> None:
    if not _is_compiled("unpack_", flat):
        for t, o in zip(tensors, offsets):
            t.copy_(_scaled(flat[o : o + t.numel()], scale, at).view(t.shape))
        return
    outputs = [t.contiguous() for t in tensors]  # itself where it is
    _copy("unpack_", outputs, [flat], [], offsets, False, scale, at)
    _give_back(tensors, outputs)


def _accumulate(
    totals: list[Tensor], values: list[Tensor], scale: float, at: Tensor | None
) -> None:
    if not _is_compiled("accumulate_", totals[0]):
        for total, value in zip(totals, values):
            total.copy_(total.float() + _scaled(value, scale, at))
        return
    outputs = [t if is_dense(t) else t.contiguous() for t in totals]
    values = [in_order(v, t) for v, t in zip(values, outputs)]
    _copy("accumulate_", outputs, values, [], [], True, scale, at)
    _give_back(totals, outputs)


def _tree(parts: list[Tensor]) -> Tensor:
    """The sum in the order of csrc/sum_tree.h."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return _tree(parts[:left]) + _tree(parts[left:])


def _sum_shards(
    shards: list[Tensor], out: Tensor, scale: float, at: Tensor | None, bins: Tensor | None
) -> None:
    if not _is_compiled("sum_shards", out):
        out.copy_(_scaled(_tree([shard.float() for shard in shards]), scale, at))
        if bins is not None:
            norm_bins([out], out=bins)
        return
    cuda = use_cuda("sum_shards", out)
    backend.run_compiled("sum_shards", cuda, out, shards, out, scale, at, bins)
    _bump([out] if bins is None else [out, bins])


_pack_op = define_op(
    "pack_(Tensor(a!) flat, Tensor[] tensors, int[] offsets, float scale, Tensor? at) -> ()", _pack
)
_unpack_op = define_op(
    "unpack_(Tensor(a!)[] tensors, Tensor flat, int[] offsets, float scale, Tensor? at) -> ()",
    _unpack,
)
_accumulate_op = define_op(
    "accumulate_(Tensor(a!)[] totals, Tensor[] values, float scale, Tensor? at) -> ()", _accumulate
)
_sum_shards_op = define_op(
    "sum_shards(Tensor[] shards, Tensor(a!) out, float scale, Tensor? at, Tensor(b!)? bins) -> ()",
    _sum_shards,
)


def _split_scale(
    op: str, scale: float | Tensor | None, device: torch.device
) -> tuple[float, Tensor | None]:
    """The factor by value, or the tensor to read it from."""
    if not isinstance(scale, Tensor):
        if isinstance(scale, str):
            raise ValueError(f"{op}: expected a number, got scale={scale!r}; convert it")
        return 1.0 if scale is None else float(scale), None
    check_scalar(op, "scale", scale, device)
    return 1.0, scale


def _check_list(op: str, name: str, tensors: Sequence[Tensor], device: torch.device) -> None:
    for i, t in enumerate(tensors):
        if t.dtype not in DTYPE_CODES:
            raise ValueError(
                f"{op}: expected fp32, bf16 or fp16, got {name}[{i}]={t.dtype}; cast it"
            )
        if t.device != device:
            raise ValueError(
                f"{op}: expected one device, got {name}[{i}] on {t.device} and the first tensor "
                f"on {device}; move them together"
            )


def _check_writable(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    for i, t in enumerate(tensors):
        if not torch.compiler.is_compiling() and t.is_neg():  # a graph cannot check this
            raise ValueError(
                f"{op}: expected memory that holds values, got {name}[{i}] negated lazily; pass "
                f"{name}[{i}].resolve_neg(), and copy the result back"
            )
        if not t.is_contiguous() and any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape)):
            raise ValueError(
                f"{op}: expected a separate address for each element, got {name}[{i}] "
                f"expanded, stride={t.stride()}; pass {name}[{i}].contiguous()"
            )


def _check_flat(op: str, flat: Tensor) -> None:
    _check_writable(op, "flat", [flat])
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"{op}: expected a contiguous flat of one dimension, got flat={list(flat.shape)} "
            f"stride={flat.stride()}; pass flat.view(-1)"
        )


def _places(
    op: str, flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int] | None
) -> list[int]:
    """Offsets of the tensors in flat; refuses tensors that do not fit."""
    _check_flat(op, flat)
    _check_list(op, "flat", [flat], flat.device)
    _check_list(op, "tensors", tensors, flat.device)
    sizes = [t.numel() for t in tensors]
    if offsets is None:
        if sum(sizes) != flat.numel():
            raise ValueError(
                f"{op}: expected flat to hold the tensors exactly, got flat of {flat.numel()} "
                f"elements for {sum(sizes)}; pass the slice that they fill, or offsets"
            )
        return list(accumulate(sizes, initial=0))[:-1]
    if len(offsets) != len(sizes):
        raise ValueError(
            f"{op}: expected one offset for each tensor, got {len(offsets)} offsets for "
            f"{len(sizes)} tensors; pass lists of one length"
        )
    for i, (o, n) in enumerate(zip(offsets, sizes)):
        if o < 0 or o + n > flat.numel():
            raise ValueError(
                f"{op}: expected every tensor inside flat of {flat.numel()} elements, got "
                f"offsets[{i}]={o} with {n} elements; correct the layout"
            )
    return list(offsets)


@torch.no_grad()
def pack_(
    flat: Tensor, tensors: Sequence[Tensor], *, scale: float | Tensor | None = None,
    offsets: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Writes the tensors into flat, cast and scaled: flat[o_i : o_i + n_i] = tensors[i] * scale.

    Args:
        flat: [P], fp32 | bf16 | fp16, contiguous.
        tensors: fp32 | bf16 | fp16 in any mixture, any shapes and strides (elements go in the order
            of tensors[i].flatten()), size 0 included. A tensor that already is its slice of flat is
            scaled in place.
        scale: factor, a number or fp32 [] on flat's device; None means 1.
        offsets: first element of each tensor; elements between them do not change. None: one after
            the other, and they fill flat.
    Raises:
        ValueError: sizes or offsets that do not fit; another dtype or device; memory that overlaps.
    Traffic: bytes of the tensors read and of their slices written; a strided tensor is copied
        first.
    Deterministic: yes, bitwise, for any number of threads, device and instruction set.
    Oracle: fastpar.kernels.reference.pack_ref
    """
    places = _places("pack_", flat, tensors, offsets)
    factor, at = _split_scale("pack_", scale, flat.device)
    if tensors:
        _pack_op(flat, list(tensors), places, factor, at)


@torch.no_grad()
def unpack_(
    tensors: Sequence[Tensor], flat: Tensor, *, scale: float | Tensor | None = None,
    offsets: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Reads the tensors from flat, cast and scaled: tensors[i] = flat[o_i : o_i + n_i] * scale.

    Args:
        tensors, flat, scale, offsets: as in pack_; the tensors are written, flat is not.
    Raises:
        ValueError: as pack_; a tensor that is expanded.
    Traffic: bytes of the tensors written and of their slices read; a strided tensor costs a copy.
    Deterministic: yes, bitwise, for any number of threads, device and instruction set.
    Oracle: fastpar.kernels.reference.unpack_ref
    """
    places = _places("unpack_", flat, tensors, offsets)
    _check_writable("unpack_", "tensors", tensors)
    factor, at = _split_scale("unpack_", scale, flat.device)
    if tensors:
        _unpack_op(list(tensors), flat, places, factor, at)


@torch.no_grad()
def accumulate_(
    totals: Sequence[Tensor], values: Sequence[Tensor], *, scale: float | Tensor | None = None
) -> None:
    """Adds a list to a list, for example 16-bit gradients to fp32 ones: totals += values * scale.

    Args:
        totals: fp32 | bf16 | fp16 in any mixture, any shapes and strides, size 0 included.
        values: shapes of totals, fp32 | bf16 | fp16 in any mixture, any strides.
        scale: factor, a number or fp32 [] on the tensors' device; None means 1.
    Raises:
        ValueError: lists of unequal length; shapes that differ; another dtype or device; memory
            that overlaps (a value may be the same tensor as its total); a total that is expanded.
    Traffic: bytes of totals twice and of values once; a value in another memory order than its
        total is copied first.
    Deterministic: yes, bitwise, for any number of threads, device and instruction set.
    Oracle: fastpar.kernels.reference.accumulate_ref
    """
    if len(totals) != len(values):
        raise ValueError(
            f"accumulate_: expected lists of one length, got {len(totals)} totals and "
            f"{len(values)} values; pass one value for each total"
        )
    if not totals:
        return
    device = totals[0].device
    _check_list("accumulate_", "totals", totals, device)
    _check_list("accumulate_", "values", values, device)
    _check_writable("accumulate_", "totals", totals)
    for i, (t, v) in enumerate(zip(totals, values)):
        if t.shape != v.shape:
            raise ValueError(
                f"accumulate_: expected values of the totals' shapes, got totals[{i}]="
                f"{list(t.shape)} values[{i}]={list(v.shape)}; expand or reshape the value"
            )
    factor, at = _split_scale("accumulate_", scale, device)
    _accumulate_op(list(totals), list(values), factor, at)


@torch.no_grad()
def sum_shards(
    received: Tensor | Sequence[Tensor], out: Tensor, *, scale: float | Tensor | None = None,
    bins: Tensor | None = None,
) -> None:  # fmt: skip
    """Sums the shards of all ranks as a tree: the reduce half of an all-to-all reduce-scatter.

    The sum is in fp32 and rounded once, so that the result does not depend on which rank computes
    it; neighbours are added first, the largest power of two below W on the left (csrc/sum_tree.h,
    [Note: the tree]).

    Args:
        received: [W, S] with contiguous rows, or W tensors [S] of one dtype; fp32 | bf16 | fp16.
            W >= 1, on CUDA <= 4087.
        out: [S], fp32 | bf16 | fp16, contiguous; may be one of the shards.
        scale: factor, a number or fp32 [] on out's device (1 / W for the mean); None means 1.
        bins: int64 [NORM_WORDS] on out's device: adds norm_bins of out to it in the same pass, so
            that the gradient's norm needs no pass of its own.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit; out partly over a shard.
    Traffic: bytes of received and of out.
    Deterministic: yes, bitwise, for any number of threads, device and instruction set.
    Oracle: fastpar.kernels.reference.sum_shards_ref
    """
    shards = list(received.unbind(0)) if isinstance(received, Tensor) else list(received)
    if not shards:
        raise ValueError("sum_shards: expected at least one shard, got 0; pass one per rank")
    _check_flat("sum_shards", out)
    _check_list("sum_shards", "out", [out], out.device)
    _check_list("sum_shards", "received", shards, out.device)
    for w, shard in enumerate(shards):
        if shard.shape != out.shape or shard.dtype != shards[0].dtype or not shard.is_contiguous():
            raise ValueError(
                f"sum_shards: expected contiguous shards of shape {list(out.shape)} and one dtype, "
                f"got received[{w}]={list(shard.shape)} {shard.dtype} stride={shard.stride()} and "
                f"received[0]={shards[0].dtype}; pass [W, S] with contiguous rows"
            )
    factor, at = _split_scale("sum_shards", scale, out.device)
    if bins is not None:
        check_bins("sum_shards", bins, out.device)
    _sum_shards_op(shards, out, factor, at, bins)
