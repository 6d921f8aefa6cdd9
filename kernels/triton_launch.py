"""Triton kernels are launched here, recorded for ahead-of-time compilation, and fitted to a GPU.

Every kernel of kernels/<op>_triton.py goes through launch(). On a GPU that is Triton's own launch
the first time, then the launcher of what it compiled, [Note: launches again]. On CPU tensors
Triton's interpreter runs the kernel (TRITON_INTERPRET=1, for tests); inside record(arch) nothing
runs: the kernels, argument types and options that a call would launch on such a GPU are collected,
which is what `make aot` compiles. So what is checked is what is shipped.

[Note: launches again] Triton's launch looks at every argument and writes a text of all options to
find the kernel that it compiled, which takes longer than the rest of a small op. So launch() keeps
that kernel under a key of everything that Triton specializes by: types, dtypes, whether each
address is a multiple of 16, the values of integers (finer than Triton: it goes by whether they are
1 or multiples of 16), constants, options and the device. A known key goes straight to the compiled
kernel's own launcher, on the current stream. What is unusual goes through Triton: hooks of a
profiler, TRITON_DEBUG, hooks before a run, a Triton whose launch returns something else.

Only the <op>_triton modules import this one, and they are imported when a kernel is first needed:
`import fastpar.kernels` does not import Triton.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED_ARCH = 90  # which GPU's configurations run under the interpreter
# Streaming multiprocessors of A100, A10, L40S, H100 and H200, B200, RTX 5090.
SMS = {80: 108, 86: 72, 89: 142, 90: 132, 100: 148, 120: 170}
_INTERPRETED_SMS = 3


@dataclass
class Launch:
    """One kernel as a call would launch it. signature, constexprs and attrs are what Triton's own
    launcher hands to its compiler: ASTSource(kernel, signature, constexprs, attrs)."""

    kernel: Any
    grid: tuple[int, ...]
    signature: dict[str, str]  # parameter -> "*bf16" | "i32" | "constexpr" | ...
    constexprs: dict[tuple[int, ...], Any]  # parameter's index -> value: constants, None, 1
    attrs: dict[tuple[int, ...], Any]  # parameter's index -> [["tt.divisibility", 16]] or []
    options: dict[str, Any]  # num_warps, num_stages, ...

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def constants(self) -> dict[str, Any]:
        names = list(self.signature)
        return {names[path[0]]: value for path, value in self.constexprs.items()}

    @property
    def divisible(self) -> tuple[str, ...]:
        """Parameters whose value or address is known to be a multiple of 16."""
        names = list(self.signature)
        return tuple(names[path[0]] for path, attrs in self.attrs.items() if attrs)


@dataclass
class _Recorder:
    arch: int
    sms: int
    launches: list[Launch] = field(default_factory=list)


class _Local(threading.local):
    recorder: _Recorder | None = None


_local = _Local()


@contextlib.contextmanager
def record(arch: int, sms: int | None = None) -> Iterator[list[Launch]]:
    """Collects the launches of the calls inside, on tensors of the meta device, for a GPU of
    sm_<arch> with so many multiprocessors, by default those of SMS."""
    if sms is None and arch not in SMS:
        raise ValueError(f"record: expected arch in {sorted(SMS)}, got arch={arch}; choose one")
    before = _recorder()
    recorder = _local.recorder = _Recorder(arch, sms or SMS[arch])
    try:
        yield recorder.launches
    finally:
        _local.recorder = before


def _recorder() -> _Recorder | None:
    return _local.recorder


@functools.cache
def _properties(device: torch.device) -> tuple[int, int]:
    about = torch.cuda.get_device_properties(device)
    return about.major * 10 + about.minor, about.multi_processor_count


def gpu_arch(device: torch.device) -> int:
    """Compute capability, 80 for sm_80; the one being recorded; the interpreter's."""
    recorder = _recorder()
    if recorder is not None:
        return recorder.arch
    return _properties(device)[0] if device.type == "cuda" else INTERPRETED_ARCH


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors, for persistent grids."""
    recorder = _recorder()
    if recorder is not None:
        return recorder.sms
    return _properties(device)[1] if device.type == "cuda" else _INTERPRETED_SMS


def device_key(key: Tensor, device: torch.device) -> Tensor:
    """The dropout key where a kernel can read it.

    Raises:
        RuntimeError: a key on the CPU while a CUDA graph is captured, whose copy every replay
            would read from memory that may be gone by then.
    """
    if key.device == device:
        return key
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"dropout: expected a key on {device} while a CUDA graph is captured, got one on "
            f"{key.device}; make it there: make_key(seed, first_sample, device)"
        )
    return key.to(device, non_blocking=True)


def _record(
    kernel: Any, grid: tuple[int, ...], args: tuple, kwargs: dict[str, Any], arch: int
) -> Launch:
    """Asks Triton's launcher which types, constants and alignments it would compile for."""
    # Not public names of Triton (the same in 3.6 and 3.9): a launch must not depend on them.
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    if not isinstance(kernel, JITFunction):  # TRITON_INTERPRET=1 made an interpreted one
        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    _, signature, constexprs, attrs = kernel._pack_args(
        backend, kwargs, bound, specialization, options
    )
    return Launch(kernel, grid, signature, constexprs, attrs, options)


def _device(args: tuple) -> torch.device:
    for a in args:
        if isinstance(a, Tensor):
            return a.device
        if isinstance(a, TensorDescriptor):
            return a.base.device
    raise AssertionError("a kernel takes a tensor")


_Key = tuple[Any, ...]
_MANY = 8192  # keys; integers that never repeat must not fill the memory
# key -> (compiled kernel, its launcher, its function, its packed metadata, values of constants)
_known: dict[_Key, tuple[Any, Callable[..., Any], Any, Any, tuple]] = {}


def _getter(places: list[int]) -> Any:
    """The arguments at these places, as a tuple, or None for no place."""
    if not places:
        return None
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[i] for i in places)


_numbers = itertools.count()


@functools.cache
def _places(types: tuple[type, ...]) -> tuple[Any, ...]:
    """A number for these types, and getters of the tensors, descriptors and other values that a key
    is made of; a number with a fraction is none, as nothing is specialized by it."""
    kinds: list[list[int]] = [[], [], []]
    for i, kind in enumerate(types):
        if issubclass(kind, Tensor):
            kinds[0].append(i)
        elif issubclass(kind, TensorDescriptor):
            kinds[1].append(i)
        elif kind is not float:
            kinds[2].append(i)
    return next(_numbers), *map(_getter, kinds)


def _key_of(kernel: Any, device: int, args: tuple, kwargs: dict[str, Any]) -> _Key:
    """See [Note: launches again]."""
    number, tensors, descriptors, values = _places(tuple(map(type, args)))
    given = tensors(args) if tensors else ()
    return (
        kernel.fn,  # the kernel's own hash is one of its source
        device,
        number,
        tuple([t.dtype for t in given]),
        tuple([t.data_ptr() % 16 == 0 for t in given]),
        descriptors and tuple([(d.base.dtype, *d.block_shape) for d in descriptors(args)]),
        values and values(args),
        tuple(kwargs),
        tuple(kwargs.values()),
    )


def _is_watched(kernel: Any) -> bool:
    """Whether a launch has to go through Triton: hooks, debugging, another Triton."""
    settings = knobs.runtime
    enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
    return bool(
        settings.debug
        or kernel.pre_run_hooks
        or getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or getattr(settings, "add_stages_inspection_hook", None)
    )


def _keep(kernel: Any, key: _Key, compiled: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Keeps what a launch through Triton compiled, if it is what this file knows how to launch."""
    rest = [p.name for p in kernel.params[len(args) :]]
    if hasattr(compiled, "packed_metadata") and all(name in kwargs for name in rest):
        if len(_known) >= _MANY:
            _known.clear()
        constants = tuple(kwargs[name] for name in rest)
        run, function = compiled.run, compiled.function
        _known[key] = compiled, run, function, compiled.packed_metadata, constants


def _launch_here(
    kernel: Any, grid: tuple[int, ...], args: tuple, kwargs: dict[str, Any], device: int | None
) -> None:
    """A launch on the current device, a GPU of this index."""
    if type(kernel) is not JITFunction or _is_watched(kernel):  # interpreted: no JITFunction
        kernel[grid](*args, **kwargs)
        return
    active = driver.active
    if device is None:
        device = active.get_current_device()
    key = _key_of(kernel, device, args, kwargs)
    known = _known.get(key)
    if known is None:
        _keep(kernel, key, kernel[grid](*args, **kwargs), args, kwargs)
        return
    _, run, function, metadata, constants = known
    x, y, z = (*grid, 1, 1)[:3]
    stream = active.get_current_stream(device)
    run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """kernel[grid](*args, **kwargs) on the device of its first tensor; nothing for an empty grid.

    args are the kernel's run-time parameters in their order, kwargs its constants (BLOCK_C=...) and
    options (num_warps=...). Every kernel gets all of its constants here: no decorator chooses them.
    a * b + c is fused to one rounding unless enable_fp_fusion=False: said here because Triton's
    own default changes between versions.
    """
    if 0 in grid:
        return
    kwargs.setdefault("enable_fp_fusion", True)
    recorder = _recorder()
    if recorder is not None:
        recorder.launches.append(_record(kernel, grid, args, kwargs, recorder.arch))
        return
    device = _device(args)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch_here(kernel, grid, args, kwargs, device.index)
    else:
        _launch_here(kernel, grid, args, kwargs, device.index)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()
