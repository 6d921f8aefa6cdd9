"""Token plus position embedding: x[b, t] = wte[idx[b, t]] + wpe[first_position + t], then dropout.

    dwte[v] = sum of dx over the places where idx is v, in their order; 0 elsewhere
    dwpe[first_position + t] = sum of dx over the batch

Saved for backward: idx. Sums of 16-bit gradients are kept in fp32: a frequent token has hundreds of
terms. dwte is dense, because in a model with a tied head the same parameter also gets the dense
gradient of the loss; with freed memory kept mapped (backend.keep_freed_memory) that costs 2.7 ms at
V = 50304, C = 384, and 31 ms of page faults without.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.backend import define_autograd, define_op, refuse_double_backward
from fastpar.kernels.philox import Rng, dropout


def embedding_fwd(idx: Tensor, wte: Tensor, wpe: Tensor | None, first_position: int) -> Tensor:
    """x before dropout. Ids are checked on CPU; on a GPU torch asserts on the device."""
    if idx.device.type == "cpu" and idx.numel():
        low, high = torch.aminmax(idx)
        if low < 0 or high >= wte.shape[0]:
            raise ValueError(
                f"embedding: expected token ids in [0, {wte.shape[0]}), got "
                f"id={int(low if low < 0 else high)}; encode the text with the model's tokenizer"
            )
    x = F.embedding(idx, wte)
    return x if wpe is None else x.add_(wpe[first_position : first_position + idx.shape[1]])


def _sum_by_token(dx: Tensor, idx: Tensor, rows: int) -> Tensor:
    """dwte: [rows, C]."""
    if dx.dtype.itemsize > 2 or dx.device.type != "cpu":  # torch's CUDA kernel sums in fp32
        return torch.ops.aten.embedding_dense_backward(dx, idx, rows, -1, False)
    tokens, place = idx.flatten().unique(return_inverse=True)
    sums = dx.new_zeros(tokens.numel(), dx.shape[-1], dtype=torch.float32)
    sums.index_add_(0, place, dx.flatten(0, 1).float())
    return dx.new_zeros(rows, dx.shape[-1]).index_copy_(0, tokens, sums.to(dx.dtype))


def embedding_bwd(
    dx: Tensor, idx: Tensor, rows: int, positions: int, first_position: int
) -> tuple[Tensor, Tensor]:
    """dwte [rows, C] and dwpe [positions, C]; either is [0, C] when its size is given as 0."""
    dx = dx.contiguous()
    C, T = dx.shape[-1], idx.shape[1]
    dwte = _sum_by_token(dx, idx, rows) if rows else dx.new_empty(0, C)
    dwpe = dx.new_zeros(positions, C)
    if positions:
        torch.sum(dx, 0, out=dwpe[first_position : first_position + T])
    return dwte, dwpe


def _fake(idx, wte, wpe, first_position):
    return wte.new_empty(*idx.shape, wte.shape[1])


def _bwd_fake(dx, idx, rows, positions, first_position):
    return dx.new_empty(rows, dx.shape[-1]), dx.new_empty(positions, dx.shape[-1])


_embedding = define_op(
    "embedding(Tensor idx, Tensor wte, Tensor? wpe, SymInt first_position) -> Tensor",
    embedding_fwd,
    _fake,
    ("CPU", "CUDA"),
)
_embedding_bwd = define_op(
    "embedding_bwd(Tensor dx, Tensor idx, SymInt rows, SymInt positions, SymInt first_position)"
    " -> (Tensor, Tensor)",
    embedding_bwd,
    _bwd_fake,
    ("CPU", "CUDA"),
)


def _setup_context(ctx, inputs, output):
    idx, wte, wpe, ctx.first_position = inputs
    ctx.save_for_backward(idx)
    ctx.rows = wte.shape[0] if wte.requires_grad else 0
    ctx.positions = wpe.shape[0] if wpe is not None and wpe.requires_grad else 0


def _backward(ctx, dx):
    refuse_double_backward("embedding")
    dwte, dwpe = _embedding_bwd(dx, *ctx.saved_tensors, ctx.rows, ctx.positions, ctx.first_position)
    return None, dwte if ctx.rows else None, dwpe if ctx.positions else None, None


define_autograd(_embedding, _setup_context, _backward)


def _check(idx: Tensor, wte: Tensor, wpe: Tensor | None, first_position: int) -> None:
    if idx.dim() != 2 or idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"embedding: expected idx [B, T] of int64 or int32, got idx={list(idx.shape)} "
            f"{idx.dtype}; add the batch dimension or convert it"
        )
    if wte.dim() != 2 or not wte.is_floating_point():
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
    idx: Tensor,
    wte: Tensor,
    wpe: Tensor | None = None,
    *,
    first_position: int = 0,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
) -> Tensor:
    """Token plus position embedding: x = dropout(wte[idx] + wpe[first_position:][:T]).

    Args:
        idx: [B, T], int64 or int32, token ids in [0, V).
        wte: [V, C], any floating dtype.
        wpe: [positions, C], dtype of wte, positions >= first_position + T; None adds nothing.
        first_position: position of the first token.
        dropout_p: rounded to a multiple of 1/256.
        rng: key and site of the mask; None draws a key from torch's default generator.
    Returns:
        x: [B, T, C], dtype of wte. idx is kept for backward.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; a position beyond wpe; an
            id outside [0, V) (on a GPU this is a device-side assert of torch); dropout_p outside
            [0, 1).
        RuntimeError: a second derivative is asked for.
    Traffic: 2 * x.numel() * x.element_size() bytes forward; backward writes dwte once.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.embedding_ref
    Source: Radford et al. 2019, Language Models are Unsupervised Multitask Learners
    """
    _check(idx, wte, wpe, first_position)
    return dropout(_embedding(idx, wte, wpe, first_position), dropout_p, rng)
