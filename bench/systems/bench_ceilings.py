"""What the machine does at best: copy bandwidth, and matmul rates at GPT-2's shapes.

Every other row's percent of the ceiling is of the copy and of the square matmul as its own process
measured them, in the same way (fastpar/measure/ceilings.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness import Bench, Case

TIME_LIMIT_S = {"cpu": 120, "cuda": 60}


def copy_case(numel: int, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        source = torch.randn(numel, generator=generator, device=device)
        return torch.empty_like(source), source

    return Case(
        f"copy {8 * numel / 1e6:.0f} MB",
        make_inputs,
        {"eager": lambda target, source: target.copy_(source)},
        None,
        torch.float32,
        bytes_moved={"forward": 8.0 * numel},
        directions=("forward",),
        compiled=False,
    )


def matmul_case(name: str, M: int, K: int, N: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        a = torch.randn(M, K, generator=generator, device=device, dtype=dtype)
        return a, torch.randn(N, K, generator=generator, device=device, dtype=dtype)

    return Case(
        f"matmul {name} {M}x{K}x{N}",
        make_inputs,
        {"eager": torch.nn.functional.linear},
        None,
        dtype,
        flops={"forward": 2.0 * M * K * N},
        directions=("forward",),
        compiled=False,
    )


def run(bench: Bench) -> None:
    on_cuda = bench.device == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    rows, square = (16384, 8192) if on_cuda else (2048, 1536)
    widths = [768, 1600] if on_cuda else [384, 768]
    sizes = [1 << 28, 1 << 24] if on_cuda else [1 << 25]
    if bench.quick:
        rows, widths, square, sizes = 64, [64], 128, [1 << 16]
    V = 512 if bench.quick else 50304
    cases = [copy_case(numel, bench.device) for numel in sizes]
    shapes = [("square", square, square, square)]
    for C in widths:
        shapes += [
            ("c_attn", rows, C, 3 * C),
            ("attn.c_proj", rows, C, C),
            ("c_fc", rows, C, 4 * C),
            ("mlp.c_proj", rows, 4 * C, C),
            ("head", rows, C, V),
        ]
    cases += [matmul_case(*shape, dtype, bench.device) for shape in shapes]
    bench.run(cases)
