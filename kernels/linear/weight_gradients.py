"""Weight gradients of linear layers: when they are computed, and where they are written.

    dx = dy @ weight          in the backward: the layer before waits for it
    dweight = dy.T @ x        by whoever take()s it: nobody waits for it but the optimizer

So a pipeline hands on dx as early as it can, and fills its waiting with the products that are left
(the split backward of zero-bubble schedules, Qi et al. 2023, arXiv 2401.10241). Between the two dy
and x are kept. What is computed, and its bits, are those of a backward in one piece.

A layer asks for the queue when its forward runs, in the thread that calls it, and keeps it for its
backward, which autograd may run in a thread of its own.

[Note: places] In a backward in one piece the product is written where the gradient is kept, if
somebody offers such memory: weight.fastpar_place, a function of the weight that returns it and
whether the product is to be added to what is there; or None, where the gradient goes the usual way.
Memory of the weight's dtype that holds nothing yet: autograd hands the gradient on as ever, hooks
see it, and who offered the memory finds it there instead of copying it; where it is added to,
autograd gets none. Memory in fp32 for a 16-bit weight is weight.fastpar_wide_place: the product,
which is summed in fp32, goes there without being rounded to 16 bits, and autograd gets no gradient.
See __init__.py, [Note: wide gradients]. On a GPU the loss and the embedding use it, too: the
gradient of a tied table, which both have in fp32, is then rounded nowhere and never copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastpar.kernels import backend
from fastpar.kernels.op import in_transform, is_plain

_here = threading.local()


class WeightGradients:
    """Those of one forward and backward.

    Args:
        params: whose gradients may wait; those of any other tensor are computed in the backward.
    """

    def __init__(self, params: Collection[Tensor]) -> None:
        self.params = params
        self._left: list[tuple[Tensor, Callable[[Tensor | None], Tensor]]] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Layers whose forward runs inside leave their weights' gradients here."""
        before, _here.queue = current_queue(), self
        try:
            yield
        finally:
            _here.queue = before

    def later(self, weight: Tensor, compute: Callable[[Tensor | None], Tensor]) -> None:
        """compute(out) makes the gradient when somebody takes it: there, or in a new tensor."""
        self._left.append((weight, compute))

    def take(self) -> list[tuple[Tensor, Callable[[Tensor | None], Tensor]]]:
        """(weight, compute) of all that wait, in the order in which their backward passes ran."""
        left, self._left = self._left, []
        return left


def current_queue() -> WeightGradients | None:
    """That of the forward that runs here, None without one."""
    return getattr(_here, "queue", None)


def queue_for(weight: Tensor) -> WeightGradients | None:
    """Where the gradient of this weight may wait, in a forward that runs here; None: nowhere."""
    queue = current_queue()
    if queue is None or torch.is_autocast_enabled(weight.device.type):
        return None
    return queue if weight.requires_grad and weight in queue.params else None


Place = Callable[[Tensor], tuple[Tensor, bool] | None]


def place_for(weight: Tensor, name: str = "fastpar_place") -> Place | None:
    """What offers memory for this weight's gradient, in a forward that runs here; None: nobody."""
    if torch.compiler.is_compiling() or not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    place: Place | None = getattr(weight, name, None)
    if place is None or in_transform() or forward_ad._current_level >= 0:
        return None
    return None if torch.is_autocast_enabled(weight.device.type) else place


def wide_room(weight: Tensor | None, grad: Tensor) -> tuple[Tensor, bool] | None:
    """(fp32 memory for the gradient of a 16-bit table, whether to add to it), in a backward that
    computes it from this gradient; None: the usual way, as on a CPU."""
    place: Place | None = getattr(weight, "fastpar_wide_place", None)
    if weight is None or place is None or not (grad.is_cuda or backend.cuda_on_cpu):
        return None
    return place(weight) if is_plain(grad) and not torch.is_grad_enabled() else None
