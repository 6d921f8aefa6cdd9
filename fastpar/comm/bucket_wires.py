"""In which way the buckets of one model travel, and what is left of a bucket's gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import Collectives
from fastpar.comm.wire_formats import CODES, FORMATS
from fastpar.comm.wires import CodeGathers, CompressedGathers, CompressedSums, NodeSums, Worker
from fastpar.kernels.linear_fp8 import Fp8


def rounded_weights(model: nn.Module) -> dict[nn.Parameter, Fp8]:
    """Weights that products of 8 bits round with delayed scales, and how."""
    layers = [m for m in model.modules() if isinstance(getattr(m, "fp8", None), Fp8)]
    found: dict[Any, Any] = {m.weight: m.fp8 for m in layers}
    return {p: how for p, how in found.items() if how.scales is not None}


class Unsent:
    """What is left of a bucket's compressed gradients; see wires.py, [Note: errors that are kept].

    Args:
        group: reduces them; own: this rank's slice of [P].
        places: of the parameters; a block reaches from one's end to the next one's start.
    Attributes:
        inside: it lies in the memory of the gradients, and new ones are added to it.
    """

    def __init__(
        self, group: Collectives | None, own: slice, numel: int, places: Sequence[slice]
    ) -> None:
        self._group, self._own, self.inside = group, own, False
        starts = [*(place.start for place in places[1:]), numel]
        pads = [(p.stop, start) for p, start in zip(places, starts) if p.stop < start]
        self._pads = pads if isinstance(group, CompressedSums) else []

    def open(self, grad: Tensor) -> None:
        """The first of new gradients is about to come."""
        if self.inside:
            grad[self._own].zero_()

    def fill(self, grad: Tensor) -> None:
        """The last has come."""
        for start, stop in self._pads:
            grad[start:stop].zero_()

    def close(self) -> None:
        """They were sent."""
        self.inside = self._group is not None and self._group.leaves_rest

    def skip(self, view: Tensor) -> None:
        """A parameter has no gradient: what is left of it alone is sent."""
        if not self.inside:
            view.zero_()

    def drop(self, views: Iterable[Tensor]) -> None:
        """Gradients that were added are dropped, and what they were added to with them."""
        for view in views if self.inside else ():
            view.zero_()

    @property
    def buffer(self) -> Tensor | None:
        """[P] where it has memory of its own."""
        return None if self._group is None else self._group.error

    def of(self, grad: Tensor | None, place: slice) -> Tensor | None:
        """What is left of a parameter, for a checkpoint; None: nothing is kept."""
        kept = grad if self.inside else self.buffer
        return None if kept is None else kept[place]

    def restore(self, grad: Tensor | None, place: slice, values: Tensor) -> None:
        """Go on from what of() returned."""
        self.inside = self._group is not None and self._group.leaves_rest
        kept = grad if self.inside else self.buffer
        if kept is not None:
            kept[place].copy_(values)


class Wires:
    """In which formats the buckets of one model travel.

    Args:
        gradients: one of OF_GRADIENTS; weights: of OF_WEIGHTS, None: as they are.
        feedback: errors of gradients are kept.
        rank: for the random bits: among all that have the same parameters.
        codes: how products round the parameters that are gathered as their codes, by number.
    """

    def __init__(
        self,
        gradients: str,
        weights: str | None,
        feedback: object,
        rank: int,
        codes: Mapping[int, Fp8],
    ) -> None:
        self._gradients, self.codes = FORMATS.get(gradients), codes
        self._weights = None if weights in (None, CODES) else FORMATS[weights]
        self._feedback, self._rank = bool(feedback), rank
        self._workers: dict[int, Worker] = {}

    def _worker(self, inner: Collectives) -> Worker:
        return self._workers.setdefault(id(inner), Worker(inner))

    def sums(
        self,
        inner: Collectives | None,
        index: int,
        *,
        again: Collectives | None = None,
        exact: int = 0,
        numel: int = 0,
        in_place: bool = False,
        nodes: tuple[Collectives, Collectives] | None = None,
    ) -> Collectives | None:
        """For the gradients of bucket `index`; further arguments as in CompressedSums.

        numel: of a buffer for errors, in_place: they need none. nodes: as in NodeSums, where each
        of these has several ranks.
        """
        if inner is None or inner.world_size == 1 or self._gradients is None:
            return inner
        keep, error = self._feedback, None
        if keep and not in_place and numel:
            error = torch.zeros(numel, device=inner.device, dtype=torch.float32)
        make = CompressedSums if nodes is None else functools.partial(NodeSums, nodes=nodes)
        return make(
            inner,
            self._gradients,
            self._worker(inner),
            again=again,
            exact=exact,
            error=error,
            leaves_rest=keep and in_place,
            key=(index, self._rank),
        )

    def gathers(
        self,
        inner: Collectives | None,
        dtype: torch.dtype,
        codes: Sequence[tuple[slice, Fp8]] = (),
    ) -> Collectives | None:
        """For the weights of a bucket of that dtype; codes: as in CodeGathers, of all of them."""
        form = self._weights
        if inner is None or inner.world_size == 1:
            return inner
        if codes:
            return CodeGathers(inner, self._worker(inner), codes)
        if form is None or form.dtype == dtype:
            return inner
        return CompressedGathers(inner, self._worker(inner), form)
