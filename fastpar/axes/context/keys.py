"""Attention of this rank's queries over the keys of all ranks of cp.

Keys and values are gathered, those of H/cp heads at a time, so that never more of them are in
memory than a rank's own. A rank's queries are runs of consecutive tokens; each run is one call of
attention with the keys up to its last query, a Call. Backward gathers keys and values again and
sums their gradients over the ranks, each for its own tokens, in the order of the ranks.

Bits: a query sees the same keys as in one process, in the same order, and its row of the dropout
mask: o and dq have the bits of one process for any lengths. (The attention kernels compute rows
independently and keys from the first on.) dk and dv are sums over queries on several ranks: in
another, but fixed order. In 16 bits a rank's part of that sum is rounded before it is sent.

Documents: of the documents in a run only the first may have begun before it. Its queries are a
separate call, with the keys from its beginning; the others are whole, or end with the run.

Source: Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2 (gathered keys, head and tail)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.axes.context.sequences import ContextParallel, context_of, to_heads, to_tokens
from fastpar.kernels import attention_qkvpacked
from fastpar.kernels.attention import attention_calls
from fastpar.kernels.op import define_autograd, define_op, refuse_double_backward
from fastpar.kernels.philox import Rng, quantize_p

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Call(NamedTuple):
    """One call of attention: queries of some rows of the batch, and the keys that they see.

    rows: of the batch. queries: range in this rank's tokens of a row. keys: in the row's tokens.
    first_row: row of the first query in the mask of sample or document `sample`.
    bounds: cu_seqlens of whole documents, whose queries and keys are the same tokens.
    """

    rows: slice
    queries: slice
    keys: slice
    first_row: int
    sample: int = 0
    bounds: tuple[int, ...] | None = None

    def of_queries(self, x: Tensor, batch: int) -> Tensor:
        """[N/cp, H, D] of this rank's tokens -> the shape for attention, a view."""
        x = x.unflatten(0, (batch, -1))[self.rows, self.queries]
        return x if self.bounds is None else x[0]

    def of_keys(self, x: Tensor, batch: int) -> Tensor:
        """[N, H, D] of all tokens -> the same."""
        x = x.unflatten(0, (batch, -1))[self.rows, self.keys]
        return x if self.bounds is None else x[0]


def calls_of(
    cp: ContextParallel, batch: int, time: int, bounds: Sequence[int] | None
) -> Iterator[Call]:
    """The calls for all of this rank's queries. bounds: cu_seqlens of the whole batch."""
    length = time // cp.n_chunks
    for i, chunk in enumerate(cp.chunks):
        queries, start = slice(i * length, (i + 1) * length), chunk * length
        if bounds is None:
            yield Call(slice(0, batch), queries, slice(0, start + length), start)
            continue
        for row in range(batch):
            yield from _of_documents(row, time, queries, start, bounds)


def _of_documents(
    row: int, time: int, queries: slice, start: int, bounds: Sequence[int]
) -> Iterator[Call]:
    """Pieces of a run that begins at `start` of its row; see "Documents" above."""
    end = start + queries.stop - queries.start
    first = row * time  # of the row, in bounds
    inside = [i for i, b in enumerate(bounds[:-1]) if start < b - first < end]
    opened = max(i for i, b in enumerate(bounds[:-1]) if b - first <= start)
    begin = bounds[opened] - first
    cuts = [bounds[i] - first for i in inside]
    rows = slice(row, row + 1)
    stop = cuts[0] if cuts else end
    lag = queries.start - start  # from positions in the row to this rank's
    yield Call(rows, slice(start + lag, stop + lag), slice(begin, stop), start - begin, opened)
    if cuts:
        lengths = tuple(cut - stop for cut in (*cuts, end))
        yield Call(rows, slice(stop + lag, end + lag), slice(stop, end), 0, opened + 1, lengths)


class Planned(NamedTuple):
    """A Call with its tensors on the device: cu_seqlens of its documents, and the difference of
    the rng key of its first document from the batch's."""

    call: Call
    cu_seqlens: Tensor | None = None
    further: Tensor | None = None


def planned(cp: ContextParallel, batch: int, time: int, documents: Tensor | None) -> list[Planned]:
    """All calls. Documents are read once per batch, not in each layer and direction: the result
    stays with the tensor until it is written."""
    if documents is None:
        return [Planned(call) for call in calls_of(cp, batch, time, None)]
    version = None if documents.is_inference() else documents._version
    of = (cp.number, batch, time, version)
    plan = getattr(documents, "fastpar_planned", None)
    if plan is None or plan[0] != of:
        parts = list(calls_of(cp, batch, time, documents.tolist()))
        plan = (of, _plan(parts, documents.device))
        documents.fastpar_planned = plan  # type: ignore[attr-defined]
    return plan[1]


def _plan(parts: list[Call], device: torch.device) -> list[Planned]:
    """Copies the device tensors at once, in rows that begin at multiples of 16 bytes, for which
    kernels are compiled."""
    rows = [(0, call.sample, 0, 0, *(call.bounds or ())) for call in parts]
    width = -(-max(map(len, rows)) // 4) * 4
    rows = [row + (0,) * (width - len(row)) for row in rows]
    host = torch.tensor(rows, dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        host = host.pin_memory()
    return [
        Planned(
            call,
            None if call.bounds is None else row[4 : 4 + len(call.bounds)],
            row[:2] if call.sample else None,
        )
        for call, row in zip(parts, host.to(device, non_blocking=True))
    ]


class _Calls:
    """The common part of forward and backward: calls, groups of heads, arguments of each call."""

    def __init__(
        self,
        qkv: Tensor,
        batch: int,
        scale: float,
        key: Tensor | None,
        site_head: int,
        threshold: int,
        cu_seqlens: Tensor | None,
        number: int,
    ) -> None:
        self.cp, self.batch, self.qkv, self.scale = context_of(number), batch, qkv, scale
        self.key, self.site_head, self.threshold = key, site_head, threshold
        n, _, self.heads, _ = qkv.shape
        self.planned = planned(self.cp, batch, n // batch * self.cp.size, cu_seqlens)
        self.step = -(-self.heads // self.cp.size)

    def groups(self) -> Iterator[tuple[slice, Tensor]]:
        """(some heads, keys and values of all tokens [N, 2, heads, D])."""
        for first in range(0, self.heads, self.step):
            heads = slice(first, min(self.heads, first + self.step))
            yield (
                heads,
                self.cp.in_order(self.cp.group.gathered(self.qkv[:, 1:, heads]), self.batch),
            )

    def settings(self, planned: Planned, heads: slice) -> tuple:
        """Arguments of attention and its backward after the tensors."""
        call, cu, further = planned
        key = self.key if self.key is None or further is None else self.key + further
        first_row = call.first_row or None if self.threshold else None
        site = self.site_head + heads.start
        return True, self.scale, key, site, self.threshold, cu, first_row

    def inputs(self, call: Call, heads: slice, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (call.of_keys(x, self.batch) for x in kv.unbind(1))
        return call.of_queries(self.qkv[:, 0, heads], self.batch), k, v


def _attend(qkv: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    calls = _Calls(qkv, *settings)
    o, stats = qkv.new_empty(qkv[:, 0].shape), []
    for heads, kv in calls.groups():
        for one in calls.planned:
            inputs = calls.inputs(one.call, heads, kv)
            part, kept = attention_calls(inputs[0])[0](*inputs, *calls.settings(one, heads))
            one.call.of_queries(o[:, heads], calls.batch).copy_(part)
            stats.append(kept.flatten())
    return o, torch.cat(stats)


def _scattered_sum(sent: Tensor, cp: ContextParallel) -> Tensor:
    """[cp, n, ...] of each rank -> this rank's sum over the senders, in rank order."""
    sent = sent.contiguous()
    parts = torch.empty_like(sent)
    cp.group.all_to_all(parts.view(-1), sent.view(-1))
    total = parts[0].to(_WIDE.get(sent.dtype, sent.dtype))
    for part in parts[1:]:
        total = total + part
    return total


def _attend_bwd(do: Tensor, qkv: Tensor, o: Tensor, stats: Tensor, *settings: Any) -> Tensor:
    calls, grad = _Calls(qkv, *settings), torch.empty_like(qkv)
    cp, of_row = calls.cp, stats.numel() // (qkv.shape[0] * calls.heads)
    for heads, kv in calls.groups():
        total = torch.zeros_like(kv, dtype=_WIDE.get(kv.dtype, kv.dtype))
        for one in calls.planned:
            call = one.call
            inputs = calls.inputs(call, heads, kv)
            given, made, to = (
                call.of_queries(x, calls.batch)
                for x in (do[:, heads], o[:, heads], grad[:, 0, heads])
            )
            rows = given.numel() // given.shape[-1]
            kept, stats = stats[: of_row * rows], stats[of_row * rows :]
            shape = (*given.shape[:-3], given.shape[-2], given.shape[-3])
            kept = kept.view(*shape, *[of_row] * (of_row == 2)) if of_row else kept
            dq, *dkv = attention_calls(inputs[0])[1](
                given, *inputs, made.contiguous(), kept, *calls.settings(one, heads)
            )
            to.copy_(dq)
            for sums, part in zip(total.unbind(1), dkv):
                call.of_keys(sums, calls.batch).add_(part)
            del dq, dkv, inputs, part
        del kv
        sent = cp.of_ranks(total.to(qkv.dtype).unflatten(0, (calls.batch, -1)))
        del total
        grad[:, 1:, heads] = _scattered_sum(sent, cp)
    return grad


def _fake(qkv, batch, scale, key, site_head, threshold, cu_seqlens, number):
    q, mask = qkv[:, 0], (key, site_head, threshold)
    q = q[None] if cu_seqlens is None else q
    _, stats = attention_calls(q)[0](q, q, q, True, scale, *mask, cu_seqlens, None)
    return qkv.new_empty(qkv[:, 0].shape), stats.flatten()


_SETTINGS = (
    "int batch, float scale, Tensor? key, SymInt site_head, int threshold, Tensor? cu_seqlens, "
    "int cp"
)
_attend_op = define_op(
    f"cp_attend_keys(Tensor qkv, {_SETTINGS}) -> (Tensor, Tensor)", _attend, _fake, ("CPU", "CUDA")
)
_attend_bwd_op = define_op(
    f"cp_attend_keys_bwd(Tensor do, Tensor qkv, Tensor o, Tensor stats, {_SETTINGS}) -> Tensor",
    _attend_bwd,
    lambda do, qkv, *_: torch.empty_like(qkv),
    ("CPU", "CUDA"),
)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    qkv, ctx.batch, ctx.scale, key, ctx.site_head, ctx.threshold, cu_seqlens, ctx.number = inputs
    ctx.save_for_backward(qkv, key, cu_seqlens, *output)


def _backward(ctx: Any, do: Tensor, *_: Any) -> tuple:
    refuse_double_backward("context_parallel")
    qkv, key, cu_seqlens, o, stats = ctx.saved_tensors
    mask = key, ctx.site_head, ctx.threshold
    settings = ctx.batch, ctx.scale, *mask, cu_seqlens, ctx.number
    return _attend_bwd_op(do, qkv, o, stats, *settings), *[None] * len(settings)


define_autograd(_attend_op, _setup_context, _backward, by_products=1)


def attend_keys(
    qkv: Tensor,
    batch: int,
    cp: ContextParallel,
    *,
    dropout_p: float = 0.0,
    rng: Rng | None = None,
    documents: Tensor | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """Causal attention of this rank's tokens over those of all ranks.

    Args:
        qkv: [N/cp, 3, H, D], of this rank's tokens by cp, with method "keys".
        batch: rows of the N tokens.
        dropout_p, rng, softmax_scale: as in kernels.attention, of the whole batch.
        documents: cu_seqlens of the whole batch, row after row; each row begins with one. On a GPU
            the host waits to read them, once for all calls with this tensor.
    Returns:
        o: [N/cp, H, D].
    Ranks: all of cp. Wire: forward 2 (cp - 1) / cp of N*H*D elements, backward twice that.
    Deterministic: yes; see "Bits" above.
    Source: Grattafiori et al. 2024, arXiv 2407.21783
    """
    threshold = quantize_p(dropout_p)
    key, site = (rng.key, rng.site_head) if threshold and rng is not None else (None, 0)
    scale = qkv.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _attend_op(qkv, batch, scale, key, site, threshold, documents, cp.number)[0]


def attend_rows(
    qkv: Tensor, cp: ContextParallel, softmax_scale: float | None = None, **dropout: Any
) -> Tensor:
    """Causal attention of this rank's tokens of every row over those of all ranks, by cp's method.

    Args:
        qkv: [B, T/cp, 3, H, D], of this rank's tokens by cp, which cuts each row.
        dropout: dropout_p and rng as in kernels.attention, of the whole batch and a rank's heads.
    Returns:
        o: [B, T/cp, H, D].
    Ranks: all of cp.
    """
    batch, heads, local = len(qkv), qkv.shape[-2], qkv.flatten(0, 1)
    if cp.by_keys:
        o = attend_keys(local, batch, cp, softmax_scale=softmax_scale, **dropout)
        return o.unflatten(0, (batch, -1))
    parts = to_heads(local, cp).unflatten(0, (cp.size, -1))
    whole = cp.in_order(parts, batch).unflatten(0, (batch, -1))  # [B, T, 3, H/cp, D]
    o = attention_qkvpacked(whole, causal=True, softmax_scale=softmax_scale, **dropout)
    o = to_tokens(cp.of_ranks(o).flatten(0, 1)[:, None], heads, cp)[:, 0]
    return o.unflatten(0, (batch, -1))
