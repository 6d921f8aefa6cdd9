"""Lists of tensors as compiled functions take them: a row of numbers for each tensor, read in one
call (csrc/lists.h)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.op import goes_straight

_rows: Any = None if _C is None else torch.ops.fastpar._rows.default
_PLAIN = {Tensor, torch.nn.Parameter}


def rows_of(tensors: Sequence[Tensor], written: int = 0) -> Tensor:
    """What compiled functions know of the tensors, which the caller keeps: int64, on the host. The
    first `written` will be written: autograd hears of it."""
    return _rows(tensors, written)


def goes_at_once(tensors: Iterable[Tensor]) -> bool:
    """Whether an eager call may read rows_of() the tensors: no mode, transform or subclass has a
    say. What is in memory, the rows tell."""
    return _C is not None and goes_straight(()) and {*map(type, tensors)} <= _PLAIN


def are_usual(tensors: Sequence[Tensor]) -> bool:
    """Whether an eager call finds contiguous fp32, bf16 or fp16 of one device in memory."""
    return goes_at_once(tensors) and _C.are_usual(rows_of(tensors))
