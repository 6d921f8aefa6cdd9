"""Weight gradients of linear layers: when they are computed, and where they are written.

    dx = dy @ weight          in the backward: the layer before waits for it
    dweight = dy.T @ x        by the caller of take(): only the optimizer waits for it

So a pipeline sends dx as early as it can, and fills its waiting time with the remaining products
(the split backward of zero-bubble schedules, Qi et al. 2023, arXiv 2401.10241). Until then dy and x
are kept. The bits are those of an undivided backward. A layer reads the current queue when its
forward runs, and keeps it for its backward, which autograd may run in another thread.

[Note: places] In an undivided backward the product of a 16-bit weight is written directly to where
an fp32 gradient is kept, if such memory is offered: weight.fastpar_wide_place is a function of the
weight and of the node that accumulates its gradient (None: unknown), which returns the memory and
whether to add the product to it; or None, and the gradient takes the usual way. The product, which
is summed in fp32, goes there without rounding to 16 bits, and autograd gets no gradient.
See __init__.py, [Note: wide gradients]. On a GPU the loss and the embedding use it, too: the
gradient of a tied table, which both have in fp32, is then never rounded nor copied.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastpar.kernels import backend
from fastpar.kernels.op import in_transform, is_plain

_here = threading.local()
WIDE = "fastpar_wide_place"  # a weight's attribute, see [Note: places]


class WeightGradients:
    """The delayed weight gradients of one forward and backward. params: whose gradients may be
    delayed; all others are computed in the backward."""

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
        """Adds a gradient: compute(out) makes it when it is taken, in out or in a new tensor."""
        self._left.append((weight, compute))

    def take(self) -> list[tuple[Tensor, Callable[[Tensor | None], Tensor]]]:
        """(weight, compute) of all delayed gradients, in the order of their backward passes."""
        left, self._left = self._left, []
        return left


def current_queue() -> WeightGradients | None:
    """The queue of the current forward, None without one."""
    return getattr(_here, "queue", None)


def queue_for(weight: Tensor) -> WeightGradients | None:
    """The queue for this weight's gradient, in a forward that runs here; None: not delayed."""
    queue: WeightGradients | None = getattr(_here, "queue", None)
    if queue is None or torch.is_autocast_enabled(weight.device.type):
        return None
    return queue if weight.requires_grad and weight in queue.params else None


Place = Callable[..., tuple[Tensor, bool] | None]  # of (weight, its node of autograd, if known)


def offers_place(weight: Tensor) -> bool:
    """Whether memory for this weight's gradient is offered. torch.compile sees none."""
    return not torch.compiler.is_compiling() and WIDE in weight.__dict__


def place_for(weight: Tensor) -> Place | None:
    """The provider of memory for this weight's gradient, in a current forward; None: none."""
    if not offers_place(weight):
        return None
    place: Place = getattr(weight, WIDE)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return None
    if in_transform() or forward_ad._current_level >= 0:
        return None
    return None if torch.is_autocast_enabled(weight.device.type) else place


def wide_room(weight: Tensor | None, grad: Tensor) -> tuple[Tensor, bool] | None:
    """(fp32 memory for the gradient of a 16-bit table, whether to add to it), in a backward that
    computes it from this gradient; None: the usual way, as on a CPU."""
    place: Place | None = getattr(weight, WIDE, None)
    if weight is None or place is None or not (grad.is_cuda or backend.cuda_on_cpu):
        return None
    return place(weight, None) if is_plain(grad) and not torch.is_grad_enabled() else None
