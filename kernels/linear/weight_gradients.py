"""Weight gradients of linear layers: where they are written.

[Note: places] In backward the product of a 16-bit weight is written directly to where an fp32
gradient is kept, if such memory is offered: weight.fastpar_wide_place is a function of the weight
and of the node that accumulates its gradient (None: unknown), which returns the memory and whether
to add the product to it; or None, and the gradient takes the usual way. The product, which is
summed in fp32, goes there without rounding to 16 bits, and autograd gets no gradient.
See __init__.py, [Note: wide gradients]. On a GPU the loss and the embedding use it, too: the
gradient of a tied table, which both have in fp32, is then never rounded nor copied.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastpar.kernels import backend
from fastpar.kernels.op import in_transform, is_plain

WIDE = "fastpar_wide_place"  # a weight's attribute, see [Note: places]


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
