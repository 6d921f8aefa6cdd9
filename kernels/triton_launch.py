"""Where Triton kernels are launched, described for ahead-of-time compilation, and fitted to a GPU.

Every kernel of kernels/<op>_triton.py goes through launch(). On a GPU that is Triton's own launch;
on CPU tensors Triton's interpreter runs the kernel (TRITON_INTERPRET=1, for tests); inside
record(arch) nothing runs: the kernels, argument types and options that a call would launch on such
a GPU are collected, which is what `make aot` compiles. So what is checked is what is shipped.

Only the <op>_triton modules import this one, and they are imported when a kernel is first needed:
`import fastpar.kernels` does not import Triton.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED_ARCH = 90  # which GPU's configurations run under the interpreter
SMS = {80: 108, 90: 132}  # streaming multiprocessors of A100 and H100/H200
_INTERPRETED_SMS = 3
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}


@dataclass
class Launch:
    """One kernel as a call would launch it."""

    kernel: Any
    grid: tuple[int, ...]
    signature: dict[str, str]  # parameter -> "*bf16" | "i32" | "constexpr" | ...
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]  # parameters whose value or address is a multiple of 16
    options: dict[str, Any]  # num_warps, num_stages, ...

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass
class _Recorder:
    arch: int
    launches: list[Launch] = field(default_factory=list)


_local = threading.local()


@contextlib.contextmanager
def record(arch: int) -> Iterator[list[Launch]]:
    """Collects the launches of the calls inside, on tensors of the meta device, for sm_<arch>."""
    if arch not in SMS:
        raise ValueError(f"record: expected arch in {sorted(SMS)}, got arch={arch}; choose one")
    _local.recorder = _Recorder(arch)
    try:
        yield _local.recorder.launches
    finally:
        _local.recorder = None


def _recorder() -> _Recorder | None:
    return getattr(_local, "recorder", None)


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
        return SMS[recorder.arch]
    return _properties(device)[1] if device.type == "cuda" else _INTERPRETED_SMS


def device_key(key: Tensor, device: torch.device) -> Tensor:
    """The dropout key where a kernel can read it."""
    return key if key.device == device else key.to(device, non_blocking=True)


def _describe(name: str, value: Any, constexpr: bool) -> tuple[str, bool]:
    """(Triton's type, whether a multiple of 16) of an argument, as its launcher specializes it."""
    if constexpr or value is None or value is True or value is False:
        return "constexpr", False
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}", True
    if isinstance(value, TensorDescriptor):
        shape = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_TYPES[value.base.dtype]}[{shape}]>", False
    if isinstance(value, int):
        if value == 1:
            return "constexpr", False
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64", value % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    raise TypeError(f"{name}: {type(value)}")


def _record(kernel: Any, grid: tuple[int, ...], args: tuple, kwargs: dict[str, Any]) -> Launch:
    params = kernel.params
    values = dict(zip((p.name for p in params), args))
    names = {p.name for p in params}
    values.update((k, v) for k, v in kwargs.items() if k in names)
    signature, constexprs, divisible = {}, {}, []
    for p in params:
        value = values.get(p.name, p.default)
        signature[p.name], by_16 = _describe(p.name, value, p.is_constexpr)
        if signature[p.name] == "constexpr":
            constexprs[p.name] = value
        if by_16 and not p.do_not_specialize:
            divisible.append(p.name)
    options = {k: v for k, v in kwargs.items() if k not in names}
    return Launch(kernel, grid, signature, constexprs, tuple(divisible), options)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """kernel[grid](*args, **kwargs) on the device of its first tensor; nothing for an empty grid.

    args are the kernel's run-time parameters in their order, kwargs its constants (BLOCK_C=...) and
    options (num_warps=...). Every kernel gets all of its constants here: no decorator chooses them.
    """
    if 0 in grid:
        return
    recorder = _recorder()
    if recorder is not None:
        recorder.launches.append(_record(kernel, grid, args, kwargs))
        return
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **kwargs)
    else:
        kernel[grid](*args, **kwargs)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)
