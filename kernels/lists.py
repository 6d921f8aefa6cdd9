"""Lists of tensors as compiled functions take them: a row of numbers for each tensor, read in one
call (csrc/lists.h)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.op import goes_straight

_PLAIN = {Tensor, torch.nn.Parameter}


def rows_of(tensors: Sequence[Tensor]) -> Tensor:
    """What compiled functions know of the tensors, which the caller keeps: int64, on the host."""
    return torch.ops.fastpar._rows.default(tensors)


def goes_at_once(tensors: Iterable[Tensor]) -> bool:
    """Whether an eager call may read rows_of() the tensors: no mode, transform or subclass has a
    say. What is in memory, the rows tell."""
    return _C is not None and {*map(type, tensors)} <= _PLAIN and goes_straight(())


def are_usual(tensors: Sequence[Tensor]) -> bool:
    """Whether an eager call finds contiguous fp32, bf16 or fp16 of one device in memory."""
    return goes_at_once(tensors) and _C.are_usual(rows_of(tensors))


def count(counters: Sequence[Tensor], by: float) -> list[float]:
    """Adds to numbers on the host; returns the sums."""
    sums = _C.count(rows_of(counters), by) if goes_at_once(counters) else None
    if sums is None:
        if by:
            torch._foreach_add_(counters, by)
        return [counter.item() for counter in counters]
    if by:
        torch.autograd.graph.increment_version(counters)
    return sums
