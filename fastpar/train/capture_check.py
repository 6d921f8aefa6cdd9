"""What the capture of a CUDA graph forbids, found by running the region once, on a CPU too.

Some of it makes a capture fail without saying where, some makes every replay repeat what the host
did once, and some corrupts memory later: a tensor that outlives its graph is overwritten by the
next replay. So each operation is looked at, and errors name it and the line that called it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from fastpar.kernels import op

_WAITS = "the host waits for the device"
_READS = "the host reads a value"
_OPS = {  # of aten
    "_local_scalar_dense": _READS,
    "item": _READS,
    "equal": _READS,
    **dict.fromkeys(
        ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
        "the host reads how large the result is",
    ),
    "lift_fresh": "every replay repeats a number of the host",
    "_pin_memory": "memory of the host is pinned",
}
_CALLS = (  # what does not reach the dispatcher, or not on a CPU
    (torch.Tensor, ("tolist", "numpy", "cpu"), _READS),
    (torch.Tensor, ("pin_memory",), _OPS["_pin_memory"]),
    (torch.cuda, ("synchronize",), _WAITS),
    (torch.cuda, ("empty_cache",), "memory goes back to the device"),
    (torch.cuda.Event, ("synchronize", "query", "elapsed_time"), _WAITS),
    (torch.cuda.Event, ("record",), "every replay would record the event again"),
    (torch.cuda.Stream, ("synchronize", "query"), _WAITS),
)
_PASSED = (str(Path(torch.__file__).parent), __file__)  # files that call for others


class CaptureCheck(TorchDispatchMode):
    """A region under it may run inside of the capture of a CUDA graph; else it raises.

    Args:
        static: tensors from outside that it uses, at addresses that stay.
    Raises:
        RuntimeError: the host waits, reads a value, pins memory or gives a number; an operation on
            a tensor that is neither static nor made inside, or on another device; a tensor made
            inside that is alive at the end. Names the operation and the line.
    """

    def __init__(self, static: Iterable[Tensor]) -> None:
        super().__init__()
        tensors = list(static)
        self._device = _device(tensors[0])
        self._static = {x.untyped_storage()._cdata for x in tensors}
        self._made: dict[int, tuple[StorageWeakRef, str]] = {}
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> CaptureCheck:
        # Ops on plain tensors go past the dispatcher, as without this mode: it sees inside of them.
        self._patches.enter_context(mock.patch.object(op, "_is_watched", return_value=False))
        self._patches.enter_context(mock.patch.object(op, "_look_at", op.look_at))
        for owner, names, why in _CALLS:
            for name in names:
                refuse = _refusal(f"{owner.__name__}.{name}", why, getattr(owner, name))
                self._patches.enter_context(mock.patch.object(owner, name, refuse))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        if error[0] is None:
            gc.collect()
            for storage, where in self._made.values():
                if not storage.expired():
                    raise _error(f"a tensor outlives the graph: {where}")

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        why = _OPS.get(name)
        if name in ("index", "index_put", "index_put_") and any(
            x.dtype == torch.bool for x in tree_iter(args[1]) if isinstance(x, Tensor)
        ):
            why = _OPS["nonzero"]
        if why and (not given or _device(given[0]) == self._device):
            raise _error(f"{why}: {name} at {_line()}")
        keys = {x.untyped_storage()._cdata for x in given}
        if not keys <= self._static | self._made.keys():
            raise _error(f"memory that is not static is used: {name} at {_line()}")
        if func.namespace == "fastpar":  # what writes in place comes as a whole: look into it
            with self._inside():
                key = getattr(torch._C.DispatchKey, self._device.upper())
                out = func._op_dk(key, *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        found = [x for x in tree_iter(out) if isinstance(x, Tensor)]
        if len({_device(x) for x in (*given, *found)}) > 1:
            raise _error(f"host and device exchange values: {name} at {_line()}")
        for x in found:
            key = x.untyped_storage()._cdata
            if key not in keys | self._static and _device(x) == self._device:
                self._made[key] = StorageWeakRef(x.untyped_storage()), f"{name} at {_line()}"
        return out


def _device(x: Tensor) -> str:
    with torch._C.DisableTorchFunction():  # whatever a mode around this one says
        return x.device.type


def _error(what: str) -> RuntimeError:
    return RuntimeError(
        f"CaptureCheck: expected what a CUDA graph can hold, got {what}; keep it out of the "
        "micro-batch, or train without CUDA graphs"
    )


def _refusal(name: str, why: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """call, refused in the region and its backward; other threads (watchdog, save) go on."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, CaptureCheck) for mode in _get_current_dispatch_mode_stack()):
            raise _error(f"{why}: {name} at {_line()}")
        return call(*args, **kwargs)

    return refuse


def _line() -> str:
    """The innermost line outside of _PASSED."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
