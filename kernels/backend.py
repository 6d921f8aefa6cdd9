"""Which implementation of each op runs, why, and how to force one.

Two environment variables are read once, at import:

FASTPAR_BACKEND=auto|torch|cpp|triton
    auto    C++ for CPU tensors and Triton for CUDA tensors where an op has such an implementation,
            torch otherwise (fp64, other devices)
    torch   torch everywhere
    cpp     like auto, but an op that has a compiled implementation raises RuntimeError when it is
            called with tensors that this implementation cannot serve
    triton  the same for Triton; CPU tensors run in Triton's interpreter, which TRITON_INTERPRET=1
            switches on (for tests: it is slow, and its bf16 matrix products are wrong)
FASTPAR_ISA=auto|baseline|avx2|avx512
    the instruction set of the compiled kernels; results have the same bits on each

Without the compiled module (installed with FASTPAR_CPP=0) auto is torch, and cpp is refused.
`fastpar info` prints what was chosen.
"""

import functools
import importlib.util
import itertools
import math
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastpar.kernels import _C

# Storage types of the compiled kernels; the codes are csrc/simd.h's Dtype.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# What the losses take; fp64 has no kernel, it runs in torch ops.
FLOATS = (*DTYPE_CODES, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums, statistics and losses of such tensors are kept in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# op -> (on CPU tensors, on CUDA tensors); "cpp" names the compiled kernel's source.
OPS = {
    "attention": ("cpp: attention_cpu.cpp", "triton: attention_triton.py, attention_bwd_triton.py"),
    "layer_norm": ("cpp: layer_norm_cpu.cpp", "triton: layer_norm_triton.py"),
    "rms_norm": ("cpp: layer_norm_cpu.cpp", "triton: layer_norm_triton.py"),
    "residual_layer_norm": ("cpp: layer_norm_cpu.cpp", "triton: layer_norm_triton.py"),
    "residual_rms_norm": ("cpp: layer_norm_cpu.cpp", "triton: layer_norm_triton.py"),
    "bias_gelu": ("cpp: gelu_cpu.cpp (tanh form); torch (erf form)", "triton: gelu_triton.py"),
    "embedding": ("torch; cpp: dropout_cpu.cpp", "triton: embedding_triton.py"),
    "linear": ("{gemm} (fp32); torch (16 bits)", "torch"),
    "cross_entropy": ("cpp: cross_entropy_cpu.cpp", "triton: cross_entropy_triton.py"),
    "cross_entropy_shard": ("cpp: cross_entropy_cpu.cpp", "triton: cross_entropy_shard_triton.py"),
    "cross_entropy_shard_grad": (
        "cpp: cross_entropy_cpu.cpp",
        "triton: cross_entropy_shard_triton.py",
    ),
    "linear_cross_entropy": (
        "chunks of rows by {gemm}, cpp: cross_entropy_cpu.cpp between",
        "torch: GEMMs by chunks of rows, triton: cross_entropy_triton.py between",
    ),
    "adamw_step_": ("cpp: adamw_cpu.cpp", "cuda: adamw_cuda.cu"),
    "pack_": ("cpp: bucket_cpu.cpp", "cuda: bucket_cuda.cu"),
    "unpack_": ("cpp: bucket_cpu.cpp", "cuda: bucket_cuda.cu"),
    "accumulate_": ("cpp: bucket_cpu.cpp", "cuda: bucket_cuda.cu"),
    "sum_shards": ("cpp: bucket_cpu.cpp", "cuda: bucket_cuda.cu"),
    "global_norm": ("cpp: global_norm_cpu.cpp", "cuda: global_norm_cuda.cu"),
    "quantize_blockwise": ("cpp: quantize_cpu.cpp", "cuda: quantize_cuda.cu"),
    "dequantize_blockwise": ("cpp: quantize_cpu.cpp", "cuda: quantize_cuda.cu"),
    "dropout": ("cpp: dropout_cpu.cpp", "triton: philox_triton.py"),
}


def read_backend(name: str) -> str:
    """FASTPAR_BACKEND's value, checked; auto is torch without the compiled module."""
    if name not in ("auto", "torch", "cpp", "triton"):
        raise ValueError(
            "read_backend: expected auto, torch, cpp or triton, got "
            f"FASTPAR_BACKEND={name}; correct it"
        )
    if _C is None and name == "cpp":
        raise RuntimeError(
            "read_backend: expected the compiled module with FASTPAR_BACKEND=cpp, got none; "
            f"{WITH_CPP}, or unset FASTPAR_BACKEND"
        )
    return "torch" if _C is None and name == "auto" else name


# The way out for whoever has no compiled module.
WITH_CPP = "install fastpar again, with a C++ compiler and without FASTPAR_CPP=0"

choice = read_backend(os.environ.get("FASTPAR_BACKEND", "auto"))
if _C is not None:
    _C.set_isa(os.environ.get("FASTPAR_ISA", "auto"))
# torch's fp32 products on CPU are MKL's, which uses AVX-512 on Intel machines only.
has_gemm: bool = _C is not None and _C.isa() == "avx512" and not _C.cpu_is_intel()


def forced() -> str:
    """What keeps the fastest kernels from running: FASTPAR_BACKEND, "none" for no compiled module;
    "" for auto."""
    return "none" if _C is None else "" if choice == "auto" else choice


def way_to_cpp() -> str:
    """What to do for the compiled kernels where torch serves instead."""
    return WITH_CPP if _C is None else "unset FASTPAR_BACKEND"


def use_cpp(op: str, x: Tensor) -> bool:
    """Whether `op`, which has a compiled CPU implementation, uses it for tensors like x.

    Raises:
        RuntimeError: FASTPAR_BACKEND=cpp and x is not a CPU tensor of a supported dtype.
    """
    able = x.device.type == "cpu" and x.dtype in DTYPE_CODES
    if choice == "cpp" and not able:
        raise RuntimeError(
            f"{op}: expected a CPU tensor of float32, bfloat16 or float16 under "
            f"FASTPAR_BACKEND=cpp, got device={x.device.type} dtype={x.dtype}; "
            "unset FASTPAR_BACKEND"
        )
    return able and choice in ("auto", "cpp")


# The module whose CUDA kernels serve CUDA tensors; the tests of these kernels put the one that runs
# them on a CPU here, and `cuda_on_cpu` lets CPU tensors in.
cuda_kernels: Any = _C if _C is not None and _C.built_with_cuda else None
cuda_on_cpu = False


def use_cuda(op: str, x: Tensor) -> bool:
    """Whether `op`, which has a CUDA kernel of its own in csrc/, uses it for tensors like x.

    Raises:
        RuntimeError: x is a CUDA tensor and the module was built without CUDA.
    """
    if not (x.is_cuda or cuda_on_cpu) or choice == "torch":
        return False
    if cuda_kernels is None:
        raise RuntimeError(
            f"{op}: expected fastpar.kernels._C with CUDA for tensors on {x.device}, got none "
            f"({_why_without_cuda()}); {_WITH_CUDA}"
        )
    return True


_WITH_CUDA = (
    "put nvcc on the PATH (or set CUDA_HOME) and repeat `FASTPAR_CUDA=1 pip install "
    "--no-build-isolation -e .`, or set FASTPAR_BACKEND=torch"
)


def _why_without_cuda() -> str:
    if _C is None:
        return "FASTPAR_CPP=0 when it was installed"
    return getattr(_C, "why_without_cuda", "") or "an older build"


def cuda_stream(x: Tensor) -> int:
    """The current stream of x's device as an integer; call under torch.cuda.device(x.device)."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


_has_triton: bool = importlib.util.find_spec("triton") is not None


def _triton_found() -> bool:
    return _has_triton  # found at import: torch.compile warns about functools.cache


def use_triton(op: str, x: Tensor) -> bool:
    """Whether `op`, which has Triton kernels, uses them for tensors like x.

    Raises:
        RuntimeError: x is a CUDA tensor and Triton is not installed; FASTPAR_BACKEND=triton and x
            is of another dtype or device, or on the CPU without Triton's interpreter.
    """
    cuda = x.device.type == "cuda"
    if choice in ("torch", "cpp") or not (cuda or choice == "triton"):
        return False
    able = x.dtype in DTYPE_CODES
    if choice == "triton":
        interpreted = x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        if not (able and (cuda or interpreted)):
            raise RuntimeError(
                f"{op}: expected a CUDA tensor of float32, bfloat16 or float16 under "
                "FASTPAR_BACKEND=triton (or a CPU tensor with TRITON_INTERPRET=1), got "
                f"device={x.device.type} dtype={x.dtype}; unset FASTPAR_BACKEND"
            )
    if able and not _triton_found():
        raise RuntimeError(
            f"{op}: expected Triton for tensors on {x.device}, got no triton package; "
            "`pip install triton`, or set FASTPAR_BACKEND=torch for plain PyTorch"
        )
    return able


_library = torch.library.Library("fastpar", "FRAGMENT")


class Op:
    """An op of torch.library that plain eager calls reach without the dispatcher.

    [Note: eager calls] The dispatcher parses every argument twice, once for autograd and once for
    the device, which costs as much as a small kernel. So a call on plain CPU or CUDA tensors, with
    no mode, transform or tracer that wants to see it, goes straight to the implementation (through
    autograd.Function where a gradient is needed, which torch's profiler sees). All others see the
    op: torch.compile, and the profiler where no gradient is needed.

    [Note: unusual tensors] Implementations read memory by address, so a tensor is plain only if its
    memory holds its values: what is negated lazily (the negative bit of z.conj().imag) is made
    plain here, for inputs and for the gradients that reach a backward op; a batch of gradients
    (is_grads_batched) goes through the dispatcher, which calls the op for each; a sparse tensor and
    a tangent of forward-mode AD are refused.

    [Note: transforms] Under torch.func's grad and vmap the op is an autograd.Function of the form
    that these ask for: vmap is a loop, and backward may itself be recorded, but not differentiated.
    """

    def __init__(self, overload: torch._ops.OpOverload, run: Callable[..., Any]):
        self.overload = overload
        self.run = run
        self.name = overload.name().split("::")[1]
        self.apply: Callable[..., Any] | None = None
        self.mutates = overload._schema.is_mutable
        self.takes_lists = any(str(a.type) == "List[Tensor]" for a in overload._schema.arguments)
        self.setup_context: Callable[..., None] = lambda ctx, inputs, output: None
        self.backward: Callable[..., Any] = self._no_backward

    def __call__(self, *args: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or self.mutates
            or _is_watched()
            or forward_ad._current_level >= 0
        ):
            return self._with_care(args)
        needs_grad = False
        for a in args:
            if isinstance(a, Tensor):
                if (
                    type(a) not in _PLAIN
                    or not (a.is_cpu or a.is_cuda)
                    or not _has_storage(a)
                    or a.is_neg()
                ):
                    return self._with_care(args)
                needs_grad = needs_grad or a.requires_grad
        if needs_grad and self.apply is not None and torch.is_grad_enabled():
            return self.apply(*args)
        return (self.overload if torch.autograd._profiler_enabled() else self.run)(*args)

    def _with_care(self, args: tuple) -> Any:
        """A call that is not eager on plain tensors; see the notes above."""
        if torch.compiler.is_compiling():
            return self.overload(*args)
        if forward_ad._current_level >= 0:
            self._refuse_tangents(args)
        if in_transform() and not self.takes_lists:
            if self.mutates:
                raise RuntimeError(
                    f"{self.name}: expected tensors outside of torch.func's transforms, got a call "
                    "under grad or vmap; it writes in place: leave out what asks for that (inplace,"
                    " wte_grad, weight_grad)"
                )
            return self._transformed.apply(*args)
        negative = False
        for a in args:
            if isinstance(a, Tensor):
                check_dense(self.name, "a tensor", a)
                negative = negative or a.is_neg()
        if negative and not self.mutates:
            return self(*(a.resolve_neg() if isinstance(a, Tensor) else a for a in args))
        return self.overload(*args)

    def _refuse_tangents(self, args: tuple) -> None:
        lists = ((a,) if isinstance(a, Tensor) else a if isinstance(a, list) else () for a in args)
        for a in itertools.chain.from_iterable(lists):
            if isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None:
                raise RuntimeError(
                    f"{self.name}: expected tensors without tangents, got forward-mode AD (jvp, "
                    "dual tensors), which it has not; use backward or torch.func.grad, or "
                    f"fastpar.kernels.reference.{_stem(self.name)}_ref"
                )

    @functools.cached_property
    def _transformed(self) -> Any:
        """The autograd.Function of [Note: transforms]."""

        def forward(*inputs):
            return self(*inputs)

        def vmap(info, in_dims, *args):
            results = []
            for i in range(info.batch_size):
                slices = (a if d is None else a.select(d, i) for a, d in zip(args, in_dims))
                results.append(self._transformed.apply(*slices))
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])

        methods = {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(lambda *args: self.setup_context(*args)),
            "backward": staticmethod(lambda *args: self.backward(*args)),
            "vmap": staticmethod(vmap),
        }
        return type(self.name, (torch.autograd.Function,), methods)

    def _no_backward(self, ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_one_backward(_stem(self.name), "a derivative of its gradient"))


_PLAIN = (Tensor, torch.nn.Parameter)
_has_storage = torch._C._has_storage  # not of a sparse tensor, nor of torch's wrappers


def _stem(name: str) -> str:
    """layer_norm of layer_norm_bwd, and so on."""
    return name.removesuffix("_").removesuffix("_bwd")


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap) is active."""
    compiling = torch.compiler.is_compiling()  # torch's tracer takes the stack for full
    return not compiling and torch._C._functorch.peek_interpreter_stack() is not None


def is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary tensor here, whose memory holds its values."""
    return type(x) in _PLAIN and _has_storage(x) and not x.is_neg() and not _is_watched()


def _is_watched() -> bool:
    """Whether a mode (FakeTensor, make_fx, checkpointing) or a transform (vmap) is active."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def check_dense(op: str, name: str, x: Tensor) -> None:
    """Refuse sparse tensors, before their shapes and strides are asked for."""
    if x.layout is not torch.strided:
        raise ValueError(
            f"{op}: expected dense tensors, got {name}.layout={x.layout}; pass its to_dense()"
        )


def check_float(op: str, name: str, x: Tensor) -> None:
    """Refuse what neither our kernels nor torch's ops take for numbers."""
    check_dense(op, name, x)
    if x.dtype not in FLOATS:
        raise ValueError(
            f"{op}: expected a floating dtype, got {name}={x.dtype}; cast it first, to fp32, bf16, "
            "fp16 or fp64"
        )


def check_eps(op: str, eps: float) -> None:
    """Refuse what would make roots of negative numbers."""
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{op}: expected a finite eps >= 0, got eps={eps}; 1e-5 is usual")


def define_op(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], devices: Sequence[str]
) -> Op:
    """The op fastpar::<schema> that calls `run` on tensors of these devices ("CPU", "CUDA").

    `run` returns new tensors, never its inputs. See [Note: eager calls].
    """
    name = schema.split("(")[0]
    _library.define(schema)
    for device in devices:
        _library.impl(name, run, device)
    torch.library.register_fake(f"fastpar::{name}", fake, lib=_library)
    return Op(getattr(torch.ops.fastpar, name).default, run)


def define_autograd(
    op: Op,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
    *,
    by_products: int = 0,
) -> None:
    """Gradients of op: setup_context(ctx, inputs, output) and backward(ctx, *grads).

    backward is not called where no output has a gradient; of several, some may be None.

    Args:
        by_products: how many outputs, the last ones, are for backward alone. They have no gradient.
            Under torch.func they may be asked for one, by a second derivative: it is refused.
    """

    def setup(ctx, inputs, output):
        if by_products:
            ctx.mark_non_differentiable(*output[-by_products:])
        setup_of_transform(ctx, inputs, output)

    def setup_of_transform(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        setup_context(ctx, inputs, output)

    def backward_of_transform(ctx, *grads):
        if any(grad is not None for grad in grads[len(grads) - by_products :]):
            return op._no_backward(ctx, *grads)
        return backward_of_some(ctx, *grads)

    def backward_of_some(ctx, *grads):
        for grad in grads:
            if grad is not None:
                return backward(ctx, *grads)
        return (None,) * len(ctx.needs_input_grad)

    def through_dispatcher(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = op.overload(*inputs)
        setup(ctx, inputs, output)
        return output

    def eager(ctx, *inputs):
        output = op.run(*inputs)
        setup(ctx, inputs, output)
        return output

    def function(forward: Callable[..., Any]) -> Any:
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_some)}
        return type(op.name, (torch.autograd.Function,), methods)

    _library.impl(op.name, function(through_dispatcher).apply, "Autograd")
    op.apply = function(eager).apply
    op.setup_context, op.backward = setup_of_transform, backward_of_transform


def refuse_double_backward(op: str) -> None:
    """Called first in an op's backward: gradients of these gradients are not computed.

    torch.func.grad always asks for them; there they are refused when they are taken.
    """
    if torch.is_grad_enabled() and not in_transform():
        raise RuntimeError(_one_backward(op, "create_graph=True"))


def refuse_buffer(op: str, name: str) -> None:
    """A transform of torch.func cannot have its gradients added to memory outside of it."""
    if in_transform():
        raise RuntimeError(
            f"{op}: expected no {name} under torch.func's transforms, got one; leave it out: the "
            "transform returns the gradient"
        )


def refuse_batch(op: str, name: str, grad: Tensor) -> None:
    """Gradients in batches cannot be added to one memory each."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            f"{op}: expected one gradient at a time with {name}, got a batch (is_grads_batched, "
            f"jacobian(vectorize=True)); leave {name} out"
        )


def _one_backward(op: str, got: str) -> str:
    return (
        f"{op}: expected one backward, got {got}; "
        f"use fastpar.kernels.reference.{op}_ref where second derivatives are needed"
    )


def keep_freed_memory() -> bool:
    """Keeps freed CPU memory mapped in this process; returns whether the C library can.

    A training step allocates and frees the same large buffers again and again. By default glibc
    maps and unmaps many of them, so every step pays the page faults anew. Afterwards the heap only
    grows: in the first steps to somewhat more than the peak of what is alive (blocks land apart),
    then it stays. Affects the whole process and cannot be undone, so an application calls it (the
    trainer does), never a library on import.
    """
    return _C is not None and _C.keep_freed_memory()


_FASTEST = "torch's own kernel: fastpar has no faster one for this machine, nothing to change"


def _forced() -> str:
    """Why torch serves what could have kernels."""
    if _C is None:
        return f"installed with FASTPAR_CPP=0; {WITH_CPP}"
    return f"FASTPAR_BACKEND={choice} is set; unset it"


def _on_cpu(cpu: str, gpu: str) -> tuple[str, str]:
    """(what runs on CPU tensors, why it is torch or nothing)"""
    if choice == "triton" and "triton: " in gpu:
        if os.environ.get("TRITON_INTERPRET") == "1":
            return f"interpreted {gpu[gpu.index('triton: ') :]}", ""
        return (
            "refused",
            "FASTPAR_BACKEND=triton runs on a CPU with TRITON_INTERPRET=1 only; unset it",
        )
    if choice in ("torch", "triton"):
        return "torch", _forced()
    cpu = cpu.format(gemm="cpp: gemm_cpu.cpp" if has_gemm else "torch.mm")
    return cpu, _FASTEST if "torch" in cpu else ""


def _on_cuda(cpu: str, gpu: str) -> tuple[str, str]:
    """(what runs on CUDA tensors, why it is torch or nothing)"""
    if choice == "torch":
        return "torch", _forced()
    if choice == "cpp" and "cpp: " in cpu:
        return "refused", "FASTPAR_BACKEND=cpp is for CPU tensors; unset it"
    if "cuda: " in gpu and cuda_kernels is None:
        return "refused", f"the module is without CUDA ({_why_without_cuda()}); {_WITH_CUDA}"
    if "triton: " in gpu and not _triton_found():
        return "refused", "no triton package; `pip install triton`, or set FASTPAR_BACKEND=torch"
    return gpu, _FASTEST if "torch" in gpu else ""


def describe() -> str:
    """What runs where on this machine and why, one fact a line; reasons stand below the ops."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    gpu = torch.cuda.is_available()
    lines = [
        f"machine   {platform.machine()}, Python {platform.python_version()}",
        f"torch     {torch.__version__} (CUDA {torch.version.cuda or 'none'}), "
        f"{torch.get_num_threads()} CPU threads",
        f"GPU       {torch.cuda.get_device_name() if gpu else 'none'}",
        f"triton    {triton}",
    ]
    if _C is None:
        lines.append(f"_C        none: {_forced()}")
    else:
        supported = [n for n in ("baseline", "avx2", "avx512") if _C.isa_supported(n)]
        cuda = " and CUDA" if _C.built_with_cuda else f", no CUDA: {_why_without_cuda()}"
        lines += [
            f"_C        C++{cuda}",
            f"isa       {_C.isa()} (FASTPAR_ISA={os.environ.get('FASTPAR_ISA', 'auto')}; "
            f"this machine: {', '.join(supported)})",
        ]
    asked = os.environ.get("FASTPAR_BACKEND", "auto")
    lines.append(f"backend   {choice} (FASTPAR_BACKEND={asked})")
    if not gpu:
        why = "torch finds no GPU" if torch.version.cuda else "this torch has no CUDA"
        lines.append(f"cuda      no CUDA tensors here: {why}")
    notes: dict[str, int] = {}
    for op, texts in OPS.items():
        found = [("cpu", *_on_cpu(*texts))] + [("cuda", *_on_cuda(*texts))] * gpu
        for i, (device, text, why) in enumerate(found):
            number = f" [{notes.setdefault(why, len(notes) + 1)}]" if why else ""
            lines.append(f"{'' if i else op:<24} {device:<4} {text}{number}")
    return "\n".join([*lines, *(f"[{i}] {why}" for why, i in notes.items())])


if __name__ == "__main__":
    print(describe())
