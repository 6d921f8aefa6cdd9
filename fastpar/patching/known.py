"""Whether the code of a class is its library's own: what patching.py takes for known.

transformers' classes are known by their names only as long as nobody put another function in the
place of one of theirs: a forward, a function that a forward calls, an entry of the registry of
attention functions. A function is a library's own when its code, and that of every wrapper around
it, stands in one of the library's files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fastpar.patching import layers as patched
from fastpar.patching.layers import swap_of

GPT2 = "transformers.models.gpt2.modeling_gpt2"
TORCH = os.path.dirname(torch.__file__)


def is_own(function: Any, *roots: str) -> bool:
    """Whether the function and all that it wraps stand in files below one of the folders."""
    while isinstance(function, FunctionType):
        if not function.__code__.co_filename.startswith(tuple(root + os.sep for root in roots)):
            return False
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def torch_forward(kind: type[nn.Module]) -> str | None:
    """The name of one of torch's classes whose forward is not torch's any more."""
    return None if is_own(kind.forward, TORCH) else f"{kind.__name__}.forward"


def replaced_in(module: nn.Module) -> str | None:
    """The name of a method that this instance has another one of."""
    kind = type(module)
    return next((k for k, v in vars(module).items() if callable(v) and hasattr(kind, k)), None)


def replaced_code(kind: type[nn.Module]) -> str | None:
    """The name of what was replaced in a class of transformers or in what its methods call."""
    source = sys.modules[kind.__module__]
    root = os.path.dirname(sys.modules["transformers"].__file__ or "")
    methods = {"forward": kind.forward, "__call__": kind.__call__}
    for base in reversed(kind.__mro__):
        if base.__module__ == kind.__module__:
            methods |= {k: v for k, v in vars(base).items() if isinstance(v, FunctionType)}
    for name, method in methods.items():
        # Around a forward, torch's wrappers (no_grad) would be someone else's doing.
        if not (is_own(method, root) or (name != "forward" and is_own(method, root, TORCH))):
            return f"{kind.__name__}.{name}"
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        for used in method.__code__.co_names:
            value = vars(source).get(used)
            if isinstance(value, FunctionType) and not is_own(value, root):
                return used
            if isinstance(value, type) and issubclass(value, nn.Module):
                at = TORCH if value.__module__.startswith("torch.") else root
                if not is_own(value.forward, at):
                    return f"{used}.forward"
    for part in (nn.Dropout, nn.LayerNorm, nn.Linear):
        if torch_forward(part) is not None:
            return torch_forward(part)
    registry = getattr(source, "ALL_ATTENTION_FUNCTIONS", None)
    if registry is not None and not is_own(registry["sdpa"], root):
        return "the attention function registered for sdpa"
    return None


def seen_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and its parts, those proven already without theirs: stand-ins take their place."""
    closed: tuple[str, ...] = ()
    for name, part in module.named_modules():
        if name.startswith(closed):
            continue
        yield name, part
        if part is not module and isinstance(part, patched.Attention | patched.MLP):
            closed += (f"{name}.",)


def look_of(module: nn.Module) -> Any:
    """Equal for modules that differ in the values of their tensors only."""
    look: list[Any] = []
    for name, part in seen_parts(module):
        look += [name, type(part), swap_of(part) is None, tuple(part._modules)]
        if part is not module and isinstance(part, patched.Attention | patched.MLP):
            continue
        skipped = {"_fastpar_swap"}
        by_layer = getattr(part, "scale_attn_by_inverse_layer_idx", False)
        if type(part).__module__ == GPT2 and not by_layer:
            skipped.add("layer_idx")  # its place in a cache
        for key, value in vars(part).items():
            if key not in patched.MODULE_FIELDS and key not in skipped:
                known = isinstance(value, int | float | str | tuple | None)
                look += [key, repr(value) if known else id(value)]
        tensors = [*part._parameters.items(), *part._buffers.items()]
        look += [(k, t.shape, t.dtype, t.is_meta) for k, t in tensors if t is not None]
    return tuple(look)
