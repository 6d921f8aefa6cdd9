"""Token plus position embedding: x[b, t] = wte[idx[b, t]] + wpe[first_position + t], then dropout.

    dwte[v] = sum of dx, under the mask, over the positions where idx is v, in order; 0 elsewhere
    dwpe[first_position + t] = sum of dx, under the mask, over the batch

Saved for backward: idx and the mask's key; the mask is drawn again. Sums of 16-bit gradients are
kept in fp32, because a frequent token has hundreds of terms. dwte is dense, because in a model with
a tied head the same parameter also gets the dense gradient of the loss.

On a GPU each pass is one or two kernels (embedding_triton.py); elsewhere it is torch ops, and the
compiled dropout in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import philox
from fastpar.kernels.backend import FLOATS, triton_module, use_cpp, use_triton
from fastpar.kernels.op import check_dense, define_autograd, define_kernels, define_op
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
    site: int, threshold: int,
) -> Tensor:  # fmt: skip
    """x, masked if there is a key."""
    _check_ids(idx, wte.shape[0])
    if use_triton("embedding", wte):
        return triton_module("embedding_triton").embedding_fwd(
            idx, wte, wpe, first_position, key, site, threshold
        )
    x = F.embedding(idx, wte)
    if wpe is not None:
        x.add_(wpe[first_position : first_position + idx.shape[1]])
    return _masked(x, key, site, threshold, out=x)


def _sum_by_token(dx: Tensor, idx: Tensor, rows: int) -> Tensor:
    """dwte: [rows, C]."""
    if dx.dtype.itemsize > 2 or dx.device.type != "cpu":  # torch's CUDA kernel sums in fp32
        return torch.ops.aten.embedding_dense_backward(dx, idx, rows, -1, False)
    tokens, place = idx.flatten().unique(return_inverse=True)
    sums = dx.new_zeros(tokens.numel(), dx.shape[-1], dtype=torch.float32)
    sums.index_add_(0, place, dx.flatten(0, 1).float())
    return dx.new_zeros(rows, dx.shape[-1]).index_copy_(0, tokens.long(), sums.to(dx.dtype))


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
            kernels.embedding_bwd_wte(dx, idx, *mask, dwte)
        return dwte, kernels.embedding_bwd_wpe(dx, idx, *mask, *places)
    dx = _masked(dx, *mask)
    dwte = _sum_by_token(dx, idx, rows) if rows else dx.new_empty(0, dx.shape[-1])
    return dwte, _sum_by_position(dx, idx.shape[1], *places)


_composed = define_op(
    "embedding_composed(Tensor idx, Tensor wte, Tensor? wpe, SymInt first_position, Tensor? key, "
    "SymInt site, int threshold) -> Tensor",
    embedding_fwd,
    lambda idx, wte, *_: wte.new_empty(*idx.shape, wte.shape[1]),
)
_composed_bwd = define_op(
    "embedding_composed_bwd(Tensor dx, Tensor idx, Tensor? key, SymInt site, int threshold, "
    "SymInt rows, SymInt positions, SymInt first_position) -> (Tensor, Tensor)",
    embedding_bwd,
    lambda dx, *args: tuple(dx.new_empty(n, dx.shape[-1]) for n in args[-3:-1]),
)


def _setup_context(ctx, inputs, output):
    idx, wte, wpe, ctx.first_position, key, ctx.site, ctx.threshold = inputs
    ctx.save_for_backward(idx, key)
    ctx.rows = wte.shape[0] if wte.requires_grad else 0
    ctx.positions = wpe.shape[0] if wpe is not None and wpe.requires_grad else 0


def _backward(ctx, dx):
    idx, key = ctx.saved_tensors
    mask, sizes = (key, ctx.site, ctx.threshold), (ctx.rows, ctx.positions)
    dwte, dwpe = _composed_bwd(dx, idx, *mask, *sizes, ctx.first_position)
    return None, dwte if ctx.rows else None, dwpe if ctx.positions else None, *[None] * 4


define_autograd(_composed, _setup_context, _backward, once="embedding")


# The op of csrc/torch, whose backward returns its gradients.


def _run(idx, wte, wpe, first_position, key=None, site=0, threshold=0):
    """On a GPU; kernels/op.py define_kernels says for which calls."""
    _check(idx, wte, wpe, first_position)
    return embedding_fwd(idx, wte, wpe, first_position, key, site, threshold)


def _run_bwd(dx, idx, rows, positions, first_position, key=None, site=0, threshold=0):
    return embedding_bwd(dx, idx, key, site, threshold, rows, positions, first_position)


def _fake(idx, wte, wpe, first_position, *_):
    _check(idx, wte, wpe, first_position)
    return wte.new_empty(*idx.shape, wte.shape[1])


def _bwd_fake(dx, idx, rows, positions, *_):
    return tuple(dx.new_empty(n, dx.shape[-1]) for n in (rows, positions))


_embedding = define_kernels("embedding", _run, _fake)
define_kernels("embedding_bwd", _run_bwd, _bwd_fake)


def _check(idx: Tensor, wte: Tensor, wpe: Tensor | None, first_position: int) -> None:
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


def embedding(
    idx: Tensor, wte: Tensor, wpe: Tensor | None = None, *, first_position: int = 0,
    dropout_p: float = 0.0, rng: Rng | None = None,
) -> Tensor:  # fmt: skip
    """Token plus position embedding: x = dropout(wte[idx] + wpe[f : f + T]), f = first_position.

    Args:
        idx: [B, T], int64 or int32, token ids in [0, V).
        wte: [V, C], any floating dtype.
        wpe: [positions, C], dtype of wte, positions >= first_position + T; None adds nothing.
        first_position: position of the first token.
        dropout_p: rounded to a multiple of 1/256.
        rng: key and site of the mask; None draws a key from torch's default generator.
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
        and writes dwte once.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.embedding_ref
    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners
    """
    usual = use_cpp("embedding", wte) or use_triton("embedding", wte)
    if usual and not dropout_p:
        return _embedding(idx, wte, wpe, first_position)
    _check(idx, wte, wpe, first_position)
    key, site, threshold = None, 0, philox.quantize_p(dropout_p)
    if threshold:
        rng = Rng(philox.draw_key(wte.device), 0) if rng is None else rng
        philox.refuse_parts("embedding", rng)
        philox.check_rng(rng, 1, wte.device)
        key, site = rng.key, rng.site
    if usual:
        return _embedding(idx, wte, wpe, first_position, key, site, threshold)
    return _composed(idx, wte, wpe, first_position, key, site, threshold)
