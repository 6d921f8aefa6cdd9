"""Which implementation of each op runs, why, and how to force one.

Environment variables, read once at import:

FASTPAR_BACKEND=auto|torch|cpp|triton
    auto    C++ for CPU tensors and Triton for CUDA tensors where an op has such an implementation,
            torch otherwise (fp64, other devices)
    torch   torch everywhere
    cpp     like auto, but an op that has a compiled implementation raises RuntimeError when it is
            called with tensors that this implementation cannot serve
    triton  the same for Triton; CPU tensors run in Triton's interpreter, which TRITON_INTERPRET=1
            switches on (for tests: it is slow, and its bf16 matrix products are wrong)
FASTPAR_ISA=auto|baseline|avx2|avx512|amx
    the instruction set of the compiled kernels; results have the same bits on each, except for
    products of bf16: with amx some are fastpar's, with the others all are torch's
FASTPAR_ATTENTION=auto|own|<one of attention/peers.py>
    who serves attention's plain calls; auto: what a proof found right and fastest; own: fastpar's
FASTPAR_PEERS=-<one of attention/peers.py>,...
    implementations to leave out, untried

Without the compiled module (installed with FASTPAR_CPP=0) auto is torch, and cpp is refused.
`fastpar info` prints what was chosen.
"""

import functools
import importlib
import importlib.util
import os
import platform
import sys
import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels import choice as choices
from fastpar.kernels.choice import is_real, may_run, refuse_wrong

# Storage types of the compiled kernels; the codes are csrc/simd.h's Dtype.
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Dtypes of the losses; fp64 has no kernel, it runs in torch ops.
FLOATS = (*DTYPE_CODES, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, statistics and losses: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# op -> (on CPU tensors, on CUDA tensors); "cpp" names the compiled kernel's source.
OPS = {
    "attention": ("cpp: attention_cpu.cpp", "triton: attention/triton.py"),
    **dict.fromkeys(
        ("layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm"),
        ("cpp: layer_norm_cpu.cpp", "triton: norm/triton.py"),
    ),
    "bias_gelu": (
        "cpp: activation_cpu.cpp (tanh form); torch (erf form)",
        "triton: activation/triton.py",
    ),
    **dict.fromkeys(
        ("relu2", "swiglu"), ("cpp: activation_cpu.cpp", "triton: activation/triton.py")
    ),
    "rope": ("cpp: rope_cpu.cpp", "triton: rope_triton.py"),
    "embedding": ("torch; cpp: dropout_cpu.cpp", "triton: embedding_triton.py"),
    "linear": ("{gemm} (fp32); {gemm_bf16} (bf16); torch (fp16)", "torch"),
    "linear_fp8": (
        "products by {gemm}, of values rounded by torch (emulate)",
        "triton: linear/fp8_triton.py (casts, products with blocks); torch's scaled products",
    ),
    **dict.fromkeys(
        ("cross_entropy", "cross_entropy_shard", "cross_entropy_shard_grad"),
        ("cpp: cross_entropy_cpu.cpp", "triton: loss/triton.py"),
    ),
    "linear_cross_entropy": (
        "chunks of rows by {gemm}, cpp: cross_entropy_cpu.cpp between",
        "torch: GEMMs by chunks of rows, triton: loss/triton.py between",
    ),
    "adamw_step_": ("cpp: adamw_cpu.cpp", "cuda: adamw_cuda.cu"),
    "sum_shards": ("cpp: sum_shards_cpu.cpp", "cuda: sum_shards_cuda.cu"),
    "global_norm": ("cpp: global_norm_cpu.cpp", "cuda: global_norm_cuda.cu"),
    "quantize_blockwise": ("cpp: quantize_cpu.cpp", "cuda: quantize_cuda.cu"),
    "dequantize_blockwise": ("cpp: quantize_cpu.cpp", "cuda: quantize_cuda.cu"),
    "dropout": ("cpp: dropout_cpu.cpp", "triton: philox_triton.py"),
    **dict.fromkeys(("route", "permute", "combine"), ("torch", "torch")),
    "grouped_linear": (
        "{gemm} (fp32) or torch, expert by expert",
        "torch, expert by expert; its grouped product in bf16 where proven faster",
    ),
    "orthogonalize": ("products by {gemm} (fp32); torch (others)", "torch"),
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


# The remedy without the compiled module.
WITH_CPP = "install fastpar again, with a C++ compiler and without FASTPAR_CPP=0"


class _Module(types.ModuleType):
    """This module: the library for torch hears of a choice that is set from outside."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "choice":
            tell_library()


def tell_library() -> None:
    """What csrc/torch must know of the choice."""
    if _C is not None:
        torch.ops.fastpar._serve_cpu_by_python(choice == "triton")
        own = choice != "torch"
        torch.ops.fastpar._set_gemm(own and has_gemm, own and has_bf16_gemm)


choice = read_backend(os.environ.get("FASTPAR_BACKEND", "auto"))
if _C is not None:
    _C.set_isa(os.environ.get("FASTPAR_ISA", "auto"))
_isa = "" if _C is None else _C.isa()
gemm: str = os.environ.get("FASTPAR_GEMM", "auto")  # for tests: "own" where the CPU can, or "torch"
if gemm not in ("auto", "own", "torch"):
    raise ValueError(f"fastpar: expected FASTPAR_GEMM=auto, own or torch, got {gemm}; correct it")
# torch's fp32 products on CPU are MKL's, which uses AVX-512 on Intel machines only.
has_gemm: bool = gemm != "torch" and (
    (_isa == "avx512" and not _C.cpu_is_intel()) or (gemm == "own" and _isa in ("avx512", "amx"))
)
# bf16's are oneDNN's; linear/__init__.py, [Note: bf16 on AMX], says where ours are faster.
has_bf16_gemm: bool = gemm != "torch" and _isa == "amx"
sys.modules[__name__].__class__ = _Module
tell_library()
has_fma: bool = _C is not None and _C.has_fma()


def forced() -> str:
    """FASTPAR_BACKEND if it is set; "none" without the compiled module; "" for auto."""
    return "none" if _C is None else "" if choice == "auto" else choice


def way_to_cpp() -> str:
    """The remedy if torch runs instead of the compiled kernels."""
    return WITH_CPP if _C is None else "unset FASTPAR_BACKEND"


def use_cpp(op: str, x: Tensor) -> bool:
    """Whether `op`, which has a compiled CPU implementation, uses it for tensors like x.
    RuntimeError: FASTPAR_BACKEND=cpp and x is not a CPU tensor of a supported dtype."""
    able = x.is_cpu and x.dtype in DTYPE_CODES
    if able and choice == "auto" and not (choices.proofs or choices._trying):
        return True
    if choice == "cpp" and not able:
        raise RuntimeError(
            f"{op}: expected a CPU tensor of float32, bfloat16 or float16 under "
            f"FASTPAR_BACKEND=cpp, got device={x.device.type} dtype={x.dtype}; "
            "unset FASTPAR_BACKEND"
        )
    if not able or choice not in ("auto", "cpp"):
        return False
    return _allowed(op, x)


def _allowed(op: str, x: Tensor) -> bool:
    """Whether the proof of this class allows fastpar's kernel; choice.py."""
    if choice == "auto":
        return may_run(op, x)
    refuse_wrong(op, x, choice)
    return True


# The module whose CUDA kernels serve CUDA tensors; tests replace it by one that runs these kernels
# on a CPU, and `cuda_on_cpu` lets CPU tensors in.
cuda_kernels: Any = _C if _C is not None and _C.built_with_cuda else None
cuda_on_cpu = False

# A100: bf16 products, asynchronous copies; csrc/ is compiled for this and newer.
LEAST_CAPABILITY = (8, 0)
_able_gpus: set[int | None] = set()  # indices of GPUs that passed the check


def check_gpu(op: str, device: torch.device) -> None:
    """Refuses a GPU for which no kernel is compiled, once per GPU: AMD's, and those older than
    LEAST_CAPABILITY."""
    if device.index in _able_gpus:
        return
    name = torch.cuda.get_device_name(device)
    way_out = "set FASTPAR_BACKEND=torch for plain PyTorch"
    if torch.version.hip is not None:
        raise RuntimeError(
            f"{op}: expected an NVIDIA GPU, got {name} with ROCm {torch.version.hip}; {way_out}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise RuntimeError(
            f"{op}: expected a GPU of compute capability {least} or newer (A100, H100), got {name} "
            f"of {capability[0]}.{capability[1]}; {way_out}"
        )
    _able_gpus.add(device.index)


def use_cuda(op: str, x: Tensor) -> bool:
    """Whether `op`, which has a CUDA kernel in csrc/, uses it for tensors like x. RuntimeError: x
    is a CUDA tensor and the module was built without CUDA."""
    if not (x.is_cuda or cuda_on_cpu) or choice == "torch":
        return False
    if x.is_cuda and is_real(x):
        check_gpu(op, x.device)
    if cuda_kernels is None:
        raise RuntimeError(
            f"{op}: expected fastpar.kernels._C with CUDA for tensors on {x.device}, got none "
            f"({_why_without_cuda()}); {_WITH_CUDA}"
        )
    return _allowed(op, x)


_WITH_CUDA = (
    "put nvcc on the PATH (or set CUDA_HOME) and repeat `FASTPAR_CUDA=1 pip install -e .`, or set "
    "FASTPAR_BACKEND=torch"
)


def _why_without_cuda() -> str:
    if _C is None:
        return "FASTPAR_CPP=0 when it was installed"
    return getattr(_C, "why_without_cuda", "") or "an older build"


def cuda_stream(x: Tensor) -> int:
    """The current stream of x's device as an integer; call under torch.cuda.device(x.device)."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


def run_compiled(name: str, cuda: bool, x: Tensor, *args: Any) -> None:
    """Runs the compiled function of that name, on x's GPU if cuda, else on torch's threads."""
    if cuda:
        with torch.cuda.device_of(x):
            getattr(cuda_kernels, f"{name}_cuda")(*args, cuda_stream(x))
    else:
        getattr(_C, name)(*args, torch.get_num_threads())


# Whether launches for tensors on the CPU and the meta device are recorded instead of run:
# fastpar/doctor/trial.py sets it.
recording = False
at_each_call: list[Callable[[], None]] = []  # of an op with Triton kernels, on a GPU
# Found at import: torch.compile warns about functools.cache.
has_triton: bool = importlib.util.find_spec("triton") is not None


@functools.cache
def triton_module(name: str) -> Any:
    """A module of Triton kernels by its path below kernels/, imported at first use."""
    module = importlib.import_module(f"fastpar.kernels.{name}")
    # In Triton 3.6 a kernel has another key if a function that it calls has none yet: what other
    # processes compiled (doctor/trial.py, warm) would not be found.
    for function in list(vars(module).values()):
        getattr(function, "cache_key", None)
    return module


def use_triton(op: str, x: Tensor) -> bool:
    """Whether `op`, which has Triton kernels, uses them for tensors like x. RuntimeError: x is a
    CUDA tensor and Triton is not installed; FASTPAR_BACKEND=triton and x is of another dtype or
    device, or on the CPU without Triton's interpreter."""
    cuda = x.is_cuda
    if choice != "triton" and not (cuda and choice == "auto"):
        return False
    able = x.dtype in DTYPE_CODES
    if choice == "triton":
        interpreted = recording or (
            x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        )
        if not (able and (cuda or interpreted)):
            raise RuntimeError(
                f"{op}: expected a CUDA tensor of float32, bfloat16 or float16 under "
                "FASTPAR_BACKEND=triton (or a CPU tensor with TRITON_INTERPRET=1), got "
                f"device={x.device.type} dtype={x.dtype}; unset FASTPAR_BACKEND"
            )
    if able and not has_triton:
        raise RuntimeError(
            f"{op}: expected Triton for tensors on {x.device}, got no triton package; "
            "`pip install triton`, or set FASTPAR_BACKEND=torch for plain PyTorch"
        )
    if able and cuda and is_real(x):
        check_gpu(op, x.device)
        for look in at_each_call:
            look()
    return able and _allowed(op, x)


def keep_freed_memory() -> bool:
    """Keeps freed CPU memory mapped in this process; returns whether the C library supports it.

    By default glibc maps and unmaps the large buffers of every training step, at the cost of page
    faults. Afterwards the heap grows to slightly more than the peak of live memory. This cannot be
    undone, so an application calls it (the trainer does), never a library on import.
    """
    return _C is not None and _C.keep_freed_memory()


_FASTEST = "torch's kernel: fastpar has no faster one for this machine, nothing to change"


def _forced() -> str:
    """Why torch serves an op that could have kernels."""
    if _C is None:
        return f"installed with FASTPAR_CPP=0; {WITH_CPP}"
    return f"FASTPAR_BACKEND={choice} is set; unset it"


def _on_cpu(cpu: str, gpu: str) -> tuple[str, str]:
    """(what runs on CPU tensors, why it is torch or nothing)"""
    if choice == "triton" and "triton: " in gpu:
        if os.environ.get("TRITON_INTERPRET") == "1":
            return f"interpreted {gpu[gpu.index('triton: ') :]}", ""
        why = "FASTPAR_BACKEND=triton runs on a CPU with TRITON_INTERPRET=1 only; unset it"
        return "refused", why
    if choice in ("torch", "triton"):
        return "torch", _forced()
    own = {True: "cpp: gemm_cpu.cpp", False: "torch.mm"}
    cpu = cpu.format(gemm=own[has_gemm], gemm_bf16=own[has_bf16_gemm])
    return cpu, _FASTEST if "torch" in cpu else ""


def _on_cuda(cpu: str, gpu: str) -> tuple[str, str]:
    """(what runs on CUDA tensors, why it is torch or nothing)"""
    if choice == "torch":
        return "torch", _forced()
    if choice == "cpp" and "cpp: " in cpu:
        return "refused", "FASTPAR_BACKEND=cpp is for CPU tensors; unset it"
    if "cuda: " in gpu and cuda_kernels is None:
        return "refused", f"the module is without CUDA ({_why_without_cuda()}); {_WITH_CUDA}"
    if "triton: " in gpu and not has_triton:
        return "refused", "no triton package; `pip install triton`, or set FASTPAR_BACKEND=torch"
    return gpu, _FASTEST if "torch" in gpu else ""


def describe() -> str:
    """The text of `fastpar info`: which implementation of each op runs on this machine, and why."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    gpu = torch.cuda.is_available()
    lines = [
        f"machine   {platform.machine()}, Python {platform.python_version()}",
        f"torch     {torch.__version__} (CUDA {torch.version.cuda or 'none'}), "
        f"{torch.get_num_threads()} CPU threads",
        f"OpenMP    OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'unset: threads spin')}",
        f"GPU       {torch.cuda.get_device_name() if gpu else 'none'}",
        f"triton    {triton}",
    ]
    if _C is None:
        lines.append(f"_C        none: {_forced()}")
    else:
        supported = [n for n in ("baseline", "avx2", "avx512", "amx") if _C.isa_supported(n)]
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
