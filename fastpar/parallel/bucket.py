"""One bucket on one rank: gradients are brought into it, sent, and kept as their mean.

    IDLE -> COLLECTING -> READY -> IN_FLIGHT -> REDUCED -> IDLE

    stage   gradients                     reduced gradients
    0       whole, kept                   in place, on every rank
    1       whole, kept                   own slice, in place
    2, 3    whole, freed when reduced     own slice

[Note: where gradients live]
Autograd puts its own tensor into p.grad; take() copies it into the bucket (copies.py), or adds it,
at the cost that zeroing the bucket beforehand would have. Nothing is zeroed: places of parameters
without a gradient keep old bytes until fill_missing(). At stage 0 p.grad is then a view of the
bucket (p.main_grad, where the gradient's dtype is not the parameter's); otherwise p.grad is None.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastpar.comm.bucket_wires import Unsent
from fastpar.comm.fixed_sum import PairwiseSum
from fastpar.parallel.bucket_parameters import Absent, BucketGroups, BucketParameters
from fastpar.parallel.copies import WaitingCopies
from fastpar.parallel.stages import BUCKET_PHASES, SENT, BucketPhase, Settings, checked
from fastpar.sharding.layout import Bucket, Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BucketState(BucketParameters):
    """One bucket; the engine decides when what happens.

    Attributes:
        phase: of its gradients in this backward; changed by enter() only.
        wire_dtype: of gradients on the wire.
        grad: [P] gradients of this rank, None while they are freed.
        reduced: [S] ([P] at stage 0) mean over the ranks, None until the first of a step.
    """

    def __init__(
        self,
        layout: Layout,
        spec: Bucket,
        params: list[nn.Parameter],
        settings: Settings,
        groups: BucketGroups,
        **where: Any,
    ) -> None:
        super().__init__(layout, spec, params, settings, groups, **where)
        stage, device = self.stage, self.device
        self.phase = BucketPhase.IDLE
        self._awaited = set(range(len(params)))  # positions without a gradient in this backward
        self.deterministic = settings.deterministic
        self.wire_dtype = settings.reduce_dtype or self.grad_dtype
        self._main = self.grad_dtype != spec.dtype
        self.grad: Tensor | None = None
        if not stage.frees_gradients:
            self.grad = self._empty(groups.reduce, spec.numel, self.grad_dtype)
        self.grad_shard: Tensor | None = self._new_shard() if stage.frees_gradients else None
        self.has: set[int] = set()  # positions with a gradient of this rank in `grad`
        self.seen: set[int] = set()  # since zero_grad(), wherever it is by now
        self.copies = WaitingCopies(device)  # of gradients into `grad`
        self.unreduced: PairwiseSum | None = None  # earlier micro-batches that stayed here
        self.reduced: Tensor | None = None
        self._reductions: PairwiseSum | None = None
        self._tree_ms = 0.0
        places = [slice(s.start, s.stop) for s in self.slots]
        self.unsent = Unsent(groups.reduce, self.own, spec.numel, places)
        self._piece_views: tuple[Tensor | None, list] | None = None  # of reduced; of piece()
        self._aside = False
        self._marks: dict[int, Tensor] = {}  # see [Note: marks]
        self._hidden = False  # the marks are placeholders
        self._version = -1  # of `grad`, when remember() was called
        self._marked_version = -1  # of `grad`, when mark() was
        self._zeroed = set(range(len(params)))  # positions whose gradient nobody has, on any rank
        self._began_empty = True  # the last backward
        if self._main and not stage.shards:
            for p, view in zip(params, self.grad_views):
                p.main_grad = view  # type: ignore[attr-defined]

    def enter(self, phase: BucketPhase) -> None:
        """Change the phase; raises RuntimeError where it cannot follow the present one."""
        self.phase = checked(f"bucket {self.spec.index}", self.phase, phase, BUCKET_PHASES)

    def rest(self) -> None:
        """The backward, or the reduction, is over."""
        if self.phase is not BucketPhase.IDLE:
            self.enter(BucketPhase.IDLE)

    @property
    def grad_bytes(self) -> int:
        """Size of the whole gradients."""
        return self.spec.numel * self.grad_dtype.itemsize

    def piece(self, position: int) -> tuple[Tensor, Tensor | None, int]:
        """(values, reduced gradient, first element) of what this rank owns of a parameter."""
        if self._piece_views is None or self._piece_views[0] is not self.reduced:
            views = []
            for slot, (start, stop) in zip(self.slots, self.pieces):
                at = slot.start + start - self.own.start
                place = slice(at, at + stop - start)
                grad = None if self.reduced is None else self.reduced[place]
                views.append((self.stepped[place], grad, start))
            self._piece_views = self.reduced, views  # of a stage >= 2, the same in every step
        return self._piece_views[1][position]

    def keep_on_host(self, grads: Tensor) -> None:
        """Reduced gradients are there, or on their way: those on the device are let go of."""
        self.reduced, self.grad_shard, self._piece_views = grads, None, None

    @functools.cached_property
    def grad_views(self) -> list[Tensor]:
        """Each parameter's part of `grad`, where it is kept."""
        return [self.slot_of(self.grad, i) for i in range(len(self.slots))]

    def grad_view(self, position: int) -> Tensor:
        """The part of `grad` that is a parameter's."""
        if not self.stage.frees_gradients:
            return self.grad_views[position]
        return self.slot_of(self.grad, position)

    def take(self, position: int, given: Tensor | None = None) -> bool:
        """Bring a parameter's .grad, or a given gradient, into the bucket; returns taken()."""
        if self.phase in SENT:
            raise RuntimeError(
                "Engine: expected one gradient per backward for parameter "
                f"'{self.name(position)}', got another after bucket {self.spec.index} was sent "
                f"('{self.phase.value}' cannot go back to 'collecting'); call the module that owns "
                "the parameter in every forward, or in none"
            )
        p = self.params[position]
        grad = p.grad if given is None else given
        if grad is None:  # it is in its place: split_backward.py, Places
            return position in self.has and self.taken(position)
        self.check_grad(position, grad)
        self.open_grad()
        view = self.grad_view(position)
        if not self.stage.shards and not self._main:
            if grad.data_ptr() != view.data_ptr():
                view.add_(grad) if given is not None and position in self.has else view.copy_(grad)
            if p.grad is not view:
                p.grad = view
        else:
            if grad.data_ptr() != view.data_ptr():
                self.copies.take(grad, view, add=self.unsent.inside or position in self.has)
            p.grad = None
        return self.taken(position)

    def room_for(self, position: int) -> Tensor | None:
        """Where a gradient can be computed; None where take() has to add it, or to cast it."""
        self.open_grad()
        first = not self.unsent.inside and position not in self.has
        return self.grad_view(position) if first and self.grad_dtype == self.spec.dtype else None

    def taken(self, position: int) -> bool:
        """A gradient is in the bucket; whether it was the last one that the bucket waited for."""
        self.has.add(position)
        self.seen.add(position)
        self._awaited.discard(position)
        collecting = self.phase is BucketPhase.COLLECTING
        if collecting and self._awaited:
            return False
        self.copies.make()
        if collecting:
            self.enter(BucketPhase.READY)
        return collecting

    def open_grad(self) -> None:
        """`grad` is about to be written: make it, or save the sum so far that its own slice has."""
        if self.grad is None:
            self.grad = torch.empty(self.spec.numel, dtype=self.grad_dtype, device=self.device)
        elif self.stage.shards and self.reduced is not None and not self.has:
            in_place = self.reduced.data_ptr() == self.grad[self.own].data_ptr()
            self.reduced = self.reduced.clone() if in_place else self.reduced
        if self.grad is not None and not self.has:
            self.unsent.open(self.grad)

    def fill_missing(self, *, flags: bool) -> list[int]:
        """Zero the places without a gradient and set `used`; returns them."""
        self.copies.make()
        self.open_grad()
        missing = []
        self._zeroed.clear()
        self.unsent.fill(self.grad)  # type: ignore[arg-type]
        for position in range(len(self.params)):
            if position not in self.has:
                self.check_given(position)
                self.unsent.skip(self.grad_view(position))
                missing.append(position)
        if flags:
            used = self.used()
            used.fill_(1.0)
            for position in missing:
                # Deterministic: the gradients of earlier micro-batches lie elsewhere.
                used[position] = float(self.deterministic and position in self.seen)
        return missing

    def check_given(self, position: int) -> None:
        """Refuse p.grad of a parameter to which no backward gave a gradient."""
        if position not in self.has and self.params[position].grad is not None:
            self._refuse_replaced(position)

    def _refuse_replaced(self, position: int) -> NoReturn:
        raise RuntimeError(
            f"Engine: expected p.grad of '{self.name(position)}' as backward left it, got another "
            "tensor; set p.grad to None or change it in place (where it reads as nan, clip with "
            "fastpar.AdamW(max_grad_norm=...) or scale the loss)"
        )

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
            self.unreduced.push(self.grad if self.stage.frees_gradients else self.grad.clone())
        if self.stage.frees_gradients:
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
        self._tree_ms -= time.perf_counter() * 1e3
        yield
        self._tree_ms += time.perf_counter() * 1e3

    def _forget_local(self) -> None:
        self.has.clear()
        for p in self.params:
            p.grad = None

    def target(self) -> Tensor:
        """Where the next reduction puts its result."""
        assert self.grad is not None
        if not self.stage.shards:
            return self.grad
        if not self.stage.frees_gradients or (self.spec.n_shards == 1 and not self.deterministic):
            return self.grad[self.own]
        if self.reduced is None and not self.deterministic and self.grad_shard is not None:
            return self.grad_shard
        return self._new_shard()

    def add_reduced(self, result: Tensor) -> None:
        """Take in what target() was given; whole gradients are freed where the stage says so."""
        if self.deterministic:
            if self._reductions is None or (not self.stage.shards and not self._aside):
                self._reductions = PairwiseSum()
            with self._summing():
                self._reductions.push(result if self.stage.frees_gradients else result.clone())
                own = self.grad_shard if self.host is None else self._new_shard()
                self.reduced = own if self.stage.frees_gradients else result
                assert self.reduced is not None
                if self._reductions.count > 1 or self.stage.frees_gradients:
                    self.reduced.copy_(self._reductions.total())
            self._aside = False
        elif self.reduced is None or not self.stage.shards:
            self.reduced = result
        else:
            self.reduced = self.reduced.add_(result)
        if self.stage.shards:
            self.has.clear()
        self.unsent.close()
        self.free_grad()

    def free_grad(self) -> None:
        """The whole gradients have been sent."""
        if self.stage.frees_gradients:
            if self.poison and self.grad is not None and self.spec.n_shards > 1:
                self.grad.fill_(float("nan"))
            self.grad = None

    @property
    def written_by_hand(self) -> bool:
        """Stage 0: whether somebody wrote into p.grad since mark()."""
        if self.stage.shards or self.reduced is None or self.grad is None:
            return False
        return self.grad._version != self._marked_version

    def set_aside(self, *, anew: bool) -> None:
        """Deterministic stage 0: a new backward must not add to the sum of the last ones.

        anew: what is in p.grad is that sum.
        """
        if not self.stage.shards and self.reduced is not None:
            assert self.grad is not None
            if anew:
                self._reductions = None
                if self.grad.any():
                    self._reductions = PairwiseSum()
                    self._reductions.push(self.grad.clone())
            self._aside = self._reductions is not None
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

    @property
    def zeroed(self) -> bool:
        """Whether all gradients were zeroed since the last backward or reduction of any rank."""
        return len(self._zeroed) == len(self.params)

    @property
    def empty(self) -> bool:
        """Whether this rank has no gradient, and no part of one."""
        return self.zeroed or (not self.seen and (not self.stage.shards or self.reduced is None))

    def zero_grad(self, set_to_none: bool, positions: set[int] | None = None) -> None:
        """Forget all gradients, which writes no memory; or set those that there are to zero.

        positions: those of these parameters only.
        """
        self.copies.make()
        positions = set(range(len(self.params))) if positions is None else positions
        zero = set()
        if not set_to_none:  # but of what was cleared by hand
            known = self._marks.keys()
            zero = {i for i in positions if i not in known or self.params[i].grad is not None}
        for position in positions - zero:
            self.params[position].grad = None
        self._forget(positions - zero)
        for position in zero:
            self._zero(position)
        if self.zeroed:
            self.unreduced = self._reductions = None  # a tree of zeros would change what follows

    def _forget(self, positions: set[int]) -> None:
        """These have no gradient any more; memory is written only where others have one."""
        self._zeroed |= positions
        self.unsent.drop(self.grad_view(i) for i in positions & self.has)
        self.seen -= positions
        self.has -= positions
        for position in positions:
            self._marks.pop(position, None)
        if not self.empty:
            for position in positions:
                self._zero_parts(position)
            return
        self.unreduced = self._reductions = None
        if self.reduced is not self.grad_shard:
            self._piece_views = None  # they would keep it alive
        self.reduced = None
        if self.stage.frees_gradients:
            self.grad = None

    def begin_backward(self, *, stopped: bool, skipped: bool = False) -> None:
        """A backward begins; skipped: the forward did not use these parameters.

        stopped: the last one did. Where gradients are shared out, what it has left is dropped if it
        was the first since zero_grad(), which does not reach it when called on the module.
        """
        self.rest()
        self.enter(BucketPhase.COLLECTING)
        self._awaited = set(range(len(self.params)))
        if skipped:
            self.enter(BucketPhase.READY)
        if stopped and self._began_empty and self.stage.shards:
            self.zero_grad(True)
        self.unmark()
        self._began_empty = not self.seen
        self._zeroed.clear()

    # [Note: marks] From the end of a backward to the next it is remembered what p.grad was: whoever
    # sets it to None (zero_grad of any module) is understood. Where the gradient is elsewhere
    # (stages >= 1, main gradients, micro-batches that wait for the tree), p.grad is a placeholder
    # of nans: whoever reads it (clip_grad_norm_) sees that the gradient is not there. Once shards
    # are reduced every parameter has one, as no rank knows which of them others have used.

    def mark(self, *, hidden: bool = True) -> None:
        """Puts placeholders into p.grad, [Note: marks]; not hidden: p.grad is what it should be."""
        self.copies.make()
        self._hidden = hidden = hidden or self._main
        everywhere = self.stage.shards and self.reduced is not None
        self._marks.clear()
        for position in range(len(self.params)) if everywhere else self.seen:
            p = self.params[position]
            if hidden:
                p.grad = self._absent(position)
            if p.grad is not None:
                self._marks[position] = p.grad
        self.remember()
        self._marked_version = self._version

    def remember(self) -> None:
        """What is counted from now on belongs to the gradients that there are."""
        self._version = -1 if self.grad is None else self.grad._version

    @property
    def changed(self) -> bool:
        """Whether somebody wrote into p.grad since remember()."""
        return not self._hidden and self.grad is not None and self.grad._version != self._version

    def unmark(self) -> None:
        """Before a backward: autograd must find no placeholder."""
        for position in self._marks if self._hidden else ():
            self.params[position].grad = None
        self._marks.clear()

    def forget_cleared(self, fired: Tensor | None) -> set[int]:
        """p.grad = None, and zero_grad() of a module, are understood; returns what was cleared.

        fired: stage 0: a parameter that autograd has given its next gradient already.
        """
        self.copies.make()
        cleared = set()
        for position, mark in self._marks.items():
            grad = self.params[position].grad
            if grad is None or (self.params[position] is fired and grad is not mark):
                cleared.add(position)
            elif grad is not mark:
                self._refuse_replaced(position)
            elif isinstance(mark, Absent) and mark.zeroed:
                mark.zeroed = False
                self._zero(position)
        if cleared:
            self._forget(cleared)
        return cleared

    def _zero(self, position: int) -> None:
        """A parameter's gradient is zero from now on."""
        self._zeroed.add(position)
        if self.stage.shards:
            self.unsent.drop(self.grad_view(i) for i in {position} & self.has)
            self.has.discard(position)
        elif (grad := self.grad_of(position)) is not None:  # or a placeholder, which may be zero
            grad.zero_()
        self._zero_parts(position)

    def _zero_parts(self, position: int) -> None:
        """Zeroes one parameter's elements in what was added up so far."""
        slot = self.slots[position]
        whole = slice(slot.start, slot.stop)
        start, stop = self.pieces[position]
        first = slot.start - self.own.start
        part = slice(first + start, first + stop) if self.stage.shards else whole
        for tree, place in ((self.unreduced, whole), (self._reductions, part)):
            if tree is not None:
                tree.zero_(place)
        if self.reduced is not None and self.stage.shards:
            self.writable(self.reduced)[part].zero_()

    def take_tree_ms(self) -> float:
        """The host's time in fixed sums since the last call."""
        ms, self._tree_ms = self._tree_ms, 0.0
        return ms

    @property
    def tree_bytes(self) -> int:
        """What fixed sums cost in memory now."""
        trees = (self.unreduced, self._reductions)
        return sum(tree.nbytes for tree in trees if tree is not None)
