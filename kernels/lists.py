"""Lists of tensors in one call: as compiled functions take them, a row of numbers for each tensor
(csrc/lists.h), compared, copied."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.op import is_eager

_rows: Any = None if _C is None else torch.ops.fastpar._rows.default
_PLAIN = {Tensor, torch.nn.Parameter}


def rows_of(tensors: Sequence[Tensor], written: int = 0) -> Tensor:
    """What compiled functions know of the tensors, which the caller keeps: int64, on the host. The
    first `written` will be written: autograd hears of it."""
    return _rows(tensors, written)


def goes_at_once(tensors: Iterable[Tensor]) -> bool:
    """Whether an eager call may read rows_of() the tensors: no mode, transform or subclass has a
    say. What is in memory, the rows tell."""
    return _C is not None and is_eager() and {*map(type, tensors)} <= _PLAIN


def are_usual(rows: Tensor, first: int = 0) -> bool:
    """Whether rows from `first` on are of contiguous fp32, bf16 or fp16 of one device in memory."""
    return _C.are_usual(rows, first)


class Kept:
    """Tensors that a caller keeps, whose rows are read again and again: parts of the state of an
    optimizer. Nothing that Python's garbage collector should see may hang on them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._held: Any = torch.classes.fastpar.Kept(tensors)

    def rows(self) -> Tensor:
        """rows_of() them; all will be written."""
        return self._held.written_rows()


def same_entries(
    table: dict[Any, dict[str, Any]], keys: list[Any], values: list[dict[str, Any]],
    of: list[dict[str, Any]], names: list[str], columns: list[list[Any]],
) -> bool:  # fmt: skip
    """Whether a table has these keys and values in this order, and each of the dicts `of` has its
    object of a column under the column's name. All are compared as objects."""
    return _C.same_entries(table, keys, values, of, names, columns)


def are_at(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether each tensor of a is the same memory as that of b, as the same dtype and layout."""
    if _C is not None:
        return torch.ops.fastpar._are_at.default(a, b)
    return len(a) == len(b) and all(
        x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and x.shape == y.shape
        and x.stride() == y.stride()
        for x, y in zip(a, b)
    )  # fmt: skip


def copy_into(flat: Tensor, starts: Sequence[int], source: Sequence[Tensor]) -> None:
    """Copy each tensor into a contiguous buffer, from its own start on."""
    if _C is not None:
        torch.ops.fastpar._copy_into_.default(flat, starts, source)
        return
    ends = (start + x.numel() for start, x in zip(starts, source))
    views = [flat[start:end].view(x.shape) for start, end, x in zip(starts, ends, source)]
    torch._foreach_copy_(views, list(source))


def swap(uses: list[tuple[dict[str, Any], str, int]], old: Any, new: Any, which: Any) -> None:
    """table[name] = new[i] for each use (table, name, i) for which which[i], where it is old[i]."""
    if _C is not None:
        _C.swap(uses, old, new, which)
        return
    for table, name, i in uses:
        if which[i] and table.get(name) is old[i]:
            table[name] = new[i]
