"""How a module of a foreign model is swapped, and when and how its calls fall back.

[Note: how a module is swapped] The instance gets another class: a subclass of its own class and of
a mixin (fused.py), with the same name. Parameters, hooks, state_dict keys, isinstance and code that
relies on class names (transformers' save_pretrained, FSDP's wrapping) see no difference. Such a
class cannot be imported by name, so an instance is pickled and copied as its mixin and its original
class.

[Note: falling back] A call with anything that the kernels do not support runs the module's own
forward as a whole. It warns once per reason and model, and is counted in the report. Under
torch.compile it warns when it is traced and is not counted.

[Note: conditions] A module proved what it computes (proof.py) with the numbers, flags and buffers
that it had then. Every call checks them: after a change the calls fall back. A buffer's values are
compared when it is a different tensor or was written to; not under torch.compile.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastpar.nn.tp_layers import TokenDropout

MODULE_FIELDS = frozenset({*vars(nn.Module()), "training", "_fastpar_swap"})
_COMPARABLE = (bool, int, float, str, tuple, list, type(None), torch.dtype)
_GONE = object()
SILENT = ""  # a reason to fall back that is not reported


def settings_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that can be compared later: no tensors, modules or methods."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, _COMPARABLE)
        and not name.startswith("__")
        and name not in MODULE_FIELDS
    }


def settings_of(module: nn.Module) -> dict[str, Any]:
    """A module's own settings, including those of its class."""
    found: dict[str, Any] = {}
    for base in reversed(type(module).__mro__):
        if base is not object and not base.__module__.startswith(("torch.", "fastpar.")):
            found |= settings_in(vars(base))
    return found | settings_in(vars(module))


def replaced_in(module: nn.Module) -> str | None:
    """The name of a method that was replaced on this instance."""
    kind = type(module)
    return next((k for k, v in vars(module).items() if callable(v) and hasattr(kind, k)), None)


@dataclass
class Conditions:
    """The state in which a module proved what it computes; see [Note: conditions]."""

    # Of the module ("") and of parts: values by name, those of a config by path.
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    parts: dict[str, type] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    tokens: int | None = None  # the most that were compared

    def __post_init__(self) -> None:
        # attrgetter gets at least two names, so that it returns a tuple.
        self._read = {
            part: operator.attrgetter("__class__", *values)
            for part, values in self.settings.items()
            if values
        }
        # Last checked state: values of a part's settings; a buffer and its version.
        self._same: dict[str, tuple[Any, ...]] = {}
        self._seen: dict[str, tuple[Any, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_same": {}, "_seen": {}}

    def violation(self, module: nn.Module, x: Any) -> str | None:
        """The first condition that no longer holds."""
        if self.tokens is not None and isinstance(x, Tensor):
            shape = x.shape
            if len(shape) == 3 and shape[1] > self.tokens:
                return f"more than {self.tokens} tokens, the most that were compared"
        parts = module._modules
        for name, kind in self.parts.items():
            now = type(parts.get(name))
            if now is not kind and (now, kind) != (TokenDropout, nn.Dropout):
                return f"{name} was replaced"
        changed = self._changed_setting(module) if self._read else None
        if changed is None and self.buffers and not torch.compiler.is_compiling():
            changed = self._changed_buffer(module)
        return None if changed is None else f"{changed} has changed"

    def _changed_setting(self, module: nn.Module) -> str | None:
        compiling = torch.compiler.is_compiling()
        for part, read in self._read.items():
            holder = module._modules.get(part) if part else module  # getattr() is slow for parts
            try:
                now = _values(holder, self.settings[part]) if compiling else read(holder)
            except AttributeError:
                now = _values(holder, self.settings[part])
            if not compiling and all(map(operator.is_, now, self._same.get(part, (None,)))):
                continue
            for (name, value), found in zip(self.settings[part].items(), now[1:]):
                if found is not value and (type(found) is not type(value) or found != value):
                    return f"{part}.{name}" if part else name
            if not compiling:
                self._same[part] = now
        return None

    def _changed_buffer(self, module: nn.Module) -> str | None:
        for name, value in self.buffers.items():
            now = getattr(module, name, None)
            version = 0 if now is None or now.is_inference() else now._version
            seen = self._seen.get(name)
            if seen is None or seen[0]() is not now or seen[1] != version:
                if now is None or now.shape != value.shape:
                    return name
                if not torch.equal(now.detach().to("cpu", value.dtype), value):
                    return name
                self._seen[name] = weakref.ref(now), version
        return None


def _values(holder: Any, paths: Iterable[str]) -> tuple[Any, ...]:
    """Like attrgetter, but traceable by torch.compile and tolerant of missing names."""
    found = [type(holder)]
    for path in paths:
        value = holder
        for name in path.split("."):
            value = getattr(value, name, _GONE)
        found.append(value)
    return tuple(found)


@dataclass
class Swap:
    """What a module gets and remembers: a mixin, its options and conditions, its original class."""

    mixin: Any
    options: dict[str, Any] = field(default_factory=dict)  # of the mixin
    conditions: Conditions = field(default_factory=Conditions)
    original: Any = None
    fallbacks: Counter[str] = field(default_factory=Counter)  # of the whole model


def swap_of(module: nn.Module) -> Swap | None:
    """The Swap of a swapped module."""
    return vars(module).get("_fastpar_swap")


def swap_in(module: nn.Module, swap: Swap) -> None:
    """Gives a module the class of the swap."""
    vars(module)["_fastpar_swap"] = swap
    module.__class__ = swapped_class(swap.mixin, swap.original)


def restore(module: nn.Module) -> bool:
    """Restores the original class of a swapped module; returns whether it was swapped."""
    swap = vars(module).pop("_fastpar_swap", None)
    if swap is not None:
        module.__class__ = swap.original
    return swap is not None


def _announce(name: str, reason: str) -> None:
    warnings.warn(
        f"fastpar.patch: {name} falls back to its own forward for this call: {reason}", stacklevel=4
    )


# torch.compile calls it while tracing; torch.compiler.assume_constant_result would set the same
# attribute, but imports the compiler.
_announce._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Swapped(nn.Module):
    """Base of the mixins; see [Note: how a module is swapped].

    A mixin's attributes hide the module's parts: avoid names that a model may use.
    """

    argument_names: tuple[str, ...] = ()  # of the original forward's positional arguments
    own_forward: tuple[Any, ...] = ()  # the original's
    registered: tuple[Any, Any] = (None, None)  # see swapped_class
    added_arguments: tuple[str, ...] = ()  # arguments that the original's forward does not have
    does = ""  # for the report: what is faster
    falls_back: tuple[str, ...] = ()  # for the report: when calls fall back

    if TYPE_CHECKING:  # the original's attributes

        def __getattr__(self, name: str) -> Any: ...

    def refusal(self, given: dict[str, Any]) -> str | None:
        """Why a call with these arguments falls back (SILENT: not reported); None: it does not."""
        if given.keys() != {self.argument_names[0]}:
            return "arguments besides x"
        return self.changed(given[self.argument_names[0]])

    def fused_forward(self, given: dict[str, Any]) -> Any:
        """The result of forward, computed by kernels."""
        raise NotImplementedError

    def forward(self, *args, **kwargs):
        given = {**dict(zip(self.argument_names, args)), **kwargs}
        reason = self.refusal(given) if len(args) <= len(self.argument_names) else SILENT
        if reason is None:
            return self.fused_forward(given)
        if reason != SILENT:
            self.fall_back(reason)
        for name in self.added_arguments:
            kwargs.pop(name, None)
        return super().forward(*args, **kwargs)

    def fall_back(self, reason: str) -> None:
        """Warns and counts; see [Note: falling back]."""
        name, swap = type(self).__name__, swap_of(self)
        if torch.compiler.is_compiling():
            _announce(name, reason)
        elif swap is not None:  # None: another instance of a swapped class
            key = f"{name}: {reason}"
            if key not in swap.fallbacks:
                _announce(name, reason)
            swap.fallbacks[key] += 1

    def option(self, name: str) -> Any:
        return vars(self)["_fastpar_swap"].options[name]

    def changed(self, x: Any = None) -> str | None:
        """What has changed since the module was patched; see [Note: conditions]."""
        swap = swap_of(self)
        if swap is None:
            return "the module itself was not patched"
        if type(self).own_forward[0] is not swap.original.forward:
            return "its class's forward was replaced"
        return swap.conditions.violation(self, x)

    def __reduce_ex__(self, protocol: Any) -> Any:
        swap = swap_of(self)
        if swap is None or type(self) is not swapped_class(swap.mixin, swap.original):
            return super().__reduce_ex__(protocol)
        # Python 3.10 has no object.__getstate__.
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _new, (swap.mixin, swap.original), state


def _new(mixin: Any, original: Any) -> nn.Module:
    kind = swapped_class(mixin, original)
    return kind.__new__(kind)


@functools.cache
def swapped_class(mixin: Any, original: Any) -> Any:
    """The class of a swapped module: made from a mixin, or fastpar's replacement of torch's."""
    if not issubclass(mixin, Swapped):
        return mixin
    names = [
        p.name
        for p in inspect.signature(original.forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(original.forward)  # transformers reads its signature
    def forward(self, *args, **kwargs):
        return mixin.forward(self, *args, **kwargs)

    # For GPT2Attention: transformers' registry of attention functions, and its entry for sdpa.
    registry = vars(sys.modules[original.__module__]).get("ALL_ATTENTION_FUNCTIONS")
    sdpa = vars(sys.modules.get("transformers.integrations.sdpa_attention", sys))
    body = {
        "registered": (registry, sdpa.get("sdpa_attention_forward")),
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "argument_names": tuple(names[1:]),
        "own_forward": (original.forward,),
        "forward": forward,
    }
    return type(original)(original.__name__, (mixin, original), body)
