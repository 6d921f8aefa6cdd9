"""Methods of optimizers as torch.compile is to see them: not at all.

[Note: torch.compile]
A compiled training step runs step() and zero_grad() as they are, between its graphs: they are a few
kernel calls already, and to trace their bookkeeping would only add guards. torch's own decorator
for this imports torch._dynamo at the first call, which takes 1.4 s and over 100 MB in processes
that never compile (test_a_step_does_not_import_the_compiler); uncompiled() checks for it first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


def uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, never traced by torch.compile: [Note: torch.compile]."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        compiler = sys.modules.get("torch._dynamo")
        if compiler is None or not hasattr(compiler, "disable"):  # absent, or being imported
            return method(*args, **kwargs)
        return compiler.disable(method)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch without its decorator: see [Note: torch.compile]."""
    return getattr(method, "__wrapped__", method)
