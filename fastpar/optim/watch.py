"""A watch over an optimizer's step: all that it does to a parameter must be elementwise.

No trial of values can show that an optimizer is elementwise: its lr may be 0 at first, or it may
begin after a thousand steps to divide by a norm. So a step runs under two of torch's modes, which
see what it does. Each tensor that comes from a parameter (its gradient, its state, results of them)
has that parameter's label, and this is refused, before it is done:

- an operator on labelled tensors that is not elementwise (sums, norms, products, indexing, reading
  values on the host), or is not torch's own
- one on tensors of two parameters, of two sizes, or of unknown origin
- reading a labelled tensor's shape or memory: pieces have other shapes, and memory can be changed
  past torch's operators
- random numbers

Limits: kernels that take tensors past torch's operators show only in a tensor that changes without
one (watching(guarded)). Random numbers of Python and NumPy are not seen. An operator costs some
microseconds more. An optimizer that is elementwise and reads a shape is refused too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# The number of the parameter that a tensor comes from is its attribute.
_LABEL, _FREE = "_fastpar_label", -1  # -1: it comes from no parameter
_FUSED = ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
# Elementwise without torch's tag.
_ALIKE = {"detach", "alias", "copy", "_to_copy", "fill", "zero", "view", "_unsafe_view"}
_ALIKE |= {"zeros_like", "ones_like", "empty_like", "full_like", "unsqueeze", "squeeze"}
# What shows shape or memory of a tensor to Python.
_SHOWS = {"shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "stride", "nbytes"}
_SHOWS |= {"__len__", "storage_offset", "data_ptr", "storage", "untyped_storage", "_typed_storage"}
_SHOWS |= {"numpy", "tolist", "tensor", "__array__", "__dlpack__", "__cuda_array_interface__"}
_SHOWS |= {"__reduce_ex__", "__deepcopy__"}


class NotElementwise(Exception):  # noqa: N818 - a verdict, not a failure
    """Why a step is refused."""


class Watch:
    """Sees all work on labelled tensors and refuses what is not elementwise.

    Args:
        elementwise: False: only random numbers are refused.
    """

    def __init__(self, *, elementwise: bool) -> None:
        self.elementwise = elementwise
        self._sizes: dict[int, int] = {_FREE: 1}  # elements of the tensors with each label
        self._why: NotElementwise | None = None
        self._guarded: Tensor | None = None
        self._seen: Tensor | None = None  # the guarded one after the last operator

    def label(self, i: int, x: Tensor, state: dict[str, Any], alike: Container[str]) -> None:
        """Label a parameter, its gradient and its state, of which these entries are like it."""
        self._sizes[i] = x.numel()
        for tensor in (x, x.grad):
            if tensor is not None:
                setattr(tensor, _LABEL, i)
        for name, value in state.items():
            if isinstance(value, Tensor) and not hasattr(value, _LABEL):
                setattr(value, _LABEL, i if name in alike else _FREE)

    @contextlib.contextmanager
    def watching(self, guarded: Tensor | None = None) -> Iterator[None]:
        """Raise NotElementwise for work inside.

        Args:
            guarded: refuse also what changes this tensor past torch's operators.
        """
        self._why, self._guarded = None, guarded if self.elementwise else None
        self._look()
        with _Reads(self) if self.elementwise else contextlib.nullcontext(), _Operators(self):
            yield
        self._compare()
        if self._why is not None:  # it was caught inside
            raise self._why

    def _look(self) -> None:
        if self._guarded is not None:
            self._seen = self._guarded.detach().clone()

    def _compare(self) -> None:
        if self._guarded is not None and self._seen is not None:
            now, then = (x.detach().view(torch.uint8) for x in (self._guarded, self._seen))
            if not torch.equal(now, then):
                self._refuse("it changes parameters past torch's operators")

    def _refuse(self, why: str) -> NoReturn:
        self._why = NotElementwise(why)
        raise self._why

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator if it is elementwise."""
        kind = _kind(op)
        if op is torch.ops.aten.index_put_.default and [x.dtype for x in args[1]] == [torch.bool]:
            kind = "elementwise"  # x[mask] = number
        if kind == "random":
            self._refuse(f"its step draws random numbers ({op}), which ranks do not share")
        if not self.elementwise:
            return op(*args, **kwargs)
        self._compare()
        given = [*args, *kwargs.values()] if kind != "new" else []
        if kind == "lists":
            labels = [self._label_of(lane, op, kind) for lane in _lanes(given)]
            out = op(*args, **kwargs)
            for label, made in zip(labels, out or ()):
                self._set(label, made, op)
        else:
            label = self._label_of(_flat(given), op, kind)
            out = op(*args, **kwargs)
            for made in _flat([out]):
                self._set(label, made, op)
        self._look()
        return out

    def _label_of(self, tensors: Iterable[Tensor], op: Any, kind: str) -> int:
        """The label that tensors have together."""
        found, mixed = _FREE, False
        for x in tensors:
            size, label = x.numel(), getattr(x, _LABEL, None)
            if label is None and size > 1:
                self._refuse(f"its step calls {op} on a tensor that is not in its state")
            label = _FREE if label is None else label
            if label not in (_FREE, found):
                if found != _FREE:
                    self._refuse(f"its step calls {op} on two parameters together")
                found = label
            mixed = mixed or size != self._sizes[label]
        if found == _FREE:
            return _FREE
        if kind == "other":
            self._refuse(f"its step calls {op}")
        if mixed:
            self._refuse(f"its step calls {op} on tensors of two sizes")
        return found

    def _set(self, label: int, made: Tensor, op: Any) -> None:
        if label != _FREE and made.numel() != self._sizes[label]:
            self._refuse(f"its step calls {op}, which makes a tensor of another size")
        setattr(made, _LABEL, label)

    def read(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch if it does not show the shape or memory of a piece."""
        name = function.__name__
        attribute = function.__self__.__name__ if name in ("__get__", "__set__") else name
        if attribute not in _SHOWS and attribute != "data":
            return function(*args, **kwargs)
        label = getattr(args[0], _LABEL, _FREE) if args else _FREE
        if attribute == "data" and name == "__set__":
            if getattr(args[1], _LABEL, None) != label:
                self._refuse("its step sets Tensor.data to that of another parameter")
        elif attribute != "data" and label != _FREE:
            self._refuse(f"its step reads Tensor.{attribute} of a parameter")
        out = function(*args, **kwargs)
        if attribute == "data" and name == "__get__":
            setattr(out, _LABEL, label)
        elif attribute == "data":
            self._seen = None
            self._look()
        return out


class _Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler for this class, and enter it in each call."""
        return False

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.run(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.read(func, args, kwargs or {})


@functools.cache
def _kind(op: Any) -> str:
    """random, elementwise, lists (elementwise at each position of lists), new or other."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "random"
    package, _, name = op._schema.name.partition("::")
    lists = name.startswith("_foreach_")
    stem = name.removeprefix("_foreach_").rstrip("_")
    if package != "aten":
        return "other"
    if stem in ("lift_fresh", *_FUSED):
        return "new" if stem == "lift_fresh" else "lists"
    pointwise = torch.Tag.pointwise in op.tags
    if lists or name.endswith("_"):  # torch tags only some of these
        packet = getattr(torch.ops.aten, stem, None) if stem not in ("max", "min") else None
        overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
        pointwise = any(torch.Tag.pointwise in overload.tags for overload in overloads)
    if torch.Tag.data_dependent_output in op.tags or not (pointwise or stem in _ALIKE):
        return "other"
    return "lists" if lists else "elementwise"


def _flat(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (x for x in value if isinstance(x, Tensor))


def _lanes(values: Iterable[Any]) -> Iterator[list[Tensor]]:
    """The tensors at each position of lists, with those outside of lists."""
    values = list(values)
    alone = [x for x in values if isinstance(x, Tensor)]
    lists = [x for x in values if isinstance(x, (list, tuple)) and next(_flat(x), None) is not None]
    for lane in zip(*lists, strict=True):
        yield [x for x in (*lane, *alone) if isinstance(x, Tensor)]
