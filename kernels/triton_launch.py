"""Launches Triton kernels, records them for ahead-of-time compilation, and adapts them to a GPU.

Every Triton kernel goes through launch(), which is Triton's own launch. On CPU tensors Triton's
interpreter runs the kernel (TRITON_INTERPRET=1, for tests); inside record(arch) nothing runs: what
a call would launch on such a GPU is collected, which is what `make aot` compiles.

[Note: launches again] Triton's launch takes longer than the rest of a small op, and so does the
Python function around it. So calls of an op of csrc/torch are repeated there, without Python
(recipes.cpp [Note: recipes]): _note() tells its recorder what a call launched, after it verified in
the compiled code that the kernel takes exactly these parameters. What is unusual it refuses, and
such calls stay in Python: hooks before a run, clusters, another Triton. While a profiler's hooks or
TRITON_DEBUG are on (look_at_hooks()), all calls go through Python.

Only the <op>_triton modules import this one, and they are imported at the first use of a kernel:
`import fastpar.kernels` does not import Triton.
"""

import contextlib
import functools
import itertools
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fastpar.kernels import _C, backend

INTERPRETED_ARCH = 90  # the GPU whose configurations run under the interpreter
# Streaming multiprocessors of A100, A10, L40S, H100 and H200, B200, RTX 5090.
SMS = {80: 108, 86: 72, 89: 142, 90: 132, 100: 148, 120: 170}
_INTERPRETED_SMS = 3


@dataclass
class Launch:
    """One kernel as a call would launch it. signature, constexprs and attrs are what Triton's own
    launcher passes to its compiler: ASTSource(kernel, signature, constexprs, attrs)."""

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


def _pause_recipes(more: int) -> None:
    """While the sum of these is not 0, all calls go through Python."""
    if _C is not None:
        torch.ops.fastpar._pause_recipes(more)


_SETTINGS = [
    name
    for name in ("debug", "launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook")
    if hasattr(knobs.runtime, name)
]
_watched = False


def look_at_hooks() -> None:
    """Sends calls through Python from when a profiler's hooks or TRITON_DEBUG are on."""
    global _watched
    watched = False
    for name in _SETTINGS:
        setting = getattr(knobs.runtime, name)
        watched = watched or bool(setting and getattr(setting, "calls", True))
    if watched != _watched and _C is not None:
        torch.ops.fastpar._watch_launches(watched)
        _watched = watched


backend.at_each_call.append(look_at_hooks)


@contextlib.contextmanager
def record(arch: int, sms: int | None = None) -> Iterator[list[Launch]]:
    """Collects the launches of the calls inside, on tensors of the meta device, for a GPU of
    sm_<arch> with `sms` multiprocessors (default: SMS)."""
    if sms is None and arch not in SMS:
        raise ValueError(f"record: expected arch in {sorted(SMS)}, got arch={arch}; choose one")
    before = _local.recorder
    recorder = _local.recorder = _Recorder(arch, sms or SMS[arch])
    _pause_recipes(1)
    try:
        yield recorder.launches
    finally:
        _pause_recipes(-1)
        _local.recorder = before


@functools.cache
def _properties(device: torch.device) -> tuple[int, int]:
    about = torch.cuda.get_device_properties(device)
    return about.major * 10 + about.minor, about.multi_processor_count


def _without_index(device: torch.device) -> tuple[int, int]:
    """(arch, sms) of the current GPU for torch.device("cuda"), else the interpreter's."""
    if device.type != "cuda":
        return INTERPRETED_ARCH, _INTERPRETED_SMS
    return _properties(torch.device("cuda", torch.cuda.current_device()))


def _about(device: torch.device) -> tuple[int, int]:
    """(arch, sms) of the recorded GPU, the device's, or the interpreter's."""
    recorder = _local.recorder
    if recorder is not None:
        return recorder.arch, recorder.sms
    # A GPU tensor's device has an index. Reading a device's type takes five times as long.
    return (_without_index if device.index is None else _properties)(device)


def gpu_arch(device: torch.device) -> int:
    """Compute capability, 80 for sm_80."""
    return _about(device)[0]


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors, for persistent grids."""
    return _about(device)[1]


def device_key(key: Tensor | None, device: torch.device) -> Tensor | None:
    """The dropout key on a device where a kernel can read it. RuntimeError: a key on the CPU while
    a CUDA graph is captured: every replay would repeat the copy, from memory that may be freed."""
    if key is None or key.device == device:
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
    """Asks Triton's launcher for which types, constants and alignments it would compile."""
    # Not public names of Triton (the same in 3.6 and 3.9): a launch must not depend on them.
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    if not isinstance(kernel, JITFunction):  # an interpreted one, by TRITON_INTERPRET=1
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
        if isinstance(a, Boxed | TensorDescriptor):
            return a.base.device
    raise AssertionError("a kernel takes a tensor")


class Boxed(NamedTuple):
    """A tensor that a kernel reads in boxes, by a descriptor: layout without its address."""

    base: Tensor
    layout: Any  # Triton's or Gluon's descriptor

    def descriptor(self) -> Any:
        result = object.__new__(type(self.layout))
        vars(result).update(vars(self.layout), base=self.base)
        return result


# The driver's codes for a descriptor's contents (CUtensorMapDataType).
_BOX_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
# Up to here Triton mends a descriptor for some drivers; such a one is left to it.
_SMALL_BYTES = 128 << 10
_NUMBER, _POINTER, _TILE = range(3)  # Kind of csrc/torch/recipes.cpp
_WIDTHS = {"1": 1, "8": 1, "16": 2, "32": 4, "64": 8}


def _parameter_bytes(ptx: str) -> list[int]:
    """Sizes of a compiled kernel's parameters, read from its code."""
    entry = ptx[ptx.index(".entry") :]
    head = entry[: entry.index(")")]
    found = re.findall(r"\.param(?:\s+\.align\s+\d+)?\s+\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", head)
    return [int(n) if n else int(bits) // 8 for bits, n in found]


def _box_plan(tile: Boxed, meta: dict[str, Any]) -> list[int] | None:
    """Type, swizzle, rank, and size, stride and box of each dimension, the last first."""
    about, itemsize = tile.layout, tile.base.element_size()
    sizes, strides = about.shape[::-1], about.strides[::-1]
    reach = sum((n - 1) * step for n, step in zip(sizes, strides)) * itemsize
    plain = about.padding == "zero" and not getattr(about, "round_f32_to_tf32", False)
    plain = plain and not meta["fp4_padded"] and not meta.get("is_im2col", False)
    dtype = _BOX_TYPES.get(tile.base.dtype)
    if not plain or dtype is None or reach < _SMALL_BYTES:
        return None
    box = meta["block_size"][::-1]
    return [dtype, meta["swizzle"], len(sizes), *itertools.chain(*zip(sizes, strides, box))]


def _parameters(kernel: Any, compiled: Any, args: tuple) -> tuple[list[int], list[Tensor]] | str:
    """The parameters of a launch as csrc/torch/recipes.cpp takes them, or why there is no recipe.
    Checked against the kernel's own code: its parameters are those that it gets."""
    about, source = getattr(compiled, "metadata", None), getattr(compiled, "src", None)
    unusual = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size")
    if about is None or source is None or getattr(about, "num_ctas", 1) != 1:
        return "a launch of clusters"
    if any(getattr(about, name, 0) for name in (*unusual, "profile_scratch_size")):
        return "an unusual launch"
    names = [p.name for p in kernel.params]
    if any(source.signature[name] != "constexpr" for name in names[len(args) :]):
        return "a default of a kernel"
    numbers: list[int] = []
    tensors, sizes = [], []
    metas = iter(getattr(about, "tensordesc_meta", None) or ())
    for name, value in zip(names, args):
        kind = source.signature[name]
        if kind == "constexpr":
            continue
        if isinstance(value, Boxed):
            meta = next(metas, None)
            tile = None if meta is None else _box_plan(value, meta)
            if tile is None:
                return "a descriptor that Triton mends"
            numbers += [_TILE, *tile]
            tensors.append(value.base)
            rank = tile[2]
            sizes += [128, *[4] * rank, *[8] * rank]
        elif kind.startswith("*"):
            numbers.append(_POINTER)
            tensors.append(value)
            sizes.append(8)
        elif kind == "fp32":
            numbers += [_NUMBER, *struct.unpack("i", struct.pack("f", value))]
            sizes.append(4)
        elif re.fullmatch("[iu](1|8|16|32|64)", kind):
            numbers += [_NUMBER, (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)]
            sizes.append(_WIDTHS[kind[1:]])
        else:
            return f"a parameter of kind {kind}"
    if _parameter_bytes(compiled.asm["ptx"]) != [*sizes, 8, 8]:  # and two for memory to scratch
        return "a kernel with other parameters"
    return numbers, tensors


def _note(kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple) -> None:
    """Tells csrc/torch/recipes.cpp what was launched, or that it cannot be repeated."""
    plain = isinstance(kernel, JITFunction) and not kernel.pre_run_hooks
    found = _parameters(kernel, compiled, args) if plain else "a kernel with hooks"
    if isinstance(found, str):
        torch.ops.fastpar._refuse_recipe(found)
        return
    _kept.add(compiled)
    about = compiled.metadata
    torch.ops.fastpar._note_launch(
        compiled.function, grid, 32 * about.num_warps, about.shared, *found
    )


_kept: set[Any] = set()  # compiled kernels of recipes: Triton unloads what nobody holds


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """kernel[grid](*args, **kwargs) on the device of its first tensor; nothing for an empty grid.

    args are the kernel's run-time parameters in order, kwargs its constants (BLOCK_C=...) and
    options (num_warps=...). Every kernel gets all of its constants here: no decorator chooses them.
    a * b + c is fused to one rounding unless enable_fp_fusion=False, which is explicit because
    Triton's default changes between versions.
    """
    if 0 in grid:
        return
    kwargs.setdefault("enable_fp_fusion", True)
    recorder = _local.recorder
    given = tuple([a.descriptor() if type(a) is Boxed else a for a in args])
    if recorder is not None:
        recorder.launches.append(_record(kernel, grid, given, kwargs, recorder.arch))
        return
    device = _device(args)  # Gluon's descriptors are not TensorDescriptors
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, **kwargs)
        return
    compiled = kernel[grid](*given, **kwargs)
    if _C is not None and torch.ops.fastpar._is_recording():
        _note(kernel, compiled, grid, args)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory, for the calls that `make aot` compiles."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()
