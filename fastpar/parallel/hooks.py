"""What hangs on modules and parameters: links and hooks whose copies and pickles are empty.

A model can be copied and saved with its hooks on it; the copy has no engine.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Link(Generic[T]):
    """From a parameter to what works for it."""

    def __init__(self, target: T | None = None) -> None:
        self.target = target

    def __deepcopy__(self, memo: dict) -> Link[T]:
        return Link()

    def __reduce__(self) -> tuple:
        return (Link, ())


class Hook:
    """Calls owner's method; owner is a weak reference, so that nobody is kept alive by a hook.

    torch.compile does not look inside (test_compiled_models_match_one_process): where dynamo is
    loaded the call is disabled for it. It is not imported for that, which takes a second.
    """

    _torchdynamo_disable = True

    def __init__(self, owner: Any = None, method: str = "", *args: Any) -> None:
        self._owner, self._method, self._args = owner, method, args
        self._disabled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            if self._disabled is None:
                self._disabled = torch.compiler.disable(self._call)
            return self._disabled(*args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        return None if owner is None else getattr(owner, self._method)(*self._args, *args, **kwargs)

    def is_of(self, owner: Any) -> bool:
        """Whether it calls a method of owner."""
        return self._owner is not None and self._owner() is owner

    def __deepcopy__(self, memo: dict) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple:
        return (Hook, ())


def inside_backward_of_a_function() -> bool:
    """Whether this code runs in a backward that an autograd.Function's backward has started."""
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
