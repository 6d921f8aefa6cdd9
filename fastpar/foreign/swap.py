"""How a module of a foreign model is swapped, and when and how its calls fall back.

[Note: how a module is swapped] The instance gets another class: a subclass of its own class and of
a mixin (fused.py), with the same name. Parameters, hooks, state_dict keys, isinstance and code that
relies on class names (transformers' save_pretrained, FSDP's wrapping) see no difference. Such a
class cannot be imported by name, so an instance is pickled and copied as its mixin and its original
class.

[Note: falling back] A call with anything that the kernels do not support runs the module's own
forward as a whole. It warns once per reason and model, and is counted in the report. Under
torch.compile it warns when it is traced and is not counted.

"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

MODULE_FIELDS = frozenset({*vars(nn.Module()), "training", "_fastpar_swap"})
SILENT = ""  # a reason to fall back that is not reported


def replaced_in(module: nn.Module) -> str | None:
    """The name of a method that was replaced on this instance."""
    kind = type(module)
    return next((k for k, v in vars(module).items() if callable(v) and hasattr(kind, k)), None)


@dataclass
class Swap:
    """What a module gets and remembers: a mixin, its options, its original class."""

    mixin: Any
    options: dict[str, Any] = field(default_factory=dict)  # of the mixin
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

    def refusal(self, inputs: dict[str, Any]) -> str | None:
        """Why a call with these arguments falls back (SILENT: not reported); None: it does not."""
        if inputs.keys() != {self.argument_names[0]}:
            return "arguments besides x"
        return self.changed()

    def fused_forward(self, inputs: dict[str, Any]) -> Any:
        """The result of forward, computed by kernels."""
        raise NotImplementedError

    def forward(self, *args, **kwargs):
        inputs = {**dict(zip(self.argument_names, args)), **kwargs}
        reason = self.refusal(inputs) if len(args) <= len(self.argument_names) else SILENT
        if reason is None:
            return self.fused_forward(inputs)
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

    def changed(self) -> str | None:
        """What has changed since the module was patched."""
        swap = swap_of(self)
        if swap is None:
            return "the module itself was not patched"
        if type(self).own_forward[0] is not swap.original.forward:
            return "its class's forward was replaced"
        return None

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
