"""Softmax attention per head: o = (P * M) v, P = softmax(softmax_scale * q k^T).

    dv = (P * M)^T do,  dp = M * (do v^T),  ds = P * (dp - rowsum(dp * P)),
    dq = softmax_scale * ds k,  dk = softmax_scale * ds^T q

M is 1 without dropout, else 0 or 1 / (1 - p) by kernels/philox.py. All [B, H, T, Tk] scores are
never alive at once. Kept for backward: q, k, v, the key of the mask and one or two numbers per row;
P and M are computed again, with the same bits. Statistics and accumulators are fp32.

On CUDA the kernels are those of triton.py. They keep the logarithm of a row's sum of exponentials,
and o, because rowsum(dp * P) = rowsum(do * o). On CPU a compiled kernel reads strided q, k, v (or
the packed projection) and writes their gradients in place; a CPU without fused multiply-add (x86
before AVX2) runs the composed form, because the kernel would have to imitate it. A head belongs to
one thread, so every sum has one order for any number of threads. It keeps a row's largest score and
the inverse of its sum, because the logarithm would add a rounding of its own size to P.

[Note: causal] The mask is aligned to the last query and the last key: query i sees keys
j <= i + Tk - T, as in FlashAttention since 2.1 (torch's is_causal aligns to the first). With
T < Tk the queries are the last T of Tk positions, which is what a key/value cache needs; with
T > Tk the first T - Tk queries see nothing and their output is 0.

[Note: documents] With cu_seqlens, int32 [n + 1], n documents are stored one after another in
[total, H, D]: document i is rows cu_seqlens[i] to cu_seqlens[i + 1], none is empty, and a query
sees only keys of its own document. The dropout mask of document i is that of sample i of a batch,
with rows and columns counted from the document's start. On the CPU the numbers are checked. On a
GPU they are not, because reading them would make the host wait: wrong numbers give a wrong result,
but no access outside the tensors. (The composed form needs them on the host: it waits and checks.)

[Note: kept mask] A dropout mask is either kept as bits from the forward on, or drawn again in each
of the three kernels. Kept, it takes B * H * T * Tk / 8 bytes a layer (T and Tk rounded up to 256):
151 MB for 8 samples of GPT-2 124M at T = 1024. attention_bits.json says per architecture which is
faster, `python -m bench tune` measures it. The default is kept on Hopper, where kernels that draw
cannot load keys ahead: with registers for Philox and tiles in flight the assembler waits for each
matrix product. Calls with documents draw: only the GPU knows how many blocks a document has.

[Note: composed] Where no kernel serves a call (fp64, FASTPAR_BACKEND=torch, other devices) torch
ops compute one block of heads and queries at a time; a sample of a batch and a document are treated
alike, [T, H, D]. Without dropout and documents torch has its own kernel: sdpa().
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import choice as choices
from fastpar.kernels import philox
from fastpar.kernels.attention import peers as attention_peers
from fastpar.kernels.attention.peers import serving
from fastpar.kernels.backend import has_fma, triton_module, use_cpp, use_triton, wide
from fastpar.kernels.config_table import ConfigTable
from fastpar.kernels.op import check_float, define_autograd, define_kernels, define_op
from fastpar.kernels.philox import Rng, check_rng, draw_key, quantize_p

MAX_HEAD_DIM = 256
TRITON_HEAD_DIM = (16, 128, 8)  # from, to, in steps of
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
        site, first_head = divmod(self.site_head, philox.MAX_HEADS)
        at = philox.MaskBlock(1, heads, rows, keys, sample, first_head + head, self.first_row + row)
        return philox.dropout_block(x, self.key, site, self.threshold, at, out)


class _Blocks:
    """The blocks of one document, and buffers for their scores that are allocated once."""

    def __init__(self, q: Tensor, k: Tensor, causal: bool, scale: float, n_buffers: int):
        (self.T, self.H, _), self.Tk = q.shape, k.shape[0]
        self.causal, self.scale = causal, scale
        self.dtype = wide(q.dtype)
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


class Mask(NamedTuple):
    """How the mask of a call is handled."""

    kept: int  # 1: as bits, from forward to backward; 0: drawn again


BITS = ConfigTable("attention_bits", Mask, lambda arch: [Mask(0), Mask(1)])


def bits_shape(B: int, H: int, T: int, Tk: int) -> tuple[int, int, int, int]:
    """See [Note: kept bits] of bits_triton.py."""
    return B, H, -(-Tk // 256) * 4, -(-T // 256) * 256


def _keeps(device: torch.device) -> int:
    if device.index is not None and not torch.cuda.is_initialized():  # tracing with fake tensors
        return 0
    kept: int = BITS.get(triton_module("attention.triton").gpu_arch(device)).kept
    return kept


def _bits_fake(*mask: Any) -> Tensor:
    *_, sizes, device = mask
    shape = bits_shape(*sizes) if _keeps(device) else (0,)
    return torch.empty(shape, dtype=torch.uint64, device=device)


def _bits_run(*mask: Any) -> Tensor:
    bits = _bits_fake(*mask)
    if bits.numel():
        draw = triton_module("attention.bits_triton").attention_bits_fwd
        *how, sizes, _ = mask
        draw(*how, bits, tuple(sizes))
    return bits


_attention_bits = define_op(
    "attention_bits(Tensor key, SymInt site_head, int threshold, bool causal, SymInt[] sizes, "
    "Device device) -> Tensor",
    _bits_run,
    _bits_fake,
)


def kept_bits(
    q: Tensor, Tk: int, causal: bool, key: Tensor, site_head: int, threshold: int
) -> Tensor | None:
    """The mask of a call with q [B, T, H, D] (or packed) and Tk keys; None if it is drawn."""
    if not torch.compiler.is_compiling() and not _keeps(q.device):
        return None  # without a call of the op
    sizes = (q.shape[0], q.shape[-2], q.shape[1], Tk)
    bits: Tensor = _attention_bits(key, site_head, threshold, causal, sizes, q.device)
    return bits if bits.numel() else None


def _split(q: Tensor, k: Tensor | None, v: Tensor | None) -> Triple:
    """q, k, v; without k and v, q holds the three packed, [B, T, 3, H, D] or [total, 3, H, D]."""
    if k is None or v is None:
        q, k, v = q.unbind(-3)
    return q, k, v


def _case(threshold: int, cu_seqlens: Tensor | None) -> str:
    """The op name under which a call is proven: torch has its own kernel for plain calls only."""
    return "attention_masked" if threshold or cu_seqlens is not None else "attention"


def _stats_shape(q: Tensor) -> tuple[int, ...]:
    """[B, H, T] or [H, total]: the rows of q in the order of their statistics."""
    *B, T, H, _D = q.shape
    return *B, H, T


def _documents(
    cu_seqlens: Tensor | None, q: Tensor, triton: bool
) -> tuple[Tensor | None, list[int] | None]:
    """cu_seqlens, contiguous, and their numbers where the host reads them."""
    if cu_seqlens is None:
        return None, None
    cu_seqlens = cu_seqlens.contiguous()
    return cu_seqlens, None if triton and q.is_cuda else bounds_of(cu_seqlens, q.shape[0])


def _of_triton(stats: Tensor, o: Tensor) -> bool:
    """Whether statistics are Triton's: one per row; the C++ kernel has two, others none."""
    return stats.dim() == o.dim() - 1 and o.numel() > 0


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _attention_run(
    q: Tensor, k: Tensor | None, v: Tensor | None, causal: bool, scale: float | None,
    key: Tensor | None = None, site_head: int = 0, threshold: int = 0,
    cu_seqlens: Tensor | None = None, bits: Tensor | None = None, first_row: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Every kernel but ours for CPUs, which this calls for calls that a proof gives to others."""
    _check_inputs(q, k, v, cu_seqlens is not None)
    scale = _check_scale(q, scale)
    op = _case(threshold, cu_seqlens)
    triton = use_triton(op, q)
    cu_seqlens, bounds = _documents(cu_seqlens, q, triton)
    if not q.numel():
        return _fake(q, k, v, causal, scale, key, site_head, threshold, cu_seqlens)
    q, k, v = _split(q, k, v)
    cpp = not triton and has_fma and use_cpp(op, q)
    if (triton or cpp) and (peer := serving(op, q, k, v, causal, 0)):
        return attention_peers.forward(peer, q, k, v, causal, scale, base_2=triton)
    if triton:
        return triton_module("attention.triton").attention_fwd(
            q, k, v, causal, scale, key, site_head, threshold, cu_seqlens, bits, first_row
        )
    if cpp:
        return _attention(
            q, k, v, causal, scale, key, site_head, threshold, cu_seqlens, None, first_row
        )
    drop = Dropout(key, site_head, threshold, first_row or 0)
    o = composed_fwd((q, k, v), bounds, causal, scale, drop)
    return o, q.new_empty(0, dtype=torch.float32)


def _attention_bwd_run(
    do: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, o: Tensor | None, stats: Tensor,
    causal: bool, scale: float | None, key: Tensor | None = None, site_head: int = 0,
    threshold: int = 0, cu_seqlens: Tensor | None = None, bits: Tensor | None = None,
    first_row: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv; for a packed q its gradient and twice [0]."""
    inputs = _split(q, k, v)
    dq = _contiguous_like(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k is None or v is None:
        results, grads = (dq, q.new_empty(0), q.new_empty(0)), _split(dq, None, None)
    else:
        results = grads = dq, _contiguous_like(k), _contiguous_like(v)
    op = _case(threshold, cu_seqlens)
    triton = _of_triton(stats, do)
    cu_seqlens, bounds = _documents(cu_seqlens, q, triton)
    if do.stride(-1) != 1:
        do = do.contiguous()
    if not do.numel():
        for grad in grads:
            grad.zero_()
    elif o is not None and stats.numel() and (peer := serving(op, *inputs, causal, 1)):
        attention_peers.backward(peer, do, *inputs, o, stats, causal, scale, grads)
    elif triton:
        triton_module("attention.triton").attention_bwd(
            do, *inputs, o, stats, *grads, causal, scale, key, site_head, threshold, cu_seqlens,
            bits, first_row,
        )  # fmt: skip
    elif stats.dim() == do.dim():  # our kernel's for CPUs
        mask = key, site_head, threshold, cu_seqlens, None, first_row
        return _attention_bwd(do, q, k, v, None, stats, causal, scale, *mask)
    else:
        drop = Dropout(key, site_head, threshold, first_row or 0)
        composed_bwd(do, inputs, grads, bounds, causal, scale, drop)
    return results


def _fake(q, k, v, causal, scale, key=None, site_head=0, threshold=0, cu_seqlens=None, *_):
    _check_inputs(q, k, v, cu_seqlens is not None)
    _check_scale(q, scale)
    q, _k, _v = _split(q, k, v)
    op = _case(threshold, cu_seqlens)
    if use_triton(op, q):
        stats = _stats_shape(q)
    else:
        stats = (*_stats_shape(q), 2) if has_fma and use_cpp(op, q) else (0,)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return o, torch.empty(stats, dtype=torch.float32, device=q.device)


def _bwd_fake(do, q, k, v, *_):
    """Gradients of q, k and v, or of the packed q and twice [0]."""
    empty = (q.new_empty(0) if x is None else _contiguous_like(x) for x in (k, v))
    return _contiguous_like(q), *empty


_attention = define_kernels("attention", _attention_run, _fake)
_attention_bwd = define_kernels("attention_bwd", _attention_bwd_run, _bwd_fake)

# The same functions for the calls that our kernel for CPUs does not serve.
_HOW = (
    "bool causal, float? scale, Tensor? key, SymInt site_head, int threshold, Tensor? cu_seqlens, "
    "SymInt? first_row"
)


def _without_bits(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: run(*args[:-1], None, args[-1])


_composed = define_op(
    f"attention_composed(Tensor q, Tensor? k, Tensor? v, {_HOW}) -> (Tensor, Tensor)",
    _without_bits(_attention_run), _fake,
)  # fmt: skip
_composed_bwd = define_op(
    "attention_composed_bwd(Tensor do, Tensor q, Tensor? k, Tensor? v, Tensor? o, Tensor stats, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor)",
    _without_bits(_attention_bwd_run), _bwd_fake,
)  # fmt: skip


def _setup_context(ctx, inputs, output):
    q, k, v, *ctx.how, key, site_head, ctx.threshold, cu_seqlens, ctx.first_row = inputs
    ctx.site_head = site_head
    o, stats = output
    other = attention_peers.wanted(_case(ctx.threshold, cu_seqlens), q, 1)
    kept = o if _of_triton(stats, o) or other in attention_peers.PEERS else None
    ctx.save_for_backward(q, k, v, kept, stats, key, cu_seqlens)


def _backward(ctx, do, *_):
    q, k, v, o, stats, key, cu_seqlens = ctx.saved_tensors
    rest = key, ctx.site_head, ctx.threshold, cu_seqlens, ctx.first_row
    dq, dk, dv = _composed_bwd(do, q, k, v, o, stats, *ctx.how, *rest)
    return dq, *((None, None) if k is None else (dk, dv)), *[None] * 7


define_autograd(_composed, _setup_context, _backward, by_products=1, once="attention")


def attention_calls(q: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward for tensors like q, below autograd: arguments as those of
    attention_composed."""
    if use_triton("attention_masked", q) or _is_plain(q):
        return _without_bits(_attention), _without_bits(_attention_bwd)
    return _composed, _composed_bwd


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
    philox.refuse_parts("attention", rng, "first_head", *["first_row"] * (cu_seqlens is None))
    if not 0 <= rng.first_row < (1 << 31) - q.shape[1]:
        raise ValueError(
            "attention: expected 0 <= rng.first_row and first_row + T < 2**31, got "
            f"first_row={rng.first_row} T={q.shape[1]}; count rows from the first of the sample"
        )
    return rng.first_row or None


def _check_tensor(name: str, x: Tensor, shape: str) -> None:
    check_float("attention", name, x)
    if x.dim() != shape.count(",") + 1:
        raise ValueError(
            f"attention: expected {name} of shape {shape}, got {name}={list(x.shape)}; "
            "unflatten the heads (and pass cu_seqlens only with packed documents)"
        )
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(
            f"attention: expected {name} with a contiguous last dimension, got "
            f"{name}.stride={x.stride()}; call {name}.contiguous()"
        )


def _check_inputs(q: Tensor, k: Tensor | None, v: Tensor | None, packed: bool) -> None:
    """Refuses q, k and v that do not match, naming the dimension and both sizes. csrc/torch's
    is_usual() allows the same."""
    if k is None or v is None:
        shape = "[total, 3, H, D]" if packed else "[B, T, 3, H, D]"
        _check_tensor("qkv", q, shape)
        if q.shape[-3] != 3:
            raise ValueError(
                f"attention: expected qkv of shape {shape}, got qkv={list(q.shape)}; "
                "unflatten the projection's last dimension to (3, H, D)"
            )
        return
    shape = "[total, H, D]" if packed else "[B, T, H, D]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, shape)
        if x.device != q.device or x.dtype != q.dtype:
            raise ValueError(
                f"attention: expected q, k and v of one device and dtype, got q={q.device} "
                f"{q.dtype}, {name}={x.device} {x.dtype}; convert them first"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"attention: expected k and v of one shape, got k={list(k.shape)} v={list(v.shape)}; "
            "each key has one value"
        )
    first, size, other = "total" if packed else "B", q.shape[0], k.shape[0]
    if size != other:
        raise ValueError(
            f"attention: expected equal {first} of q and k, got q={size} k={other}; "
            f"both are {shape}"
        )
    *_, Tk, Hkv, D = k.shape
    H = q.shape[-2]
    if q.shape[-1] != D:
        raise ValueError(
            f"attention: expected equal D of q and k, got q={q.shape[-1]} k={D}; both are {shape}"
        )
    if Tk == 0 or Hkv == 0 or H % Hkv:
        raise ValueError(
            f"attention: expected at least one key, and H divisible by the heads of k, got H={H} "
            f"k={list(k.shape)}; each key head serves H / Hkv query heads"
        )


def _check_cu_seqlens(cu_seqlens: Tensor, device: torch.device) -> None:
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            "attention: expected cu_seqlens int32 of shape [n + 1], n >= 1, got "
            f"cu_seqlens={cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "F.pad(lengths.cumsum(0), (1, 0)).int() makes it"
        )
    if cu_seqlens.device != device:
        raise ValueError(
            f"attention: expected cu_seqlens on q's device, got cu_seqlens={cu_seqlens.device} "
            f"q={device}; move it once, when the batch is made"
        )


def _check_scale(q: Tensor, softmax_scale: float | None) -> float:
    """The factor of the scores."""
    D = q.shape[-1]
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(
            f"attention: expected head dim in [1, {MAX_HEAD_DIM}], got D={D}; use more heads"
        )
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    if isinstance(scale, str) or not 0.0 < scale < math.inf:
        raise ValueError(
            f"attention: expected a finite softmax_scale > 0, got softmax_scale={softmax_scale}; "
            "change the sign of q instead"
        )
    return float(scale)


_USUAL_SCALES = (type(None), float)


def _is_plain(q: Tensor) -> bool:
    """Whether our kernel for CPUs serves, and nothing may prefer another."""
    preferred = attention_peers.forced or choices.proofs or choices._trying
    return has_fma and not preferred and use_cpp("attention", q)


def _run(
    q: Tensor, k: Tensor | None, v: Tensor | None, causal: bool, softmax_scale: float | None,
    p: float, rng: Rng | None, cu_seqlens: Tensor | None,
) -> Tensor:  # fmt: skip
    """The call; q may be packed."""
    if not p and cu_seqlens is None and type(softmax_scale) in _USUAL_SCALES and _is_plain(q):
        return _attention(q, k, v, causal, softmax_scale)[0]
    _check_inputs(q, k, v, cu_seqlens is not None)
    H, D = q.shape[-2:]
    threshold = quantize_p(p)
    op = _case(threshold, cu_seqlens)
    triton = use_triton(op, q)
    least, most, step = TRITON_HEAD_DIM
    if triton and (D % step or not least <= D <= most):
        raise ValueError(
            f"attention: expected head dim {least} to {most} in steps of {step} for the Triton "
            f"kernels, got D={D}; pad the heads with zeros and pass softmax_scale, or set "
            "FASTPAR_BACKEND=torch"
        )
    scale = _check_scale(q, softmax_scale)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q.device)
    own = triton or (has_fma and use_cpp(op, q))
    call = _attention if triton or _is_plain(q) else _composed
    if not own:
        attention_peers.refuse_to_ignore(op, q)
    if threshold:
        rng = Rng(draw_key(q.device), 0) if rng is None else rng
        first_row = check_first_row(rng, q, cu_seqlens)
        check_rng(rng, H, q.device)
        mask = rng.key, rng.site_head, threshold
        tk = (q if k is None else k).shape[1]
        whole = cu_seqlens is None and first_row is None
        if call is _composed:
            return call(q, k, v, causal, scale, *mask, cu_seqlens, first_row)[0]
        bits = kept_bits(q, tk, causal, *mask) if triton and whole else None
        return call(q, k, v, causal, scale, *mask, cu_seqlens, bits, first_row)[0]
    if cu_seqlens is None and not own:
        return sdpa(*_split(q, k, v), causal, scale)
    return call(q, k, v, causal, scale, None, 0, 0, cu_seqlens, None)[0]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, softmax_scale: float | None = None,
    dropout_p: float = 0.0, rng: Rng | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scaled dot-product attention, o = dropout(softmax(q k^T * softmax_scale)) v per head.

    Args:
        q: [B, T, H, D], fp32 | bf16 | fp16 | fp64, any strides with a contiguous last dimension.
            D is at most 256 on a CPU; on a GPU 16 to 128 in steps of 8.
        k, v: [B, Tk, Hkv, D], dtype and device of q; head h reads h // (H / Hkv).
        causal: query i sees keys j <= i + Tk - T; see [Note: causal].
        softmax_scale: > 0; D**-0.5 when None.
        dropout_p: of the probabilities; rounded to a multiple of 1/256.
        rng: key and site of the mask, the model's head that is q's first (first_head), and the
            mask's row of q's first query (first_row; not with cu_seqlens): Tk - T for queries that
            are the last of their keys. None draws a key from torch's default generator.
        cu_seqlens: int32 [n + 1] on q's device, for n documents one after another: then q is
            [total, H, D], k and v are [total, Hkv, D]; see [Note: documents].
    Returns:
        o: shape of q, contiguous.
    Raises:
        ValueError: shapes, dtypes or devices that differ from the above; no key; dropout_p outside
            [0, 1); a key, site, heads or row that the mask cannot hold; an rng with rows; on the
            CPU, cu_seqlens that do not increase from 0 to total.
        RuntimeError: a second derivative is requested (only torch's own kernel supports it, under
            FASTPAR_BACKEND=torch without dropout and documents); a GPU without Triton.
    Traffic: (2 * q.numel() + k.numel() + v.numel()) * q.element_size() bytes forward.
    Deterministic: yes, bitwise, forward and backward, for any number of threads (torch's own
        kernel: as torch's backend).
    Oracle: fastpar.kernels.reference.attention_ref
    Source: Vaswani et al. 2017, arXiv 1706.03762; Dao et al. 2022, arXiv 2205.14135
    """
    return _run(q, k, v, causal, softmax_scale, dropout_p, rng, cu_seqlens)


def attention_qkvpacked(
    qkv: Tensor, *, causal: bool = True, softmax_scale: float | None = None, dropout_p: float = 0.0,
    rng: Rng | None = None, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """attention() on the output of one projection, read in place; its gradient is one tensor.

    Args:
        qkv: [B, T, 3, H, D], or [total, 3, H, D] with cu_seqlens: q, k and v of each position, any
            strides with a contiguous last dimension. The rest as in attention().
    Returns:
        o: [B, T, H, D] or [total, H, D], contiguous.
    Traffic: 4/3 * qkv.numel() * qkv.element_size() bytes forward.
    Raises, Deterministic, Oracle, Source: as attention().
    """
    return _run(qkv, None, None, causal, softmax_scale, dropout_p, rng, cu_seqlens)
