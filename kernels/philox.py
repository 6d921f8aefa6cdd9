"""Counter-based random bits, and dropout masks drawn from them.

An element's bit depends only on (seed, global sample index, dropout site, head, row, column): a
mask is the same for any tiling, number of threads, device, number of ranks and gradient
accumulation. Only the key is saved for backward; the mask is drawn again.

[Note: the mask]
x is seen as [B, H, R, C] (a missing H or R is 1; dimensions beyond four fold into R). With
Philox-4x32-10:
    sample  = key[1] + b
    counter = (c // 16, r, site << 16 | h, sample & 0xffffffff)
    key     = (seed & 0xffffffff, (seed >> 32) ^ (sample >> 32))
Element c takes byte c % 16 of the 16 output bytes (word c % 16 // 4, little-endian). It is kept iff
byte >= threshold, threshold = round(256 * p), and scaled by 256 / (256 - threshold). Eight bits per
element let one Philox call serve 16 elements; p becomes a multiple of 1/256.
Attention drops probabilities: h = head, r = query, c = key.
Source: Salmon, Moraes, Dror, Shaw 2011, doi 10.1145/2063384.2063405.
"""

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import triton_module, use_cpp, use_triton
from fastpar.kernels.op import check_float, define_autograd, define_op

MAX_SITES = 1 << 15
MAX_HEADS = 1 << 16
_LOW = 0xFFFFFFFF
_MUL_0, _MUL_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


class Rng(NamedTuple):
    """The source of a dropout's bits. Fields from first_head on select the slice of the full mask
    for an x that is a slice of a model's tensor; an op that cannot draw such a slice refuses them.

    key: int64 [2] on the CPU or on x's device: (seed, global index of the batch's first sample).
        Sample b of the batch has index key[1] + b.
    site: which dropout of the model; 0 <= site < 2**15.
    first_head: x's first head in the full tensor (attention; dropout of four dimensions).
    rows: rows per sample, if x [..., C] is seen as rows [N, C] that may begin and end inside a
        sample (dropout, residual_layer_norm, residual_rms_norm). None: x is [B, ..., C].
    first_row: with rows: the index of x's first row, counted from the first row of sample key[1].
        Attention has a first_row without rows: that of its first query in its sample.
    moved: with an even number of rows: the offsets added to a row's index in its sample, for rows
        in the first half and in the second half. So a rank may have two runs of every sample.
    """

    key: Tensor
    site: int
    first_head: int = 0
    first_row: int = 0
    rows: int | None = None
    moved: tuple[int, int] = (0, 0)

    @property
    def place(self) -> tuple[int, int, int]:
        """What ops get about the rows: (first_row, *moved)."""
        return self.first_row, *self.moved

    @property
    def is_whole(self) -> bool:
        """Whether no slice of a mask is selected."""
        return self[2:] == _WHOLE

    @property
    def site_head(self) -> int:
        """Counter word of x's head 0; for head h add h."""
        return self.site << 16 | self.first_head


_WHOLE = tuple(Rng._field_defaults.values())  # of all fields except key and site


class MaskBlock(NamedTuple):
    """A slice of a mask: these heads and rows, all columns, of consecutive samples."""

    samples: int
    heads: int
    rows: int
    cols: int
    first_sample: int = 0
    first_head: int = 0
    first_row: int = 0


def make_key(seed: int, first_sample: int, device: Any = None) -> Tensor:
    """The key of a batch whose first sample has the global index first_sample: int64 [2].

    Raises:
        ValueError: a number outside [0, 2**63).
    """
    for name, value in (("seed", seed), ("first_sample", first_sample)):
        if not isinstance(value, numbers.Integral) or not 0 <= value < 1 << 63:
            raise ValueError(
                f"make_key: expected 0 <= {name} < 2**63, got {name}={value}; take it modulo 2**63"
            )
    return torch.tensor((seed, first_sample), dtype=torch.int64, device=device)


def draw_key(device: Any = None) -> Tensor:
    """A fresh key from torch's default generator of `device`, controlled by torch.manual_seed."""
    return torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=device)


def quantize_p(p: float) -> int:
    """p in units of 1/256, the resolution of a mask: 0 for p = 0, else 1..255.

    Raises:
        ValueError: p outside [0, 1), or so small that it would become 0.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout: expected 0 <= p < 1, got p={p}; use p=0 to switch dropout off")
    threshold = round(256 * p)
    if threshold == 0 and p > 0.0:
        raise ValueError(
            f"dropout: expected p = 0 or p > 1/512, got p={p}; p is rounded to a multiple of "
            "1/256, which is 0 here"
        )
    return threshold if threshold < 256 else 255


def philox_4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words; all of them broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The 64-bit products wrap in int64: their bits are right, and & removes the sign of >>.
        product_0, product_1 = c0 * _MUL_0, c2 * _MUL_1
        c0, c1 = ((product_1 >> 32) & _LOW) ^ c1 ^ k0, product_1 & _LOW
        c2, c3 = ((product_0 >> 32) & _LOW) ^ c3 ^ k1, product_0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3


def _keep_torch(key: Tensor, site: int, threshold: int, at: MaskBlock, device: Any) -> Tensor:
    """bool [samples, heads, rows, cols] in torch ops, on any device."""

    def count(first: int, n: int, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = n
        return torch.arange(first, first + n, dtype=torch.int64, device=device).view(shape)

    # 0-dim CPU tensors mix with any device, so a CPU key costs no copy and no wait.
    seed, sample = key[0], key[1] + count(at.first_sample, at.samples, 0)
    groups, rows = count(0, (at.cols + 15) // 16, 3), count(at.first_row, at.rows, 2)
    site_head = count(at.first_head, at.heads, 1) | site << 16
    low, high = seed & _LOW, ((seed >> 32) ^ (sample >> 32)) & _LOW
    words = philox_4x32((groups, rows, site_head, sample & _LOW), (low, high))
    drawn = torch.stack(words, dim=-1).to(torch.int32).view(torch.uint8)
    return drawn.flatten(3)[..., : at.cols] >= threshold


def mask_shape(shape: Sequence[int]) -> MaskBlock:
    """The full mask of an x of this shape, [B, ..., C]; see [Note: the mask]."""
    if len(shape) < 2:
        raise ValueError(
            f"dropout: expected x of shape [B, ..., C], got x={list(shape)}; add a dimension"
        )
    heads = shape[1] if len(shape) > 3 else 1
    rows = 1
    for size in shape[2 if len(shape) > 3 else 1 : -1]:
        rows *= size
    return MaskBlock(shape[0], heads, rows, shape[-1])


def refuse_parts(op: str, rng: Rng, *allowed: str) -> None:
    """Refuses fields of rng that select a slice of the mask, except those that op supports."""
    for name in ("first_head", "first_row", "rows", "moved"):
        value = getattr(rng, name)
        if name not in allowed and value != Rng._field_defaults[name]:
            raise ValueError(
                f"{op}: expected an rng without {name}, got {name}={value}; {op} cannot draw such "
                "a slice of a mask"
            )


def check_rows(op: str, rng: Rng, n: int) -> None:
    """Refuses rows that are not rows of a batch; n: rows of x."""
    if rng.rows is None:
        refuse_parts(op, rng, "first_head")
        return
    refuse_parts(op, rng, "first_row", "rows", "moved")
    if rng.rows < 1 or (rng.rows % 2 and any(rng.moved)):
        raise ValueError(
            f"{op}: expected rng.rows >= 1, and even if halves are moved, got rows={rng.rows} "
            f"moved={rng.moved}; it is the number of rows of a sample in x"
        )
    if min(rng.moved[0], rng.rows // 2 + rng.moved[1]) < 0 or max(rng.moved) >= 1 << 30:
        raise ValueError(
            f"{op}: expected rng.moved that leave no row below 0 or above 2**30, got "
            f"moved={rng.moved} rows={rng.rows}; count rows from the first of the sample"
        )
    if rng.first_row < 0 or rng.first_row + n >= 1 << 31:
        raise ValueError(
            f"{op}: expected 0 <= rng.first_row and first_row + N < 2**31, got "
            f"first_row={rng.first_row} N={n}; count rows from the first of sample key[1]"
        )


def check_rng(rng: Rng, heads: int, device: torch.device) -> None:
    """Refuses values that the counter cannot hold, and a key on another device."""
    key, site = rng.key, rng.site
    if not 0 <= site < MAX_SITES:
        raise ValueError(
            f"dropout: expected 0 <= site < {MAX_SITES}, got site={site}; number the dropouts of "
            "a model from 0"
        )
    if key.dtype != torch.int64 or key.shape != (2,):
        raise ValueError(
            f"dropout: expected an int64 key of shape [2], got key={key.dtype} {list(key.shape)}; "
            "use make_key or draw_key"
        )
    where = key.device
    if (where != device and where.type != "cpu") and (
        where.type != device.type or device.index not in (None, where.index)
    ):
        raise ValueError(
            f"dropout: expected a key on the CPU or on {device}, got key on {key.device}; "
            "move it with key.to(...)"
        )
    if heads >= MAX_HEADS:
        raise ValueError(
            f"dropout: expected fewer than {MAX_HEADS} heads (dimension 1 of 4), got H={heads}; "
            "fold heads into rows"
        )
    if rng.first_head < 0 or rng.first_head + heads >= MAX_HEADS:
        raise ValueError(
            f"dropout: expected 0 <= rng.first_head and first_head + H < {MAX_HEADS}, got "
            f"first_head={rng.first_head} H={heads}; count heads from the model's first"
        )


def _check_slice(op: str, rng: Rng, shape: Sequence[int], device: torch.device) -> None:
    whole = mask_shape(shape)
    check_rng(rng, whole.heads, device)
    check_rows(op, rng, whole.samples * whole.heads * whole.rows)


def mask_parts(
    shape: Sequence[int], first_head: int, rows: int | None, place: Sequence[int]
) -> list[MaskBlock]:
    """The mask of an x of this shape as blocks that follow each other in memory: one without rows,
    else the end of a sample, whole samples, the beginning of a sample, as far as x has them; halves
    of samples if they are moved."""
    whole = mask_shape(shape)
    if rows is None:
        return [whole._replace(first_head=first_head)]
    parts, left = [], whole.samples * whole.heads * whole.rows
    first_row, *moved = place
    run = rows // 2 if any(moved) else rows
    while left:
        sample, row = divmod(first_row, rows)
        n = left // rows if row == 0 and left >= rows == run else 0
        some = rows if n else min(left, run - row % run)
        block = MaskBlock(n or 1, 1, some, whole.cols, sample, 0, row + moved[row // run])
        parts.append(block)
        left -= block.samples * block.rows
        first_row += block.samples * block.rows
    return parts


def _block_for_cpp(key: Tensor, site: int, threshold: int, at: MaskBlock) -> tuple[int, ...]:
    seed, first_sample = key.tolist()
    place = (*at[:4], at.first_head, at.first_row)
    return seed, first_sample + at.first_sample, site, threshold, *place, torch.get_num_threads()


def dropout_block(
    x: Tensor, key: Tensor, site: int, threshold: int, at: MaskBlock, out: Tensor | None = None
) -> Tensor:
    """A block of x, contiguous, with its slice of the mask applied. No autograd; out may be x."""
    if use_triton("dropout", x):
        return triton_module("philox_triton").dropout_fwd(x, key, site, threshold, at, out)
    if not use_cpp("dropout", x):
        keep = _keep_torch(key, site, threshold, at, x.device).view(x.shape)
        scaled = torch.where(keep, x * (256.0 / (256 - threshold)), 0.0)
        return scaled if out is None else out.copy_(scaled)
    y = torch.empty_like(x) if out is None else out
    if x.numel():
        _C.dropout(x, y, *_block_for_cpp(key, site, threshold, at))
    return y


def _dropout_run(
    x: Tensor, key: Tensor, site_head: int, threshold: int, rows: int | None, place: Sequence[int]
) -> Tensor:
    x, site = x.contiguous(), site_head // MAX_HEADS
    parts = mask_parts(x.shape, site_head % MAX_HEADS, rows, place)
    if len(parts) == 1:
        return dropout_block(x, key, site, threshold, parts[0])
    y = torch.empty_like(x)
    sizes = [at.samples * at.rows for at in parts]
    pieces = (t.flatten(0, -2).split(sizes) for t in (x, y))
    for at, x_part, y_part in zip(parts, *pieces):
        dropout_block(x_part, key, site, threshold, at, y_part)
    return y


_dropout = define_op(
    "dropout(Tensor x, Tensor key, SymInt site_head, int threshold, SymInt? rows, SymInt[] place)"
    " -> Tensor",
    _dropout_run,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)


def _setup_context(ctx, inputs, output):
    _, key, *ctx.mask = inputs
    ctx.save_for_backward(key)


def _backward(ctx, dy):
    return _dropout(dy, ctx.saved_tensors[0], *ctx.mask), *[None] * 5


define_autograd(_dropout, _setup_context, _backward)


def _keep_block(
    key: Tensor, site: int, threshold: int, at: MaskBlock, device: torch.device
) -> Tensor:
    """bool [samples, heads, rows, cols]"""
    like = torch.empty(0, dtype=torch.float32, device=device)
    if use_triton("keep_mask", like):
        return triton_module("philox_triton").keep_mask_fwd(key, site, threshold, at, like.device)
    if not use_cpp("keep_mask", like):
        return _keep_torch(key, site, threshold, at, device)
    keep = torch.empty(at[:4], dtype=torch.bool, device=device)
    if keep.numel():
        _C.keep_mask(keep, *_block_for_cpp(key, site, threshold, at))
    return keep


def _keep_mask_run(
    key: Tensor, site_head: int, threshold: int, rows: int | None, place: Sequence[int],
    shape: Sequence[int], device: torch.device,
) -> Tensor:  # fmt: skip
    site, first_head = divmod(site_head, MAX_HEADS)
    parts = [
        _keep_block(key, site, threshold, at, device)
        for at in mask_parts(shape, first_head, rows, place)
    ]
    if len(parts) == 1:
        return parts[0].view(shape)
    keep = torch.empty(shape, dtype=torch.bool, device=device)
    if parts:
        torch.cat([part.flatten(0, 2) for part in parts], out=keep.view(-1, shape[-1]))
    return keep


_keep_mask = define_op(
    "keep_mask(Tensor key, SymInt site_head, int threshold, SymInt? rows, SymInt[] place, "
    "SymInt[] shape, Device device) -> Tensor",
    _keep_mask_run,
    lambda *args: torch.empty(args[-2], dtype=torch.bool, device=args[-1]),
)


def keep_mask(rng: Rng, p: float, shape: Sequence[int], device: Any = None) -> Tensor:
    """The mask that dropout(x, p, rng) applies to an x of this shape: bool, True where kept.

    Args:
        shape: [B, ..., C]; see [Note: the mask]. device: of the result; None: the key's.
    Raises:
        ValueError: p outside [0, 1); site, key, heads or rows that the counter cannot hold.
    Deterministic: yes; the same bits on every device.
    Oracle: fastpar.kernels.reference.keep_mask_ref
    """
    device = rng.key.device if device is None else torch.device(device)
    threshold = quantize_p(p)
    _check_slice("keep_mask", rng, shape, device)
    return _keep_mask(rng.key, rng.site_head, threshold, rng.rows, rng.place, shape, device)


def dropout(x: Tensor, p: float, rng: Rng | None = None) -> Tensor:
    """Sets elements of x to 0 with probability p and scales the others by 1 / (1 - p).

    Args:
        x: [B, ..., C], any floating dtype (compiled on CPU for fp32, bf16, fp16).
        p: in [0, 1); rounded to a multiple of 1/256, and the scale with it.
        rng: key and site of the mask, and which slice of it x has; None draws a key from torch's
            default generator.
    Returns:
        y: shape and dtype of x; x itself for p = 0. Only the key is kept for backward.
    Raises:
        ValueError: p outside [0, 1); site, key, heads or rows that the counter cannot hold; fewer
            than two dimensions; a key on another device.
    Traffic: 2 * x.numel() * x.element_size() bytes, forward and backward each.
    Deterministic: yes, bitwise; see [Note: the mask].
    Oracle: fastpar.kernels.reference.dropout_ref
    Source: Salmon, Moraes, Dror, Shaw 2011, doi 10.1145/2063384.2063405
    """
    check_float("dropout", "x", x)
    threshold = quantize_p(p)
    if threshold == 0:
        return x
    if rng is None:
        rng = Rng(draw_key(x.device), 0)
    _check_slice("dropout", rng, x.shape, x.device)
    return _dropout(x, rng.key, rng.site_head, threshold, rng.rows, rng.place)
