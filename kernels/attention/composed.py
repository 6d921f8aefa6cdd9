"""Attention in torch ops, one block of heads and queries at a time.

For fp64, FASTPAR_BACKEND=torch and devices without a kernel of ours. Formulas, mask, what is kept
for backward and [Note: causal] are those of kernels/attention/__init__.py. A sample of a batch and
a document are treated alike, [T, H, D]; all of its [H, T, Tk] scores are never alive at once.
Without dropout and documents torch has its own kernel: sdpa().
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels.philox import MAX_HEADS, MaskBlock, Rng, dropout_block, refuse_parts

# A block: scores that fit a CPU's cache; on a GPU launches cost more.
BLOCK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 27}
BLOCK_QUERIES = {"cpu": 64, "cuda": 512}

Triple = tuple[Tensor, Tensor, Tensor]


class Dropout(NamedTuple):
    """The mask of one call; without a key nothing is dropped."""

    key: Tensor | None
    site_head: int
    threshold: int
    first_row: int = 0  # the mask's row of the first query

    def block(self, x: Tensor, sample: int, head: int, row: int, out: Tensor) -> Tensor:
        """x [heads, rows, keys] with its slice of the mask applied, in out (which may be x)."""
        if self.key is None:
            return x
        heads, rows, keys = x.shape
        site, first_head = divmod(self.site_head, MAX_HEADS)
        at = MaskBlock(1, heads, rows, keys, sample, first_head + head, self.first_row + row)
        return dropout_block(x, self.key, site, self.threshold, at, out)


class _Blocks:
    """The blocks of one document, and buffers for their scores that are allocated once."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, scale: float, n_buffers: int):
        (self.T, self.H, _), self.Tk = q.shape, k.shape[0]
        self.causal, self.scale = causal, scale
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.group = self.H // k.shape[1]
        device = q.device.type
        self.rows = min(self.T, BLOCK_QUERIES.get(device, 512))
        row_bytes = self.rows * self.Tk * self.dtype.itemsize
        fit = BLOCK_BYTES.get(device, 1 << 27) // row_bytes // self.group * self.group
        self.n_heads = min(self.H, max(self.group, fit))
        size = self.n_heads * self.rows * self.Tk
        self.memory = torch.empty(n_buffers, size, dtype=self.dtype, device=q.device)
        ones = torch.ones(self.rows, self.rows, dtype=torch.bool, device=q.device)
        self.future = ones.triu(1)

    def heads(self) -> Iterator[slice]:
        """Query heads of a block; those of one key head stay together."""
        for h in range(0, self.H, self.n_heads):
            yield slice(h, min(self.H, h + self.n_heads))

    def key_heads(self, heads: slice) -> slice:
        return slice(heads.start // self.group, heads.stop // self.group)

    def queries(self) -> Iterator[tuple[int, int, int]]:
        """(q0, q1, keys that queries [q0, q1) see); queries that see none are skipped."""
        behind = self.Tk - self.T
        for q0 in range(max(0, -behind) if self.causal else 0, self.T, self.rows):
            q1 = min(self.T, q0 + self.rows)
            yield q0, q1, q1 + behind if self.causal else self.Tk

    def gather(self, x: Tensor, heads: slice, repeat: int = 1) -> Tensor:
        """x[:, heads] as [heads, T, D]; each head `repeat` times."""
        return x[:, heads].transpose(0, 1).repeat_interleave(repeat, 0).to(self.dtype)

    def buffers(self, q: Tensor, keys: int) -> list[Tensor]:
        heads, rows = q.shape[:2]
        return [m[: heads * rows * keys].view(heads, rows, keys) for m in self.memory]

    def probs(self, q: Tensor, k: Tensor, scores: Tensor, out: Tensor) -> None:
        """out = softmax(q k^T * scale), q the last queries that k's keys allow."""
        scores.baddbmm_(q, k.mT, beta=0, alpha=self.scale)
        if self.causal:
            n = q.shape[1]
            scores[..., k.shape[1] - n :].masked_fill_(self.future[:n, :n], float("-inf"))
        torch.softmax(scores, -1, out=out)


def bounds_of(cu_seqlens: Tensor, total: int) -> list[int]:
    """Document boundaries; raises ValueError if they do not divide [0, total) into documents."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(
            f"attention: expected cu_seqlens to start at 0, got cu_seqlens[0]={bounds[0]}; "
            "it is the running sum of the documents' lengths, starting with 0"
        )
    if not all(map(operator.lt, bounds, bounds[1:])):
        i = next(i for i in range(1, len(bounds)) if bounds[i] <= bounds[i - 1])
        raise ValueError(
            f"attention: expected cu_seqlens to increase, got cu_seqlens[{i - 1}]={bounds[i - 1]} "
            f"cu_seqlens[{i}]={bounds[i]}; leave out empty documents"
        )
    if bounds[-1] != total:
        raise ValueError(
            f"attention: expected cu_seqlens to end at q's total, got "
            f"cu_seqlens[{len(bounds) - 1}]={bounds[-1]} total={total}; "
            "the documents' lengths add up to the rows of q"
        )
    return bounds


def check_first_row(rng: Rng, q: Tensor, cu_seqlens: Tensor | None) -> int | None:
    """The mask's row of the first query, None for 0; refuses rows that no kernel can draw."""
    if rng.is_whole:
        return None
    refuse_parts("attention", rng, "first_head", *["first_row"] * (cu_seqlens is None))
    if not 0 <= rng.first_row < (1 << 31) - q.shape[1]:
        raise ValueError(
            "attention: expected 0 <= rng.first_row and first_row + T < 2**31, got "
            f"first_row={rng.first_row} T={q.shape[1]}; count rows from the first of the sample"
        )
    return rng.first_row or None


def documents(x: Tensor, bounds: Sequence[int] | None) -> Sequence[Tensor]:
    """[T, H, D] each: the samples of x, or the documents of a packed x with these boundaries."""
    if bounds is None:
        return x.unbind(0)
    return [x[start:end] for start, end in itertools.pairwise(bounds)]


def composed_fwd(
    inputs: Triple, bounds: Sequence[int] | None, causal: bool, scale: float, drop: Dropout
) -> Tensor:
    """o, shape of q. bounds: None for a batch, else the document boundaries."""
    q = inputs[0]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = (documents(x, bounds) for x in (*inputs, o))
    for sample, (q, k, v, o_part) in enumerate(zip(*parts)):
        if causal and k.shape[0] < q.shape[0]:
            o_part[: q.shape[0] - k.shape[0]] = 0
        blocks = _Blocks(q, k, causal, scale, n_buffers=2)
        for heads in blocks.heads():
            qh = blocks.gather(q, heads)
            kh, vh = (blocks.gather(x, blocks.key_heads(heads), blocks.group) for x in (k, v))
            for q0, q1, keys in blocks.queries():
                scores, p = blocks.buffers(qh[:, q0:q1], keys)
                blocks.probs(qh[:, q0:q1], kh[:, :keys], scores, p)
                drop.block(p, sample, heads.start, q0, p)
                o_part[q0:q1, heads] = torch.bmm(p, vh[:, :keys]).transpose(0, 1)
    return o


def composed_bwd(
    do: Tensor, inputs: Triple, grads: Triple, bounds: Sequence[int] | None, causal: bool,
    scale: float, drop: Dropout,
) -> None:  # fmt: skip
    """Writes the gradients, which may be slices of one packed tensor."""
    parts = (documents(x, bounds) for x in (do, *inputs, *grads))
    for sample, (do, q, k, v, dq, dk, dv) in enumerate(zip(*parts)):
        if causal and k.shape[0] < q.shape[0]:
            dq[: q.shape[0] - k.shape[0]] = 0
        blocks = _Blocks(q, k, causal, scale, n_buffers=3)
        for heads in blocks.heads():
            key_heads = blocks.key_heads(heads)
            qh, doh = (blocks.gather(x, heads) for x in (q, do))
            kh, vh = (blocks.gather(x, key_heads, blocks.group) for x in (k, v))
            dkh, dvh = torch.zeros_like(kh), torch.zeros_like(vh)
            for q0, q1, keys in blocks.queries():
                qb, dob, kb = qh[:, q0:q1], doh[:, q0:q1], kh[:, :keys]
                scores, p, dp = blocks.buffers(qb, keys)
                blocks.probs(qb, kb, scores, p)
                dvh[:, :keys].baddbmm_(drop.block(p, sample, heads.start, q0, dp).mT, dob)
                torch.bmm(dob, vh[:, :keys].mT, out=dp)
                drop.block(dp, sample, heads.start, q0, dp)
                delta = torch.mul(dp, p, out=scores).sum(-1, keepdim=True)
                ds = dp.sub_(delta).mul_(p)
                dq[q0:q1, heads] = torch.bmm(ds, kb).mul_(scale).transpose(0, 1)
                dkh[:, :keys].baddbmm_(ds.mT, qb, alpha=scale)
            for grad, part in ((dk, dkh), (dv, dvh)):
                grad[:, key_heads] = part.unflatten(0, (-1, blocks.group)).sum(1).transpose(0, 1)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    """torch's own kernel on [B, T, H, D], causal as in attention/__init__.py [Note: causal]."""
    T, Tk = q.shape[1], k.shape[1]
    unseeing, mask = 0, None
    if causal and Tk < T:
        unseeing = T - Tk
    elif causal and Tk > T:  # torch would align the mask to the first key
        causal = False
        if T > 1:
            mask = torch.ones(T, Tk, dtype=torch.bool, device=q.device).tril(Tk - T)
    # A branch, because a comparison of sizes is no bool while torch.compile uses symbolic sizes.
    grouped = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    qh, kh, vh = (x.transpose(1, 2) for x in (q[:, unseeing:], k, v))
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": scale, **grouped}
    o = F.scaled_dot_product_attention(qh, kh, vh, **options).transpose(1, 2)
    return F.pad(o, (0, 0, 0, 0, unseeing, 0)) if unseeing else o
