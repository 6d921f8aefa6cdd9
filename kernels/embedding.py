"""Token plus position embedding: x[b, t] = wte[idx[b, t]] + wpe[first_position + t], then dropout.

    dwte[v] = sum of dx, under the mask, over the positions where idx is v, in order; 0 elsewhere
    dwpe[first_position + t] = sum of dx, under the mask, over the batch

Saved for backward: idx and the mask's key; the mask is drawn again. Sums of 16-bit gradients are
kept in fp32, because a frequent token has hundreds of terms. dwte is dense, because in a model with
a tied head the same parameter also gets the dense gradient of the loss. Given the buffer wte_grad,
backward adds only the rows of tokens that occur.

On a GPU each pass is one or two kernels (embedding_triton.py); elsewhere it is torch ops, and the
compiled dropout in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import philox
from fastpar.kernels.backend import FLOATS, triton_module, use_cpp, use_triton
from fastpar.kernels.linear.weight_gradients import offers_place, wide_room
from fastpar.kernels.op import (
    check_dense,
    define_autograd,
    define_kernels,
    define_op,
    refuse_batch,
    refuse_buffer,
)
from fastpar.kernels.philox import Rng


def _check_ids(idx: Tensor, rows: int) -> None:
    """Checks on CPU only; a GPU would have to be waited for."""
    if idx.device.type == "cpu" and idx.numel():
        low, high = torch.aminmax(idx)
        if low < 0 or high >= rows:
            raise ValueError(
                f"embedding: expected token ids in [0, {rows}), got "
                f"id={int(low if low < 0 else high)}; encode the text with the model's tokenizer"
            )


def embedding_fwd(
    idx: Tensor, wte: Tensor, wpe: Tensor | None, first_position: int, key: Tensor | None,
    site: int, threshold: int, wte_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x, masked if there is a key. wte_grad is for backward only."""
    _check_ids(idx, wte.shape[0])
    if use_triton("embedding", wte):
        return triton_module("embedding_triton").embedding_fwd(
            idx, wte, wpe, first_position, key, site, threshold
        )
    x = F.embedding(idx, wte)
    if wpe is not None:
        x.add_(wpe[first_position : first_position + idx.shape[1]])
    return _masked(x, key, site, threshold, out=x)


def _sums_of_tokens(dx: Tensor, idx: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that occur and the sums of their rows, at least fp32."""
    tokens, place = idx.flatten().unique(return_inverse=True)
    wide = torch.promote_types(dx.dtype, torch.float32)
    sums = dx.new_zeros(tokens.numel(), dx.shape[-1], dtype=wide)
    return tokens.long(), sums.index_add_(0, place, dx.flatten(0, 1).to(wide))


def _sum_by_token(dx: Tensor, idx: Tensor, rows: int) -> Tensor:
    """dwte: [rows, C]."""
    if dx.dtype.itemsize > 2 or dx.device.type != "cpu":  # torch's CUDA kernel sums in fp32
        return torch.ops.aten.embedding_dense_backward(dx, idx, rows, -1, False)
    tokens, sums = _sums_of_tokens(dx, idx)
    return dx.new_zeros(rows, dx.shape[-1]).index_copy_(0, tokens, sums.to(dx.dtype))


def _add_by_token(dx: Tensor, idx: Tensor, wte_grad: Tensor) -> None:
    if dx.device.type != "cpu":  # index_add_ is not deterministic there
        wte_grad.add_(_sum_by_token(dx, idx, wte_grad.shape[0]))
        return
    tokens, sums = _sums_of_tokens(dx, idx)
    sums += wte_grad[tokens]
    wte_grad.index_copy_(0, tokens, sums.to(wte_grad.dtype))


def _sum_by_position(dx: Tensor, T: int, positions: int, first_position: int) -> Tensor:
    """dwpe: [positions, C]."""
    dwpe = dx.new_zeros(positions, dx.shape[-1])
    if positions:
        torch.sum(dx, 0, out=dwpe[first_position : first_position + T])
    return dwpe


def _masked(
    x: Tensor, key: Tensor | None, site: int, threshold: int, out: Tensor | None = None
) -> Tensor:
    if key is None:
        return x
    return philox.dropout_block(x, key, site, threshold, philox.mask_shape(x.shape), out)


def embedding_bwd(
    dx: Tensor, idx: Tensor, key: Tensor | None, site: int, threshold: int, rows: int,
    positions: int, first_position: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dwte [rows, C] and dwpe [positions, C]; either is [0, C] if its size is given as 0."""
    dx, mask, places = dx.contiguous(), (key, site, threshold), (positions, first_position)
    if use_triton("embedding", dx):
        kernels = triton_module("embedding_triton")
        dwte = dx.new_zeros(rows, dx.shape[-1])
        if rows:
            kernels.embedding_bwd_wte(dx, idx, *mask, dwte, add=False)
        return dwte, kernels.embedding_bwd_wpe(dx, idx, *mask, *places)
    dx = _masked(dx, *mask)
    dwte = _sum_by_token(dx, idx, rows) if rows else dx.new_empty(0, dx.shape[-1])
    return dwte, _sum_by_position(dx, idx.shape[1], *places)


def embedding_bwd_(
    wte_grad: Tensor, dx: Tensor, idx: Tensor, key: Tensor | None, site: int, threshold: int,
    positions: int, first_position: int,
) -> Tensor:  # fmt: skip
    """Adds dwte to wte_grad and returns dwpe like embedding_bwd."""
    dx, mask, places = dx.contiguous(), (key, site, threshold), (positions, first_position)
    if use_triton("embedding", dx):
        kernels = triton_module("embedding_triton")
        kernels.embedding_bwd_wte(dx, idx, *mask, wte_grad, add=True)
        return kernels.embedding_bwd_wpe(dx, idx, *mask, *places)
    dx = _masked(dx, *mask)
    _add_by_token(dx, idx, wte_grad)
    return _sum_by_position(dx, idx.shape[1], *places)


_composed = define_op(
    "embedding_composed(Tensor idx, Tensor wte, Tensor? wpe, SymInt first_position, Tensor? key, "
    "SymInt site, int threshold, Tensor? wte_grad) -> Tensor",
    embedding_fwd,
    lambda idx, wte, *_: wte.new_empty(*idx.shape, wte.shape[1]),
)
_composed_bwd = define_op(
    "embedding_composed_bwd(Tensor dx, Tensor idx, Tensor? key, SymInt site, int threshold, "
    "SymInt rows, SymInt positions, SymInt first_position) -> (Tensor, Tensor)",
    embedding_bwd,
    lambda dx, *args: tuple(dx.new_empty(n, dx.shape[-1]) for n in args[-3:-1]),
)
_embedding_bwd_ = define_op(
    "embedding_bwd_(Tensor(a!) wte_grad, Tensor dx, Tensor idx, Tensor? key, SymInt site, "
    "int threshold, SymInt positions, SymInt first_position) -> Tensor",
    embedding_bwd_,
    lambda wte_grad, dx, *args: dx.new_empty(args[-2], dx.shape[-1]),
)


def _setup_context(ctx, inputs, output):
    idx, wte, wpe, ctx.first_position, key, ctx.site, ctx.threshold, wte_grad = inputs
    ctx.save_for_backward(idx, key)
    # Not saved: others add to the same buffer between forward and backward (the tied head does).
    ctx.wte_grad = wte_grad if wte.requires_grad else None
    ctx.rows = wte.shape[0] if wte.requires_grad and wte_grad is None else 0
    ctx.wte = wte if ctx.rows and hasattr(wte, "fastpar_wide_place") else None
    ctx.positions = wpe.shape[0] if wpe is not None and wpe.requires_grad else 0


def _backward(ctx, dx):
    idx, key = ctx.saved_tensors
    mask, places = (key, ctx.site, ctx.threshold), (ctx.positions, ctx.first_position)
    dwte, buffer = None, ctx.wte_grad
    if buffer is not None:
        refuse_batch("embedding", "wte_grad", dx)
    elif (found := wide_room(ctx.wte, dx)) is not None:
        buffer = found[0] if found[1] else found[0].zero_()
    if buffer is not None:
        dwpe = _embedding_bwd_(buffer, dx, idx, *mask, *places)
    else:
        dwte, dwpe = _composed_bwd(dx, idx, *mask, ctx.rows, *places)
        dwte = dwte if ctx.rows else None
    return None, dwte, dwpe if ctx.positions else None, *[None] * 5


define_autograd(_composed, _setup_context, _backward, once="embedding")


# The op of csrc/torch, whose backward returns its gradients.


def _run(idx, wte, wpe, first_position, key=None, site=0, threshold=0):
    """On a GPU; kernels/op.py define_kernels says for which calls."""
    _check(idx, wte, wpe, first_position, None)
    return embedding_fwd(idx, wte, wpe, first_position, key, site, threshold)


def _run_bwd(dx, idx, rows, positions, first_position, key=None, site=0, threshold=0):
    return embedding_bwd(dx, idx, key, site, threshold, rows, positions, first_position)


def _fake(idx, wte, wpe, first_position, *_):
    _check(idx, wte, wpe, first_position, None)
    return wte.new_empty(*idx.shape, wte.shape[1])


def _bwd_fake(dx, idx, rows, positions, *_):
    return tuple(dx.new_empty(n, dx.shape[-1]) for n in (rows, positions))


_embedding = define_kernels("embedding", _run, _fake)
define_kernels("embedding_bwd", _run_bwd, _bwd_fake)


def _check(
    idx: Tensor, wte: Tensor, wpe: Tensor | None, first_position: int, wte_grad: Tensor | None
) -> None:
    if idx.dim() != 2 or idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"embedding: expected idx [B, T] of int64 or int32, got idx={list(idx.shape)} "
            f"{idx.dtype}; add the batch dimension or convert it"
        )
    check_dense("embedding", "idx", idx)
    check_dense("embedding", "wte", wte)
    if wte.dim() != 2 or wte.dtype not in FLOATS:
        raise ValueError(
            f"embedding: expected wte [V, C] of a floating dtype, got wte={list(wte.shape)} "
            f"{wte.dtype}; pass the weight of the token embedding"
        )
    if idx.device != wte.device:
        raise ValueError(
            f"embedding: expected idx on wte's device {wte.device}, got idx on {idx.device}; "
            "move one of them"
        )
    if wte_grad is not None:
        refuse_buffer("embedding", "wte_grad")
        _check_wte_grad(wte_grad, wte)
    if wpe is None:
        return
    check_dense("embedding", "wpe", wpe)
    if wpe.dim() != 2 or wpe.shape[1] != wte.shape[1]:
        raise ValueError(
            f"embedding: expected wpe [positions, C] with C={wte.shape[1]}, got "
            f"wpe={list(wpe.shape)}; both embeddings have one width"
        )
    if wpe.dtype != wte.dtype or wpe.device != wte.device:
        raise ValueError(
            f"embedding: expected wpe like wte ({wte.dtype}, {wte.device}), got wpe={wpe.dtype} "
            f"on {wpe.device}; convert one of them"
        )
    if first_position < 0 or first_position + idx.shape[1] > wpe.shape[0]:
        raise ValueError(
            f"embedding: expected positions in [0, {wpe.shape[0]}), got "
            f"first_position={first_position} with T={idx.shape[1]}; crop the context"
        )


def _check_wte_grad(wte_grad: Tensor, wte: Tensor) -> None:
    if wte_grad.shape != wte.shape or wte_grad.device != wte.device:
        raise ValueError(
            f"embedding: expected wte_grad like wte ({list(wte.shape)}, {wte.device}), got "
            f"wte_grad={list(wte_grad.shape)} on {wte_grad.device}; pass the buffer of its gradient"
        )
    if wte_grad.dtype not in (wte.dtype, torch.float32):
        raise ValueError(
            f"embedding: expected wte_grad of wte's dtype {wte.dtype} or float32, got "
            f"wte_grad={wte_grad.dtype}; pass the buffer of its gradient"
        )
    if wte_grad.stride(1) != 1 and wte_grad.shape[1] != 1:
        raise ValueError(
            "embedding: expected wte_grad with contiguous rows, got "
            f"wte_grad.stride()={wte_grad.stride()}; allocate it as [V, C]"
        )


def embedding(
    idx: Tensor, wte: Tensor, wpe: Tensor | None = None, *, first_position: int = 0,
    dropout_p: float = 0.0, rng: Rng | None = None, wte_grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Token plus position embedding: x = dropout(wte[idx] + wpe[f : f + T]), f = first_position.

    Args:
        idx: [B, T], int64 or int32, token ids in [0, V).
        wte: [V, C], any floating dtype.
        wpe: [positions, C], dtype of wte, positions >= first_position + T; None adds nothing.
        first_position: position of the first token.
        dropout_p: rounded to a multiple of 1/256.
        rng: key and site of the mask; None draws a key from torch's default generator.
        wte_grad: [V, C], fp32 or dtype of wte, rows contiguous: backward adds the gradient of wte
            to it, in place, and does not set wte.grad. For a tied head, which adds to the same
            buffer.
    Returns:
        x: [B, T, C], dtype of wte. idx and the key are kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; a position beyond wpe; an
            id outside [0, V), on CPU; dropout_p outside [0, 1); a key or site that the mask cannot
            hold; an rng for a slice of a mask.
        RuntimeError: a second derivative is requested.
    Ids outside [0, V) on a GPU: the row is NaN (0 where dropped) and has no gradient; nothing
    outside the tables is read or written. (FASTPAR_BACKEND=torch, fp64: a device-side assert.)
    Traffic: 2 * x.numel() * x.element_size() bytes forward; backward reads dx once per table
        and writes dwte once, or with wte_grad only the rows that occur.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.embedding_ref
    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners
    """
    usual = wte_grad is None and not offers_place(wte)
    usual = usual and (use_cpp("embedding", wte) or use_triton("embedding", wte))
    if usual and not dropout_p:
        return _embedding(idx, wte, wpe, first_position)
    _check(idx, wte, wpe, first_position, wte_grad)
    key, site, threshold = None, 0, philox.quantize_p(dropout_p)
    if threshold:
        rng = Rng(philox.draw_key(wte.device), 0) if rng is None else rng
        philox.refuse_parts("embedding", rng)
        philox.check_rng(rng, 1, wte.device)
        key, site = rng.key, rng.site
    if usual:
        return _embedding(idx, wte, wpe, first_position, key, site, threshold)
    return _composed(idx, wte, wpe, first_position, key, site, threshold, wte_grad)
