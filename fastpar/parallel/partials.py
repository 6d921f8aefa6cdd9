"""Gradients whose state along tp is Partial: summed over the ranks, once for each step.

[Note: when]
Pieces of them are packed and summed along tp after their reduction along dp: at stage 0 at the end
of a backward, where p.grad can be read, later once before the step. A backward that adds to such a
sum would have it counted again by the next: the first rank keeps it, the others begin with 0.

[Note: clipping by hand]
At stage 0 p.grad is there to be read, but a norm over it is that of one rank's part of the model.
torch's clip_grad_norm_ would scale each rank's gradients by another factor, and what all should
have alike would drift apart, so a step refuses gradients that were changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastpar.sharding.placements import Partial
from fastpar.tensor.declared import Declared

if TYPE_CHECKING:
    from fastpar.parallel.shards import Shards


class PartialGradients:
    """Those of one engine; see the notes."""

    def __init__(self, engine: Shards, declared: Declared) -> None:
        self._engine, self.group = engine, declared.tp.group
        self._declared = declared
        self._summed = False
        self._versions: list[int] = []  # of the buckets' gradients when p.grad was shown

    def _grads(self) -> list[Tensor | None]:
        """This rank's piece of each."""
        engine, state = self._engine, self._declared.state
        return [engine.piece(p).grad for p in engine.params if isinstance(state(p), Partial)]

    def _sizes(self) -> list[tuple[int, torch.dtype]]:
        engine, found = self._engine, []
        for p in engine.params:
            if isinstance(self._declared.state(p), Partial):
                bucket, start, stop = engine.place(p)
                found.append((stop - start, bucket.grad_dtype))
        return found

    def sum(self) -> None:
        """Make them whole, unless they are. Ranks: all of tp."""
        if self._summed:
            return
        self._summed = True
        engine, device = self._engine, self._engine.mesh.device
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor | None]]] = {}
        for grad, (numel, dtype) in zip(self._grads(), self._sizes()):
            flat = torch.zeros(numel, dtype=dtype, device=device) if grad is None else grad.view(-1)
            by_dtype.setdefault(dtype, []).append((flat, grad))
        for entries in by_dtype.values():
            packed = torch.cat([flat for flat, _ in entries])
            engine.sum_over(self.group, packed, "summing partial gradients")
            sums = packed.split([flat.numel() for flat, _ in entries])
            for (_, grad), total in zip(entries, sums):
                if grad is not None:
                    grad.copy_(total.view(grad.shape))

    def split(self) -> None:
        """A backward begins that adds to them; see [Note: when]."""
        if self._summed and self.group.rank:
            for grad in self._grads():
                if grad is not None:
                    grad.zero_()
        self.forget()

    def forget(self) -> None:
        """There are no gradients any more, or they change."""
        self._summed, self._versions = False, []

    def changed(self) -> None:
        """zero_grad() has written into some of what was shown."""
        if self._versions:
            self.show()

    def show(self) -> None:
        """p.grad is there to be read."""
        grads = [bucket.grad for bucket in self._engine.buckets]
        self._versions = [grad._version for grad in grads if grad is not None]

    def check(self) -> None:
        """See [Note: clipping by hand]."""
        for bucket, version in zip(self._engine.buckets, self._versions):
            assert bucket.grad is not None
            if bucket.grad._version != version:
                tp = self.group.world_size
                raise RuntimeError(
                    f"Engine: expected gradients as backward left them with tp={tp}, "
                    f"got p.grad of '{bucket.name(0)}' changed in place; a rank sees its part of "
                    "the norm only: clip with fastpar.AdamW(max_grad_norm=...)"
                )
