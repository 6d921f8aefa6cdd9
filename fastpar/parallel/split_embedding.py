"""The gradient of a tied embedding in two parts: the head's early and whole, the tokens' rows late.

A tied embedding (31 % of GPT-2 small) is used first and last in a forward, so its gradient is
complete when backward ends, and its reduction has nothing left to hide behind. But the head's part,
the dense one, is ready when backward begins. With the split it is reduced then, as the first
bucket; what the embedding adds at the end is only the rows of the tokens of the batch, which the
ranks exchange and add in rank order.

[Note: when the split is used]
The parameter has a bucket of its own, if its gradient is larger than a bucket by default and the
sums need no fixed tree. The head's part goes early if the exchange of rows is small against the
whole: ranks * rows <= half of the vocabulary. Then its bucket is launched first; otherwise last,
because all buckets behind it would wait for the end of backward (test_others_do_not_wait). The
ranks must agree on that order: each tells its rows with every reduction, and the next one's order
follows from the most of them; the first has it last. A rank that finds its own batch too large
after all, or whose head took no part, sends both parts together and no rows: on this the ranks
need not agree. In a backward that stays local both parts are added up as usual.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle
from fastpar.parallel.buffers import BucketState
from fastpar.parallel.hooks import Hook, Link


def head_weight(weight: Tensor) -> Tensor:
    """The weight as the head of a model should use it: its gradient may then be sent early."""
    split = _split_of(weight)
    return weight if split is None else split.head()


def note_tokens(weight: Tensor, idx: Tensor) -> None:
    """Tell which rows of an embedding a forward uses; see head_weight()."""
    split = _split_of(weight)
    if split is not None:
        split.tokens(idx)


def _split_of(weight: Tensor) -> SplitEmbedding | None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    link = getattr(weight, "_fastpar_split", None)
    return None if link is None else link.target


def tied_embedding(
    model: nn.Module, names: dict[nn.Parameter, tuple[str, ...]]
) -> nn.Parameter | None:
    """The parameter that is an embedding and a head.

    One that the model names in `tied_embedding`, because it calls head_weight() and note_tokens();
    or the one that an nn.Embedding and an nn.Linear without bias share.
    """
    named = getattr(model, "tied_embedding", None)
    for p, all_names in names.items():
        if p.requires_grad and p.dim() == 2 and (named in all_names or _homes(model, p)):
            return p
    return None


def _homes(model: nn.Module, p: nn.Parameter) -> tuple[nn.Module, nn.Module] | None:
    users = [m for m in model.modules() if m._parameters.get("weight") is p]
    embeddings = [m for m in users if type(m) is nn.Embedding]
    heads = [m for m in users if type(m) is nn.Linear]
    return (embeddings[0], heads[0]) if len(embeddings) == len(heads) == 1 else None


class SplitEmbedding:
    """The two parts of one parameter's gradient; the engine's helper.

    Args:
        bucket: holds p alone.
        rows_group: of all ranks, on p's device; sizes_group: of all ranks, for host tensors.
        on_head: called in backward with the leaf that has the head's part.
    Attributes:
        first: whether the bucket is launched before all others, not after them; see the note.
    """

    def __init__(
        self,
        model: nn.Module,
        p: nn.Parameter,
        bucket: BucketState,
        *,
        rows_group: Collectives,
        sizes_group: Collectives,
        on_head: Any,
    ) -> None:
        self.p, self.bucket, self.on_head = p, bucket, on_head
        self._rows_group, self._sizes_group = rows_group, sizes_group
        self._ids: list[Tensor] = []
        self._rows: tuple[Tensor, Tensor] | None = None
        self._sizes: tuple[Tensor, Handle] | None = None
        self.first = False
        self.early = False  # the head's part was sent in this backward, without the tokens'
        self._parts: set[str] = set()  # what the bucket holds of this backward
        self._heads = 0  # uses as a head since the last backward
        p._fastpar_split = Link(self)  # type: ignore[attr-defined]
        homes = _homes(model, p)
        if homes is not None:
            embedding, head = homes
            me = weakref.ref(self)
            embedding.register_forward_pre_hook(Hook(me, "_before_embedding"))
            head.register_forward_pre_hook(Hook(me, "_before_head"))
            head.register_forward_hook(Hook(me, "_after_head"), always_call=True)

    # Forward

    def head(self) -> Tensor:
        """A leaf with the parameter's memory and a gradient of its own."""
        alias = self.p.detach().requires_grad_()
        alias.register_post_accumulate_grad_hook(Hook(weakref.ref(self), "on_head"))
        self._heads += 1
        return alias

    def tokens(self, idx: Tensor) -> None:
        """Rows that this forward uses."""
        self._ids.append(idx.detach().reshape(-1))

    def _before_embedding(self, module: nn.Module, args: tuple) -> None:
        if args and _split_of(self.p) is self:
            self.tokens(args[0])

    def _before_head(self, module: nn.Module, args: tuple) -> None:
        """For one call the head's alias is in the place of the parameter."""
        if _split_of(self.p) is self:
            module._parameters["weight"] = self.head()  # type: ignore[assignment]

    def _after_head(self, module: nn.Module, args: tuple, output: Any) -> None:
        module._parameters["weight"] = self.p

    # Backward

    def take_head(self, alias: Tensor) -> None:
        """The head's part into the bucket."""
        assert alias.grad is not None
        self.bucket.take(0, alias.grad, add=self.p.grad is not None or bool(self._parts))
        alias.grad = None
        self._heads -= 1
        self._parts.add("head")
        if self.bucket.stage == 0:
            self.p.grad = None  # what the embedding adds must come apart

    def take_tokens(self) -> bool:
        """The embedding's part: its rows if the head's was sent already, else into the bucket."""
        assert self.p.grad is not None
        if self.early:
            self._keep_rows(self.p.grad)
            self.p.grad = None
            return True
        self.bucket.take(0, add=bool(self._parts))
        self._parts.add("tokens")
        return False

    def pays(self) -> bool:
        """Whether the head's part, which is complete, should go early: see the note above."""
        rows = self._count_rows()
        return self.first and self._heads == 0 and rows > 0 and self._are_few(rows)

    def _count_rows(self) -> int:
        """That this backward's forwards used; on a GPU repeated ones count again."""
        if self._ids and not self._ids[0].is_cuda:
            self._ids = [torch.cat(self._ids).unique()]
        return sum(ids.numel() for ids in self._ids)

    def _are_few(self, rows: int) -> bool:
        return rows * self._rows_group.world_size <= self.p.shape[0] // 2

    def before_launch(self, *, in_backward: bool) -> None:
        """The bucket is sent now: tell the others how many rows will follow, and were used."""
        self.early = in_backward and self._parts == {"head"}
        if self._parts and self.bucket.stage == 0:  # later stages keep no views: they would hold it
            self.bucket.adopt(0)
        rows = self._count_rows()
        sizes = torch.empty(2 * self._sizes_group.world_size, dtype=torch.int64)
        mine = torch.tensor([rows if self.early else 0, rows])
        handle = self._sizes_group.all_gather(sizes, mine, async_op=True, tag=-1)
        assert handle is not None
        self._sizes = sizes, handle

    def after_fill(self) -> None:
        """The bucket is as it will be sent; autograd must not add to it any more."""
        if self.early:
            self.p.grad = None

    def _keep_rows(self, grad: Tensor) -> None:
        ids = torch.cat(self._ids)
        if ids.is_cuda:  # without waiting for the device: repeated rows become zeros
            ids = ids.sort().values
            first = torch.ones_like(ids, dtype=torch.bool)
            first[1:] = ids[1:] != ids[:-1]
            self._rows = ids, grad[ids] * first[:, None]
        else:
            self._rows = ids, grad[ids]

    def exchange_rows(self, wire_dtype: torch.dtype) -> int:
        """All buckets are reduced: add everybody's rows. Ranks: all. Returns bytes received."""
        assert self._sizes is not None
        sizes, handle = self._sizes
        handle.wait()
        counts, used = sizes.view(-1, 2).unbind(1)
        most, ranks = int(counts.max()), self._rows_group.world_size
        if used.any():
            self.first = self._are_few(int(used.max()))
        width, device = self.p.shape[1], self.p.device
        received = 0
        if most:
            ids = torch.zeros(most, dtype=torch.int64, device=device)
            rows = torch.zeros(most, width, dtype=wire_dtype, device=device)
            if self._rows is not None:
                n = self._rows[0].numel()
                ids[:n], rows[:n] = self._rows
            all_ids, all_rows = ids.new_empty(ranks * most), rows.new_empty(ranks * most * width)
            self._rows_group.all_gather(all_ids, ids, tag=-2)
            self._rows_group.all_gather(all_rows, rows.view(-1), tag=-3)
            shards = zip(all_ids.view(ranks, most), all_rows.view(ranks, most, width))
            for (theirs, values), count in zip(shards, counts.tolist()):
                self._add(theirs[:count], values[:count].to(self.bucket.grad_dtype) / ranks)
            received = (ranks - 1) * most * (width * wire_dtype.itemsize + 8)
        if self.early and self.bucket.stage == 0:
            self.bucket.adopt(0)
        self.reset()
        return received

    def reset(self) -> None:
        """A backward is over, or began anew."""
        self._ids, self._rows, self._sizes, self.early = [], None, None, False
        self._parts.clear()
        self._heads = 0

    def _add(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows of the parameter to what this rank owns of the reduced gradient."""
        reduced, width = self.bucket.reduced, self.p.shape[1]
        assert reduced is not None
        if self.bucket.stage == 0:
            reduced[: self.p.numel()].view(self.p.shape).index_add_(0, ids, rows)
            return
        _, mine, start = self.bucket.piece(0)
        assert mine is not None
        stop = start + mine.numel()
        first, last = -(-start // width), stop // width  # whole rows [first, last)
        if first < last:
            inner = mine[first * width - start : last * width - start].view(-1, width)
            # Rows of other ranks are added as zeros: no size that only the device knows.
            inside = (ids >= first) & (ids < last)
            kept = torch.where(inside[:, None], rows, torch.zeros_like(rows))
            inner.index_add_(0, torch.where(inside, ids - first, 0), kept)
        cut_rows = {start // width} if start % width else set()
        cut_rows |= {stop // width} if stop % width else set()
        for row in cut_rows:
            low, high = max(start, row * width), min(stop, (row + 1) * width)
            part = torch.where((ids == row)[:, None], rows, torch.zeros_like(rows)).sum(0)
            mine[low - start : high - start] += part[low - row * width : high - row * width]
