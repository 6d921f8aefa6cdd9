"""Host time of the Triton ops without a GPU: what Python and C++ do until a kernel is in the queue.

    python -m bench.compiler.host_time                  a table
    python -m bench.compiler.host_time --write LABEL    and its rows: bench/results/host/LABEL.json
    python -m bench.compiler.host_time --profile NAME   where one case's time goes

[Note: no-op driver] Triton's own CUDA driver and launcher run, over a libcuda.so.1 compiled here in
which every function succeeds and does nothing. Kernels are compiled for sm_90, their arguments are
packed and their descriptors filled as on a GPU; none is launched. Tensors lie on the CPU and are
few rows long, so that allocating them costs what a caching allocator costs; nothing reads them.
What a GPU adds is not in these times: cuLaunchKernel itself (2 to 3 us), and the hand-over of
backward to autograd's thread. The rows "torch: ..." are what PyTorch itself takes for an
autograd.Function of three inputs that only allocates its results, and for its own ops on the CPU
with 8 elements, so that computing takes no time. "forward" is the public function without
gradients, "recorded" the same on inputs that need some, autograd.Function and the end of its graph
included; "backward" is torch.autograd.grad, its engine included, "one more" what each further call
adds to such a backward, which is what a call costs in a training step: torch.autograd.grad's own
Python is paid there once; "launches" is the number of kernels of both directions.
Times are this thread's CPU time, the fastest tenth of many chunks: other processes only add to it.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import json
import os
import pstats
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.records import RESULTS, ROOT, machine, machine_line
from fastpar.kernels import (
    Rng,
    attention_qkvpacked,
    backend,
    bias_gelu,
    choice,
    cross_entropy,
    embedding,
    layer_norm,
    make_key,
    residual_layer_norm,
    rms_norm,
)

FOLDER = ROOT / "build" / "host_time"
CALLS, CHUNKS = 20, 100
MORE = 6  # calls that are added to a backward

# Functions whose first parameter is the address of what they return.
_OUTPUTS = {
    "cuCtxGetCurrent": "*(void **)out = (void *)1;",
    "cuDevicePrimaryCtxRetain": "*(void **)out = (void *)1;",
    "cuModuleLoadData": "*(void **)out = (void *)1;",
    "cuModuleGetFunction": "*(void **)out = (void *)1;",
    "cuDeviceGet": "*(int *)out = 0;",
    "cuDeviceGetAttribute": "*(int *)out = 232448;",  # asked for: bytes of shared memory
    "cuDriverGetVersion": "*(int *)out = 13000;",
    "cuFuncGetAttribute": "*(int *)out = 1024;",  # asked for: threads a block may have
    "cuPointerGetAttribute": "*(unsigned long *)out = c;",
    "cuStreamIsCapturing": "",
    "cuLaunchKernelEx": "++launches;",
    "cuLaunchKernel": "++launches;",
    "cuTensorMapEncodeTiled": "",
}


def build_driver(own: str = "") -> Path:
    """Compiles the libcuda.so.1 of [Note: no-op driver] for the installed Triton.

    own: source of functions, and a counter of launches, in place of these.
    """
    import triton.backends.nvidia as nvidia

    source = (Path(nvidia.__path__[0]) / "driver.c").read_text()
    names = sorted({*re.findall(r"\bcu[A-Z]\w+", source), *_OUTPUTS})
    lines = ["long launches;"] if not own else [own]
    for name in names:
        if f" {name}(" in own:
            continue
        body = _OUTPUTS.get(name, "")
        lines.append(
            f"int {name}(void *out, unsigned long b, unsigned long c) {{{body} return 0;}}"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    text, library = FOLDER / "driver.c", FOLDER / "libcuda.so.1"
    text.write_text("\n".join(lines) + "\n")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(text)]
    subprocess.run(command, check=True)
    return library


@contextmanager
def no_op_driver(own: str = "") -> Iterator[Callable[[], int]]:
    """Triton's CUDA driver over the no-op library; yields a counter of launches."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(FOLDER)
    os.environ["TRITON_CACHE_DIR"] = str(FOLDER / "triton")
    library = ctypes.CDLL(str(build_driver(own)), mode=ctypes.RTLD_GLOBAL)
    from triton.backends.driver import GPUDriver
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    class Driver(CudaDriver):
        """Without a GPU in torch."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return 9, 0

    def init(self: Any) -> None:
        """Leaves out torch's functions for CUDA."""

    before, GPUDriver.__init__ = GPUDriver.__init__, init
    try:
        driver.set_active(Driver())
    finally:
        GPUDriver.__init__ = before
    state = backend.choice, backend.recording
    backend.choice, backend.recording = "triton", True  # tensors on the CPU take the kernels
    case = choice.Case("cpu", "none", torch.float32, 0)
    choice.proofs[case] = choice.Proof(choice.OWN)  # so that proofs are looked up
    try:
        yield lambda: ctypes.c_long.in_dll(library, "launches").value
    finally:
        backend.choice, backend.recording = state
        del choice.proofs[case]
        driver._active = None


class Case(NamedTuple):
    """A call of an op, and its inputs that need gradients."""

    call: Callable[[], Any]
    inputs: tuple[Tensor, ...]


class _Nothing(torch.autograd.Function):
    """What autograd alone takes."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _Join(torch.autograd.Function):
    """One output of many, whose gradients are ready."""

    @staticmethod
    def forward(ctx, *xs):
        ctx.grads = tuple(map(torch.empty_like, xs))
        return torch.empty(1)

    @staticmethod
    def backward(ctx, _):
        return ctx.grads


def floor() -> dict[str, Case]:
    """PyTorch's own part, and its own ops where nothing is to compute."""

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape).to(torch.bfloat16).requires_grad_()

    x, w, b, q = make(1, 8), make(8), make(8), make(1, 1, 1, 8)
    return {
        "torch: empty autograd.Function": Case(lambda: _Nothing.apply(x, w, b), (x, w, b)),
        "torch: F.layer_norm": Case(lambda: F.layer_norm(x, (8,), w, b), (x, w, b)),
        "torch: F.gelu(x + bias)": Case(lambda: F.gelu(x + b, approximate="tanh"), (x, b)),
        "torch: SDPA": Case(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), (q,)),
    }


def cases() -> dict[str, Case]:
    """GPT-2's calls in bf16 on 64 rows."""
    bf16 = torch.bfloat16
    B, T, C, H = 1, 64, 768, 12

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape).to(bf16).requires_grad_()

    x, r, w, b, xb = make(B, T, C), make(B, T, C), make(C), make(C), make(C)
    u, ub, qkv, logits = make(B, T, 4 * C), make(4 * C), make(2, T, 3, H, 64), make(B * T, 512)
    wte, wpe = make(512, C), make(T, C)
    ids = torch.randint(512, (B, T))
    p, rng = 0.1, Rng(make_key(1, 0), 0)
    return {
        "layer_norm": Case(lambda: layer_norm(x, w, b), (x, w, b)),
        "rms_norm": Case(lambda: rms_norm(x, w), (x, w)),
        "residual_layer_norm": Case(
            lambda: residual_layer_norm(x, r, w, b, x_bias=xb), (x, r, w, b, xb)
        ),
        "residual_layer_norm dropout": Case(
            lambda: residual_layer_norm(x, r, w, b, x_bias=xb, dropout_p=p, rng=rng),
            (x, r, w, b, xb),
        ),
        "bias_gelu": Case(lambda: bias_gelu(u, ub), (u, ub)),
        "attention": Case(lambda: attention_qkvpacked(qkv), (qkv,)),
        "attention dropout": Case(lambda: attention_qkvpacked(qkv, dropout_p=p, rng=rng), (qkv,)),
        "embedding": Case(lambda: embedding(ids, wte, wpe), (wte, wpe)),
        "cross_entropy": Case(lambda: cross_entropy(logits, ids.view(-1)), (logits,)),
    }


def measure(call: Callable[[], Any]) -> float:
    """Microseconds of this thread a call."""
    times = []
    for _ in range(CHUNKS):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time_ns() - start) / CALLS / 1e3)
    return round(sorted(times)[CHUNKS // 10], 1)


def backward_of(*cases: Case) -> Callable[[], Any]:
    """Backward alone, again and again over one graph: of one call, or of several, joined."""
    outs = []
    for case in cases:
        out = case.call()
        outs += [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    if len(cases) > 1:
        outs = [_Join.apply(*outs)]
    inputs = [t for case in cases for t in case.inputs]
    grads = [torch.ones_like(t) for t in outs]
    return lambda: torch.autograd.grad(outs, inputs, grads, retain_graph=True)


def measure_one_more(name: str) -> float:
    """Microseconds that a further call, on inputs of its own, adds to a backward."""
    calls = [(floor() | cases())[name] for _ in range(MORE + 2)]
    few, many = measure(backward_of(*calls[:2])), measure(backward_of(*calls))
    return round((many - few) / MORE, 1)


def rows(only: str) -> Iterator[dict[str, Any]]:
    """One row a case, by name."""
    with no_op_driver() as launches:
        for name, case in (floor() | cases()).items():
            if only and only != name:
                continue
            backward = backward_of(case)
            backward()  # compiles
            start = launches()
            case.call()
            backward()
            count = launches() - start
            with torch.no_grad():
                row = {"case": name, "forward_us": measure(case.call)}
            row |= {"recorded_us": measure(case.call), "backward_us": measure(backward)}
            yield row | {"one_more_us": measure_one_more(name), "launches": count}


def profile(name: str) -> None:
    """cProfile of one case, forward and backward."""
    with no_op_driver():
        case = (floor() | cases())[name]
        backward = backward_of(case)
        for call in (case.call, backward):
            call()
            stats = cProfile.Profile()
            with stats:
                for _ in range(1000):
                    call()
            pstats.Stats(stats).sort_stats("tottime").print_stats(25)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="one case")
    parser.add_argument("--write", metavar="LABEL", help="the name of a result file")
    parser.add_argument("--profile", metavar="NAME", help="where this case's time goes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    backend.keep_freed_memory()
    if args.profile:
        profile(args.profile)
        return 0
    import triton

    found = []
    print(f"us of host time, Triton {triton.__version__}, {machine_line(machine('cpu'))}")
    for row in rows(args.only):
        found.append(row)
        print(
            f"{row['case']:<30} forward {row['forward_us']:6.1f}  recorded "
            f"{row['recorded_us']:6.1f}  backward {row['backward_us']:6.1f}  one more "
            f"{row['one_more_us']:6.1f}  launches {row['launches']}",
            flush=True,
        )
    if args.write:
        path = RESULTS / "host" / f"{args.write}.json"
        path.parent.mkdir(exist_ok=True)
        about = {"machine": machine_line(machine("cpu")), "rows": found}
        path.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
