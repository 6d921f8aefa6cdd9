"""The 2-norm of all gradients: one flat buffer, and GPT-2's own list of tensors.

fastpar also gives the clip factor and the overflow flag. "clip_grad_norm_" scales the gradients by
it in a pass of its own, which fastpar leaves to the optimizer step (bench_adamw.py has both
together).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import Bench, Case, short
from bench.peers import stock
from fastpar.kernels import global_norm
from fastpar.kernels.reference import global_norm_ref

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}
SIZES = {"cpu": (1_000_000, 50_000_000), "cuda": (1_000_000, 124_000_000, 1_500_000_000)}


def eager(*grads: Tensor) -> Tensor:
    return torch.nn.utils.get_total_norm(grads).float()


def clip(*grads: Tensor) -> Tensor:
    norm = torch.nn.utils.get_total_norm(grads)
    params = []
    for g in grads:
        p = torch.empty_like(g)
        p.grad = g
        params.append(p)
    torch.nn.utils.clip_grads_with_norm_(params, 1.0, norm)
    return norm.float()


def case(name: str, shapes: list[torch.Size], dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        wanted = [torch.Size([1001])] * 3 if small else shapes
        return tuple(
            torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in wanted
        )

    numel = sum(shape.numel() for shape in shapes)
    return Case(
        f"global_norm {name}",
        make_inputs,
        {
            "eager": eager,
            "clip_grad_norm_": clip,
            "fastpar": lambda *grads: global_norm(grads, max_norm=1.0).norm,
        },
        lambda *grads: global_norm_ref(list(grads), max_norm=1.0)[0],
        dtype,
        bytes_moved={"call": float(numel * dtype.itemsize)},
        own_bytes={"clip_grad_norm_": 3.0 * numel * dtype.itemsize},
        directions=("call",),
        compiled=len(shapes) == 1,  # a graph of 148 norms takes a minute to compile
        in_place=("clip_grad_norm_",),
        # In a 16-bit type torch's norm is rounded to it.
        yardstick=lambda *grads: torch.nn.utils.get_total_norm([g.float() for g in grads]),
        unjudged=("clip_grad_norm_", "torch.compile") if dtype != torch.float32 else (),
    )


def run(bench: Bench) -> None:
    sizes = (10_000,) if bench.quick else SIZES[bench.device]
    gpt2 = stock.gpt2_shapes(bench.quick)
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        name = "fp32" if dtype == torch.float32 else "bf16"
        cases += [case(f"{name} {short(n)}", [torch.Size([n])], dtype, bench.device) for n in sizes]
        cases.append(case(f"{name} GPT-2, {len(gpt2)} tensors", gpt2, dtype, bench.device))
    bench.run(cases)
