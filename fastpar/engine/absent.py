"""Placeholders for parameters and gradients that this rank holds only a shard of.

[Note: absent tensors]
A placeholder refuses writes, which would be lost, and copies and files, which would hold nan. A
gradient's reads as nan. Arithmetic with a parameter's is refused, as an average of weights would
become nan without a word; its properties, views, and conversions for module.to() are placeholders
again. A parameter is made absent by changing its class, which costs nothing while it is whole. If a
pass uses an absent parameter, it is gathered.

Clipping by torch and GradScaler.unscale_ work on sharded gradients: a norm of a placeholder is that
of the whole gradient, and elementwise changes by numbers reach this rank's shard. Not with tp or a
pipeline, where no group of ranks has a whole gradient, nor if gradients lie on the host.

A parameter that was added to the model or unfrozen after parallelize() has no engine, so each rank
would train its own. The engine notices it when it reduces gradients. If all others are frozen there
is nothing to reduce, and the check before an optimizer's step notices it.

Links and hooks are empty in copies and pickles: a model can be copied and saved with them, and the
copy has no engine.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.utils._pytree import tree_map

from fastpar.axes import engine_of_parameter

T = TypeVar("T")


class NotCopied:
    """Copies and pickles as a new object made without arguments, which does nothing."""

    def __deepcopy__(self, memo: dict) -> NotCopied:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()


class Link(NotCopied, Generic[T]):
    """A reference from a parameter to its engine."""

    def __init__(self, target: T | None = None) -> None:
        self.target = target


class Hook(NotCopied):
    """Calls function(owner, *args, ...), unless owner.paused; owner is a weak reference.

    torch.compile neither traces a hook nor compiles what it calls: it would compile them once for
    each unit, and give up after eight (test_nothing_is_compiled_after_the_second_block).
    """

    _torchdynamo_disable = True

    def __init__(self, owner: Any = None, function: Any = None, *args: Any) -> None:
        self._owner, self._function, self._args = owner, function, args

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        if owner is None or getattr(owner, "paused", False):
            return None
        return self._function(owner, *self._args, *args, **kwargs)

    def is_of(self, owner: Any) -> bool:
        """Whether it calls a method of owner."""
        return self._owner is not None and self._owner() is owner


# Like torch.compiler.disable(), which would import dynamo and take a second.
eval_frame.set_code_exec_strategy(
    Hook.__call__.__code__,
    eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP),
)


_HARMLESS = {"requires_grad_", "share_memory_"}
_WRITERS = {
    name
    for name in dir(Tensor)
    if (name.endswith("_") and not name.startswith("_") and name not in _HARMLESS)
    or (name.startswith("__i") and name[3:].strip("_") in {
        "add", "and", "div", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub",
        "truediv", "xor",
    })
} | {"__setitem__"}  # fmt: skip
_COPIES = {"__deepcopy__": "copy.deepcopy", "__reduce_ex__": "pickle"}


def _refuse(what: str, name: str, action: str) -> NoReturn:
    if action == "data":
        raise RuntimeError(
            f"parallelize: p.data of parameter '{name}' was replaced, but its memory is part of a "
            "bucket; call module.to() before fastpar.parallelize, and write values inside "
            "`with fastpar.engine_of(model).gathered():`"
        )
    if what == "gradient":
        raise RuntimeError(
            f"p.grad.{action}: the gradient of '{name}' is not in p.grad but reduced into a shard, "
            "or not reduced yet; clip with fastpar.AdamW(max_grad_norm=...), scale the loss, and "
            "read whole gradients with fastpar.engine_of(model).grads()"
        )
    raise RuntimeError(
        f"{_COPIES.get(action, f'p.{action}')}: this rank holds only a shard of parameter "
        f"'{name}'; read, write, copy and save parameters inside "
        "`with fastpar.engine_of(model).gathered():`, on all ranks"
    )


class Absent(Tensor):
    """Nans in place of a gradient or of an absent parameter's data: [Note: absent tensors].

    Attributes:
        zeroed: zero_() was called on it.
    """

    _what = "parameter"
    _name = ""
    _ranks = (0, 1)
    _of: Any = None  # a gradient's parameter, a weak reference
    zeroed = False

    @staticmethod
    def of(nans: Tensor, what: str, name: str, ranks: tuple[int, int]) -> Absent:
        """Make nans a placeholder of the parameter or gradient with this name.

        ranks: this rank's number among the ranks that hold its shards, and how many they are.
        """
        made: Absent = torch.Tensor._make_subclass(Absent, nans)
        made._what, made._name, made._ranks = what, name, ranks
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return _shown(self._what, self.shape, self._ranks)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        zeroes = name in ("zero_", "_foreach_zero_")
        listed = name.startswith(("_foreach_", "_amp_foreach_")) and name.endswith("_")
        if (found := _on_gradients(func, args, kwargs)) is not None:
            return found[0]
        touched = [args[0] if args else kwargs.get("self")] if name in _WRITERS or listed else []
        if name in _COPIES:
            touched = [args[0]]
        for x in _absent((touched, kwargs.get("out"))):
            if not (zeroes and x._what == "gradient"):
                _refuse(x._what, x._name, name)
            x.zeroed = True
        first = args[0] if args else None
        reads = _reads_values(func)
        if reads:
            others = args[1:] if isinstance(first, Absent) else args
            for x in _absent([] if name in _LIKE else [others, *kwargs.values()]):
                if x._what == "parameter":
                    _refuse(x._what, x._name, name)
        with torch._C.DisableTorchFunctionSubclass():
            if zeroes:  # there is no memory to write
                rest = [x for x in _tensors(touched) if not isinstance(x, Absent)]
                if rest:
                    torch._foreach_zero_(rest)
                return args[0] if name == "zero_" else None
            out = func(*args, **kwargs)
        if isinstance(first, Absent):
            is_parameter = first._what == "parameter"
            made = tuple(_tensors(out))
            views = made and all(_share(first, x) for x in made)
            if views or (is_parameter and name in _CONVERSIONS):
                kept = [Absent.of(x, first._what, first._name, first._ranks) for x in made]
                return kept[0] if isinstance(out, Tensor) else type(out)(kept)
            if reads and is_parameter:
                _refuse(first._what, first._name, name)
        return out


def _shown(what: str, shape: torch.Size, ranks: tuple[int, int]) -> str:
    """The text of repr(): the values are nan, so it says what they stand for and where to look."""
    noun, reads = ("shard", "gathered") if what == "parameter" else ("gradient shard", "grads")
    rank, n = ranks
    part = (
        f"{noun} of {[*shape]}, rank {rank} of {n}"
        if n > 1
        else f"{what} of {[*shape]}, kept elsewhere"
    )
    return f"{part}; engine_of(model).{reads}() shows it"


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)


def _share(x: Tensor, y: Any) -> bool:
    return type(y) is Tensor and y.untyped_storage()._cdata == x.untyped_storage()._cdata


def _absent(tree: Any) -> Iterator[Absent]:
    return (x for x in _tensors(tree) if isinstance(x, Absent))


def engines_of(params: Iterable[Tensor]) -> list[Any]:
    """engine_of_parameter() each of them."""
    links = [getattr(p, "_fastpar_engine", None) for p in params]
    return [None if link is None else link.target for link in links]


# What clip_grad_norm_, clip_grad_value_ and GradScaler do with gradients: [Note: absent tensors]

_OF_EACH = {"clamp_", "clamp_max_", "clamp_min_", "div_", "mul_", "nan_to_num_"}


def _on_gradients(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of a call that reduced gradients support, in a list of one; None: another call.

    Elementwise functions with numbers act on this rank's shards.
    """
    name = getattr(func, "__name__", "")
    one = name.removeprefix("_foreach_")
    reads = name in ("linalg_vector_norm", "_foreach_norm")
    unscales = name == "_amp_foreach_non_finite_check_and_unscale_"
    if not (reads or unscales or one in _OF_EACH) or not args:
        return None
    grads: list[Any] = list(_tensors([args[0]]))
    rest = [*args[1:], *kwargs.values()]
    if not grads or not all(isinstance(x, Absent) and x._of for x in grads):
        return None
    if any(isinstance(x, list | tuple) or (isinstance(x, Tensor) and x.numel() > 1) for x in rest):
        return None
    params = [x._of() for x in grads]
    engines = {id(engine): engine for engine in engines_of(params)}
    engine = next(iter(engines.values()))
    if len(engines) > 1 or not engine.has_whole_norms():
        return None
    if not reads:
        engine.shards.change_grads(func, params, args[0], *args[1:], **kwargs)
        return [None if unscales else args[0]]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if len(args) > 2 or set(kwargs) - {"ord", "dtype"}:
        return None
    norms = engine.shards.grad_norms(params, order)
    norms = [x.to(kwargs.get("dtype") or grad.dtype) for x, grad in zip(norms, grads)]
    return [norms if name == "_foreach_norm" else norms[0]]


def _name_of(p: Tensor) -> str:
    engine = engine_of_parameter(p)
    return "?" if engine is None else engine.shards.name_of(p)


def _ranks_of(p: Tensor) -> tuple[int, int]:
    engine = engine_of_parameter(p)
    if engine is None:
        return 0, 1
    bucket = engine.shards.bucket_of(p)
    return bucket.rank, bucket.spec.n_shards


_data: Any = nn.Parameter.data  # the descriptor that AbsentParameter hides


class AbsentParameter(nn.Parameter):
    """A parameter that is not whole on this rank; see [Note: absent tensors]."""

    @property
    def data(self) -> Tensor:
        if _gather(self):
            return _data.__get__(self)
        return Absent.of(_data.__get__(self), "parameter", _name_of(self), _ranks_of(self))

    @data.setter
    def data(self, new: Tensor) -> None:
        old = _data.__get__(self)
        same = (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
        if not same or new.data_ptr() != old.data_ptr():  # module.to() without effect is allowed
            _refuse("parameter", _name_of(self), "data")

    def detach(self) -> Tensor:
        """Like torch's; the result is absent too."""
        return self.data

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{_shown('parameter', self.shape, _ranks_of(self))}"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, outside, used = kwargs or {}, [], []
        name = getattr(func, "__name__", "")
        if name in _OF_MEMORY:
            _gather(args[0])
        elif _reads_values(func):
            read = [args[:1]] if name in _LIKE else [args, *kwargs.values()]
            used = [x for x in _tensors(read) if type(x) is AbsentParameter]
            outside = [p for p in used if not _gather(p)]
        if outside:
            p = outside[0]
            if torch.is_grad_enabled() and p.requires_grad and name not in _WRITERS:
                raise RuntimeError(
                    f"{name}: parameter '{_name_of(p)}' is used outside of the model's forward, "
                    "where this rank holds only a shard of it; use it in the forward, or inside "
                    "`with fastpar.engine_of(model).gathered():`, on all ranks"
                )
            if not args or p is not args[0]:
                _refuse("parameter", _name_of(p), name)
            return func(p.data, *args[1:], **kwargs)  # a view is a placeholder, too
        if used:
            args, kwargs = tree_map(_weight, (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _gather(p: AbsentParameter) -> bool:
    """Gather p if a pass runs; returns whether one does."""
    gathers = getattr(engine_of_parameter(p), "gathers", None)
    return gathers is not None and gathers.use(p)


def _weight(x: Any) -> Any:
    """What a forward computes with in place of a parameter that was gathered; see bucket.py."""
    if not isinstance(x, nn.Parameter) or (engine := engine_of_parameter(x)) is None:
        return x
    bucket, position = engine.shards.places.get(x, (None, 0))
    return x if bucket is None else bucket.weight(position)


# Functions that read a parameter's properties, not its values.
_ABOUT = {
    "__format__", "__hash__", "__len__", "__repr__", "_has_compatible_shallow_copy_type",
    "_is_view", "_typed_storage", "data_ptr", "dim", "dim_order", "element_size", "get_device",
    "is_contiguous", "is_complex", "is_floating_point", "is_pinned", "is_same_size", "is_set_to",
    "is_shared", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "result_type", "retain_grad", "size",
    "storage", "storage_offset", "stride", "type", "untyped_storage",
}  # fmt: skip
_OF_MEMORY = {"data_ptr", "is_contiguous", "storage", "stride", "untyped_storage"}
_LIKE = {"expand_as", "reshape_as", "to", "type_as", "view_as"}  # read only its form
_CONVERSIONS = {"bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type"}


@functools.cache
def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ in ("H", "T", "imag", "mH", "mT", "real")  # type: ignore[attr-defined]
    no_value = name in ("__set__", "__delete__") or name.startswith("new_")
    return not (no_value or name in _ABOUT or name.endswith("_like"))


def _refusing(action: str) -> Callable[..., NoReturn]:
    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("parameter", _name_of(self), action)

    return refuse


for _action in (*_WRITERS, *_COPIES):
    setattr(AbsentParameter, _action, _refusing(_action))


class Marks:
    """Remembers what p.grad was at the end of a backward, to notice changes until the next.

    p.grad = None (zero_grad of any module) is then understood. Where the gradient is not in p.grad
    (stages >= 1, main gradients, micro-batches that wait for the tree), p.grad is a placeholder of
    nans, so code that reads it (clip_grad_norm_) sees that. Once shards are reduced every parameter
    has one, as no rank knows which parameters others have used.

    Args:
        name: of the parameter at a position.
        ranks: see Absent.of().
    Attributes:
        hidden: whether p.grad are placeholders.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], name: Callable[[int], str], ranks: tuple[int, int]
    ) -> None:
        self._params, self._name, self._ranks, self.hidden = params, name, ranks, False
        self._marks: dict[int, Tensor] = {}
        self._placeholders: dict[int, Absent] = {}

    def __contains__(self, position: int) -> bool:
        return position in self._marks

    def put(self, positions: Iterable[int], *, hidden: bool) -> None:
        """Remember p.grad after a backward; hidden: put placeholders into p.grad."""
        self.hidden = hidden
        params, known = self._params, self._placeholders
        if not hidden:
            grads = {position: params[position].grad for position in positions}
            self._marks = {i: grad for i, grad in grads.items() if grad is not None}
            return
        for position in set(positions).difference(known):
            p = params[position]
            nan = torch.full((), float("nan"), dtype=p.dtype, device=p.device)
            name = self._name(position)
            known[position] = Absent.of(nan.expand(p.shape), "gradient", name, self._ranks)
            known[position]._of = weakref.ref(p)
        self._marks = {position: known[position] for position in positions}
        with torch._C.DisableTorchFunctionSubclass():
            for position, mark in self._marks.items():
                params[position].grad = mark
                mark.zeroed = False  # type: ignore[attr-defined]

    def lift(self) -> None:
        """Remove placeholders before a backward, in which autograd must find none."""
        with torch._C.DisableTorchFunctionSubclass():
            for position in self._marks if self.hidden else ():
                self._params[position].grad = None
        self._marks.clear()

    def drop(self, positions: Iterable[int]) -> None:
        """Forget these, which have no gradient any more."""
        for position in positions:
            self._marks.pop(position, None)

    def look(self, fired: Tensor | None) -> tuple[set[int], list[int]]:
        """Positions whose p.grad was set to None, and those whose placeholder was zeroed.

        Args:
            fired: a parameter that already has its next gradient from autograd.
        """
        cleared: set[int] = set()
        zeroed: list[int] = []
        with torch._C.DisableTorchFunctionSubclass():
            grads = [self._params[position].grad for position in self._marks]
        if all(map(operator.is_, grads, self._marks.values())) and not self.hidden:
            return cleared, zeroed
        for (position, mark), grad in zip(self._marks.items(), grads):
            if grad is None or (self._params[position] is fired and grad is not mark):
                cleared.add(position)
            elif grad is not mark:
                self.refuse(position)
            elif isinstance(mark, Absent) and mark.zeroed:
                mark.zeroed = False
                zeroed.append(position)
        return cleared, zeroed

    def refuse(self, position: int) -> NoReturn:
        """Raise: p.grad was replaced."""
        raise RuntimeError(
            f"Engine: p.grad of '{self._name(position)}' was replaced by another tensor; set it to "
            "None or change it in place (where it reads as nan, clip with "
            "fastpar.AdamW(max_grad_norm=...) or scale the loss)"
        )


# A guard against wrappers that do not know the engine


class _RefuseDDP:
    """Raises when DistributedDataParallel reads it, which it does first."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            "DistributedDataParallel: the model went through fastpar.parallelize, which averages "
            "gradients itself; do not wrap it"
        )


def refuse_ddp(model: nn.Module) -> None:
    """Make wrapping this model in DistributedDataParallel raise."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _RefuseDDP()
