"""The parameters of one bucket on one rank: views of its memory, or placeholders.

[Note: stale parameters]
After a step a rank knows only its own slice of the new parameters, at stage 3 also between uses.
Until they are gathered, p.data is a placeholder of the right shape with one nan for all elements:
whoever reads it sees nans instead of old values, and not the memory that was freed, which would
crash; absent.py says who is refused. Tensors that autograd saved keep the storage, which is resized
and filled again in place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle
from fastpar.parallel.absent import AbsentParameter, hide, show
from fastpar.sharding.layout import Bucket, Layout


class BucketParameters:
    """One bucket's; see the note.

    Attributes:
        params: its parameters; the slots of the layout in order.
        flat: [P] parameters; without memory while a bucket of stage 3 is freed.
        shard: [S] this rank's slice of the newest parameters.
        live: whether the parameters are views of flat.
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
        gather: Collectives | None,
        poison: bool,
    ) -> None:
        self.spec, self.params, self.stage = spec, params, stage
        self.slots = [layout.slots[i] for i in spec.slots]
        self.poison = poison
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

    def _empty(self, group: Collectives | None, numel: int, dtype: torch.dtype) -> Tensor:
        if group is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return group.empty(numel, dtype)

    def name(self, position: int) -> str:
        """The first name of a parameter."""
        return self.slots[position].spec.names[0]

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
        if not self.live and not all(type(p) is AbsentParameter for p in self.params):
            self.check()  # those that are absent refuse other memory themselves
        for p, view in zip(self.params, self.views):
            show(p)
            p.data = view
        self.live = True

    def make_stale(self) -> None:
        """See [Note: stale parameters]; at stage 3 the memory is given back."""
        if not self.live:
            return
        self.check()
        self.live = False
        nan = self._nan(self.spec.dtype)
        self._placeholders = [nan.expand(s.spec.shape) for s in self.slots]
        for p, placeholder in zip(self.params, self._placeholders):
            p.data = placeholder
            hide(p)
        if self.stage == 3:
            if self.poison:
                self.flat.fill_(float("nan"))
            self.flat.untyped_storage().resize_(0)

    def new_memory(self) -> list[tuple[int, Tensor]]:
        """(position, copy of the values) of live parameters that somebody gave other memory."""
        moved = [i for i in range(len(self.params)) if not self.is_in_place(i)]
        return [(i, self.params[i].data.clone()) for i in moved]

    def take_memory(self, position: int, new: Tensor) -> str | None:
        """Keep such values in the old memory; or say why they do not fit."""
        p, view = self.params[position], self.views[position]
        p.data = view
        fits = (new.shape, new.dtype, new.device) == (view.shape, view.dtype, view.device)
        if fits and hasattr(p, "_fastpar_engine"):
            view.copy_(new)
            return None
        return (
            f"gathered: expected values for parameter '{self.name(position)}' of shape "
            f"{list(view.shape)}, {view.dtype}, on {view.device}, got p.data={list(new.shape)}, "
            f"{new.dtype}, on {new.device}; write them with p.copy_(), and change shapes and "
            "dtypes before fastpar.parallelize"
        )

    def save_writes(self) -> None:
        """Somebody wrote into the whole parameters: this rank's slice of them is the truth."""
        if self.stage == 3:
            self.shard.copy_(self.flat[self._own])

    def _nan(self, dtype: torch.dtype) -> Tensor:
        """A new one: somebody may write into that of a parameter with one element."""
        return torch.full((), float("nan"), dtype=dtype, device=self.device)

    def is_in_place(self, position: int) -> bool:
        """Whether the parameter still uses the bucket's memory, in the same way."""
        view = self.views[position] if self.live else self._placeholders[position]
        p = self.params[position]
        same = p.data_ptr() == view.data_ptr() and p.dtype == view.dtype
        return same and p.shape == view.shape and p.stride() == view.stride()

    def check(self) -> None:
        """Raise RuntimeError for a parameter that somebody gave other memory."""
        for position, p in enumerate(self.params):
            if not self.is_in_place(position):
                raise RuntimeError(
                    f"Engine: expected parameter '{self.name(position)}' to stay in its flat "
                    f"buffer, got other memory (dtype={p.dtype}, shape={list(p.shape)}, device="
                    f"{p.device}); call module.to() before fastpar.parallelize, and write values "
                    "inside `with fastpar.engine_of(model).gathered():`"
                )
