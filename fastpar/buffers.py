"""The memory of one bucket on one rank: parameters are views of it, gradients are brought into it.

    stage   parameters          gradients                     reduced gradients
    0       whole               whole, kept                   in place, on every rank
    1       whole               whole, kept                   own slice, in place
    2       whole               whole, freed when reduced     own slice
    3       own slice; whole    whole, freed when reduced     own slice
            only around use

[Note: stale parameters]
After a step a rank knows only its own slice of the new parameters, at stage 3 also between uses.
Until they are gathered, p.data is a placeholder of the right shape with one nan for all elements:
whoever reads it sees nans instead of old values, and not the memory that was freed, which would
crash. Tensors that autograd saved keep the storage, which is resized and filled again in place.

[Note: where gradients live]
Autograd puts its own tensor into p.grad; take() copies it into the bucket, or adds it, at the cost
that zeroing the bucket beforehand would have. Nothing is zeroed: the places of parameters without a
gradient keep old bytes until fill_missing(). At stage 0 p.grad is then a view of the bucket (or
p.main_grad, where the gradient's dtype is not the parameter's); otherwise p.grad is None.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fastpar.collectives import Collectives
from fastpar.layout import Bucket, Layout
from fastpar.tasks import Handle

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PairwiseSum:
    """A sum of tensors in a fixed tree: ((0 + 1) + (2 + 3)) + ..., the rest from the right."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[Tensor] = []

    def push(self, x: Tensor) -> None:
        """Add the next tensor; it belongs to the sum from now on."""
        order = self.count
        while order & 1:
            x = self._parts.pop().add_(x)
            order >>= 1
        self._parts.append(x)
        self.count += 1

    @property
    def nbytes(self) -> int:
        """Of the partial sums."""
        return sum(x.nbytes for x in self._parts)

    def zero_(self, place: slice) -> None:
        """Forget what was added to these elements."""
        for x in self._parts:
            x[place].zero_()

    def total(self) -> Tensor:
        """A new tensor; the sum can go on."""
        x = self._parts[-1].clone()
        for left in reversed(self._parts[:-1]):
            x = left + x
        return x


class BucketState:
    """One bucket; made by the engine, which decides when what happens.

    Attributes:
        params: its parameters; the slots of the layout in order.
        flat: [P] parameters; without memory while a bucket of stage 3 is freed.
        shard: [S] this rank's slice of the newest parameters.
        live: whether the parameters are views of flat.
        grad: [P] gradients of this rank, None while they are freed.
        reduced: [S] ([P] at stage 0) mean over the ranks, None until the first of a step.
    """

    def __init__(
        self,
        layout: Layout,
        spec: Bucket,
        params: list[nn.Parameter],
        *,
        stage: int,
        rank: int,
        device: torch.device,
        grad_dtype: torch.dtype | None,
        deterministic: bool,
        reduce: Collectives | None,
        gather: Collectives | None,
        poison: bool = False,
    ) -> None:
        self.spec, self.params, self.stage = spec, params, stage
        self.slots = [layout.slots[i] for i in spec.slots]
        self.deterministic, self.poison = deterministic, poison
        self.grad_dtype = grad_dtype or spec.dtype
        self.device = device
        self._own = slice(*spec.shard(rank))
        self.pieces = [layout.piece(i, rank) for i in spec.slots]
        shared = gather if stage in (1, 2) else None  # memory that the peers read without a copy
        self.flat = self._empty(shared, spec.numel, spec.dtype).zero_()
        self.views = [self.flat[s.start : s.stop].view(s.spec.shape) for s in self.slots]
        self.shard = self.flat if stage == 0 else self.flat[self._own]
        if stage == 3:
            self.shard = self._empty(gather, spec.shard_numel, spec.dtype)
        self._placeholders = list(self.views)
        self.live = True
        self.gathering: Handle | None = None
        # Gradients
        self._main = self.grad_dtype != spec.dtype
        self.grad: Tensor | None = None
        if stage <= 1:
            self.grad = self._empty(reduce, spec.numel, self.grad_dtype)
        self.grad_shard: Tensor | None = None
        if stage >= 2:
            self.grad_shard = torch.empty(spec.shard_numel, dtype=self.grad_dtype, device=device)
        self.has: set[int] = set()  # positions with a gradient of this rank in `grad`
        self.seen: set[int] = set()  # since zero_grad(), wherever it is by now
        self.unreduced: PairwiseSum | None = None  # earlier micro-batches that stayed here
        self.reduced: Tensor | None = None
        self._reductions: PairwiseSum | None = None
        self._tree_ms = 0.0
        self._piece_views: tuple[Tensor | None, list[tuple[Tensor, Tensor | None, int]]] | None = (
            None
        )
        self._aside = self.marked = False
        self._began_empty = True  # the last backward
        if stage == 0:
            for p, view in zip(params, self.grad_views):
                if self._main:
                    p.main_grad = view  # type: ignore[attr-defined]

    def _empty(self, group: Collectives | None, numel: int, dtype: torch.dtype) -> Tensor:
        if group is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return group.empty(numel, dtype)

    @property
    def grad_bytes(self) -> int:
        """Of the whole gradients."""
        return self.spec.numel * self.grad_dtype.itemsize

    def name(self, position: int) -> str:
        """The first name of a parameter."""
        return self.slots[position].spec.names[0]

    # Parameters

    def attach(self) -> None:
        """The values are in flat, for the first time: parameters become views."""
        if self.stage == 3:
            self.shard.copy_(self.flat[self._own])
        for p in self.params:
            p.grad = None
        self.make_live()

    def allocate(self) -> None:
        """Memory for all parameters, their values unknown."""
        if self.stage == 3 and not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self.spec.numel * self.spec.dtype.itemsize)

    def make_live(self) -> None:
        """The values are there: parameters are views of them."""
        for p, view in zip(self.params, self.views):
            p.data = view
        self.live = True

    def make_stale(self) -> None:
        """See [Note: stale parameters]; at stage 3 the memory is given back."""
        if not self.live:
            return
        self.live = False
        nan = self._nan(self.spec.dtype)
        self._placeholders = [nan.expand(s.spec.shape) for s in self.slots]
        for p, placeholder in zip(self.params, self._placeholders):
            p.data = placeholder
        if self.stage == 3:
            if self.poison:
                self.flat.fill_(float("nan"))
            self.flat.untyped_storage().resize_(0)

    def save_writes(self) -> None:
        """Somebody wrote into the whole parameters: this rank's slice of them is the truth."""
        if self.stage == 3:
            self.shard.copy_(self.flat[self._own])

    def piece(self, position: int) -> tuple[Tensor, Tensor | None, int]:
        """(values, reduced gradient, first element) of what this rank owns of a parameter."""
        if self._piece_views is None or self._piece_views[0] is not self.reduced:
            views = []
            for slot, (start, stop) in zip(self.slots, self.pieces):
                at = slot.start + start - self._own.start
                place = slice(at, at + stop - start)
                grad = None if self.reduced is None else self.reduced[place]
                views.append((self.shard[place], grad, start))
            self._piece_views = self.reduced, views  # of a stage >= 2, the same in every step
        return self._piece_views[1][position]

    # Gradients

    @functools.cached_property
    def grad_views(self) -> list[Tensor]:
        """Of `grad`, where it is kept."""
        assert self.grad is not None
        return [self.grad[s.start : s.stop].view(s.spec.shape) for s in self.slots]

    def _grad_view(self, position: int) -> Tensor:
        if self.stage <= 1:
            return self.grad_views[position]
        assert self.grad is not None
        slot = self.slots[position]
        return self.grad[slot.start : slot.stop].view(slot.spec.shape)

    def take(self, position: int, grad: Tensor | None = None, *, add: bool = False) -> None:
        """Bring what a backward left in the .grad of a parameter into the bucket.

        Args:
            grad: another part of it, which comes from elsewhere (see split_embedding.py).
            add: stage 0: the bucket holds a part already.
        """
        p = self.params[position]
        grad = p.grad if grad is None else grad
        assert grad is not None
        self._check_grad(position, grad)
        if self.stage >= 2 and self.grad is None:
            self.grad = torch.empty(self.spec.numel, dtype=self.grad_dtype, device=self.device)
        elif self.stage == 1 and self.reduced is not None and not self.has:
            self._keep_reduced()
        view = self._grad_view(position)
        if self.stage == 0 and not self._main:
            if grad.data_ptr() != view.data_ptr():
                view.add_(grad) if add else view.copy_(grad)
                p.grad = view
        else:
            if position in self.has:
                view.add_(grad)
            else:
                view.copy_(grad)
            p.grad = None
        self.has.add(position)
        self.seen.add(position)

    def _keep_reduced(self) -> None:
        """Stage 1: the own slice of `grad` holds the sum so far, and is about to be overwritten."""
        assert self.grad is not None
        assert self.reduced is not None
        if self.reduced.data_ptr() == self.grad[self._own].data_ptr():
            self.reduced = self.reduced.clone()

    def fill_missing(self, *, flags: bool) -> list[int]:
        """Zero the places without a gradient and set `used`; returns them. p.grad may be new."""
        if self.grad is None:
            self.grad = torch.empty(self.spec.numel, dtype=self.grad_dtype, device=self.device)
        elif self.stage == 1 and self.reduced is not None and not self.has:
            self._keep_reduced()
        missing = []
        for position, p in enumerate(self.params):
            if self.stage == 0 and not self._main:
                # By hand between two backward passes, or forgotten by zero_grad() of a module.
                if p.grad is None:
                    self.has.discard(position)
                elif position not in self.has or p.grad.data_ptr() != (
                    self.grad_views[position].data_ptr()
                ):
                    self.grad_views[position].copy_(p.grad)
                    p.grad = self.grad_views[position]
                    self.has.add(position)
            if position not in self.has:
                self._grad_view(position).zero_()
                missing.append(position)
        if flags:
            used = self.used()
            used.fill_(1.0)
            for position in missing:
                # Deterministic: the gradients of earlier micro-batches lie elsewhere.
                used[position] = float(self.deterministic and position in self.seen)
        return missing

    def used(self) -> Tensor:
        """Stage 0: one element per parameter, see layout.py."""
        assert self.grad is not None
        return self.grad[self.spec.used_start :][: len(self.params)]

    def keep_local(self) -> None:
        """Deterministic: this micro-batch stays here, apart from the next, for the tree."""
        self.fill_missing(flags=False)
        assert self.grad is not None
        if self.unreduced is None:
            self.unreduced = PairwiseSum()
        with self._summing():
            self.unreduced.push(self.grad.clone() if self.stage <= 1 else self.grad)
        if self.stage >= 2:
            self.grad = None
        self._forget_local()

    def add_local(self) -> None:
        """Deterministic: the tree over the micro-batches that stayed here, into `grad`."""
        if self.unreduced is not None:
            assert self.grad is not None
            with self._summing():
                self.unreduced.push(self.grad.clone())
                self.grad.copy_(self.unreduced.total())
            self.unreduced = None

    @contextlib.contextmanager
    def _summing(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._tree_ms += (time.perf_counter() - begin) * 1e3

    def _forget_local(self) -> None:
        self.has.clear()
        for p in self.params:
            p.grad = None

    def target(self) -> Tensor:
        """Where the next reduction puts its result."""
        assert self.grad is not None
        if self.stage == 0:
            return self.grad
        if self.stage == 1:
            return self.grad[self._own]
        if self.reduced is None and not self.deterministic:
            assert self.grad_shard is not None
            return self.grad_shard
        return torch.empty(self.spec.shard_numel, dtype=self.grad_dtype, device=self.device)

    def add_reduced(self, result: Tensor) -> None:
        """Take in what target() was given; at stage >= 2 the whole gradients are freed."""
        if self.deterministic:
            if self._reductions is None or (self.stage == 0 and not self._aside):
                self._reductions = PairwiseSum()
            with self._summing():
                self._reductions.push(result.clone() if self.stage <= 1 else result)
                if self._reductions.count > 1 or self.stage >= 2:
                    self._collect_tree(result)
                else:
                    self.reduced = result
            self._aside = False
        elif self.reduced is None or self.stage == 0:
            self.reduced = result
        else:
            self.reduced = self.reduced.add_(result)
        if self.stage:
            self.has.clear()
        self.free_grad()

    def free_grad(self) -> None:
        """The whole gradients have been sent."""
        if self.stage >= 2:
            if self.poison and self.grad is not None:
                self.grad.fill_(float("nan"))
            self.grad = None

    def _collect_tree(self, result: Tensor) -> None:
        assert self._reductions is not None
        total = self._reductions.total()
        if self.stage >= 2:
            assert self.grad_shard is not None
            self.reduced = self.grad_shard.copy_(total)
        else:
            self.reduced = result.copy_(total)

    def set_aside(self) -> None:
        """Deterministic stage 0: a new backward must not add to the sum of the last ones."""
        if self.stage == 0 and self.reduced is not None:
            self._aside = True
            self._forget_local()

    def adopt(self, position: int) -> None:
        """Stage 0: a parameter has a gradient from now on: other ranks gave its view one."""
        self.has.add(position)
        self.seen.add(position)
        self.params[position].grad = None if self._main else self.grad_views[position]

    def grad_of(self, position: int) -> Tensor | None:
        """Stage 0: the gradient of a parameter, None if it has none."""
        if not self._main:
            return self.params[position].grad
        return self.grad_views[position] if position in self.has else None

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget all gradients, which writes no memory; or set those that there are to zero."""
        self.marked = False
        self.unreduced = self._reductions = None
        if not set_to_none:
            kept = [self.grad_of(i) for i in range(len(self.params))] if self.stage == 0 else []
            for grad in [*kept, self.reduced]:
                if grad is not None:
                    grad.zero_()
            if self.stage:
                self._forget_local()
            return
        self._forget_local()
        self.seen.clear()
        if self.reduced is not self.grad_shard:
            self._piece_views = None  # they would keep it alive
        self.reduced = None
        if self.stage >= 2:
            self.grad = None

    def begin_backward(self, *, stopped: bool) -> None:
        """Sharded: what a backward has left that stopped before is dropped, if it was the first
        since zero_grad(), which does not reach it when called on the module."""
        if stopped and self._began_empty:
            self.zero_grad(True)
        self.unmark()
        self._began_empty = not self.seen

    # [Note: marks] Where the gradient is not in p.grad (stages >= 1, and micro-batches that wait
    # for the tree), p.grad is a placeholder of nans from the end of a backward to the next: whoever
    # reads it (clip_grad_norm_) sees that the gradient is not there, and whoever sets it to None
    # (zero_grad of any module or optimizer) is understood.

    def mark(self, *, hidden: bool = True) -> None:
        """See [Note: marks]; not hidden: p.grad is what it should be."""
        if hidden:
            nan = self._nan(self.spec.dtype)
            for position in self.seen:
                p = self.params[position]
                p.grad = nan.expand(p.shape)
        self.marked = hidden or not self._main  # a main gradient leaves p.grad None

    def unmark(self) -> None:
        """Before a backward: autograd must find no gradient; cleared ones are forgotten."""
        if not self.marked:
            return
        self.marked = False
        cleared = [position for position in self.seen if self.params[position].grad is None]
        if len(cleared) == len(self.seen):
            self.zero_grad(True)
            return
        for position in self.seen:
            self.params[position].grad = None
        for position in cleared:
            self._forget(position)

    def _forget(self, position: int) -> None:
        self.seen.discard(position)
        self.has.discard(position)
        slot = self.slots[position]
        whole = slice(slot.start, slot.stop)
        start, stop = self.pieces[position]
        first = slot.start - self._own.start
        part = whole if self.stage == 0 else slice(first + start, first + stop)
        for tree, place in ((self.unreduced, whole), (self._reductions, part)):
            if tree is not None:
                tree.zero_(place)
        if self.reduced is not None:
            self.reduced[part].zero_()

    def take_tree_ms(self) -> float:
        """The host's time in fixed sums since the last call."""
        ms, self._tree_ms = self._tree_ms, 0.0
        return ms

    @property
    def tree_bytes(self) -> int:
        """What fixed sums cost in memory now."""
        trees = (self.unreduced, self._reductions)
        return sum(tree.nbytes for tree in trees if tree is not None)

    def _nan(self, dtype: torch.dtype) -> Tensor:
        """A new one: somebody may write into that of a parameter with one element."""
        return torch.full((), float("nan"), dtype=dtype, device=self.device)

    # Checks

    def is_in_place(self, position: int) -> bool:
        """Whether the parameter still uses the bucket's memory."""
        expected = self.views[position] if self.live else self._placeholders[position]
        p = self.params[position]
        return p.data_ptr() == expected.data_ptr() and p.dtype == self.spec.dtype

    def _check_grad(self, position: int, grad: Tensor) -> None:
        name = self.name(position)
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"Engine: expected a dense gradient for parameter '{name}', got "
                f"layout={grad.layout}; build the embedding with sparse=False"
            )
        if grad.requires_grad:
            raise RuntimeError(
                "Engine: expected backward without create_graph, got a gradient with a graph for "
                f"parameter '{name}'; use torch.autograd.grad for higher derivatives"
            )
