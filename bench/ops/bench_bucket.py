"""What moves gradients between tensors and buckets, on GPT-2's own list of tensors.

"eager" is a loop over the tensors, "foreach" is torch's own list operation where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, Case, short
from bench.peers import stock
from fastpar.kernels import accumulate_, pack_, sum_shards, unpack_
from fastpar.kernels.reference import accumulate_ref, pack_ref, sum_shards_ref, unpack_ref

TIME_LIMIT_S = {"cpu": 200, "cuda": 40}
SMALL = [torch.Size(shape) for shape in ((37,), (5, 9), (1,), (300,))]
NARROW = torch.bfloat16
WORLD = 4
INTO = "bf16 into fp32"


def parts(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where in flat the tensors go."""
    pieces = flat.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors)]


def one_by_one(op: Callable[..., Any], to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for t, value in zip(to, values):
        op(t, value)


# Of a flat buffer or a list, and a list of tensors.
WAYS: dict[str, dict[str, Callable[..., Any]]] = {
    "pack": {
        "eager": lambda flat, ts: one_by_one(Tensor.copy_, parts(flat, ts), ts),
        "foreach": lambda flat, ts: torch._foreach_copy_(parts(flat, ts), ts),
        "fastpar": pack_,
        "oracle": pack_ref,
    },
    "unpack": {
        "eager": lambda flat, ts: one_by_one(Tensor.copy_, ts, parts(flat, ts)),
        "foreach": lambda flat, ts: torch._foreach_copy_(ts, parts(flat, ts)),
        "fastpar": lambda flat, ts: unpack_(ts, flat),
        "oracle": lambda flat, ts: unpack_ref(ts, flat),
    },
    "accumulate": {
        "eager": lambda totals, ts: one_by_one(Tensor.add_, totals, ts),
        "foreach": torch._foreach_add_,
        "fastpar": accumulate_,
        "oracle": accumulate_ref,
    },
}


def list_case(
    name: str, shapes: list[torch.Size], dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> Case:
    """dtypes: of the flat buffer or of the totals, and of the tensors."""
    flat = name != "accumulate"

    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        wanted = SMALL if small else shapes
        first = [torch.Size([sum(shape.numel() for shape in wanted)])] if flat else wanted
        return tuple(
            torch.randn(shape, generator=generator, device=device, dtype=dtype)
            for dtype, some in zip(dtypes, (first, wanted))
            for shape in some
        )

    def by(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            half = 1 if flat else len(tensors) // 2
            first, rest = list(tensors[:half]), list(tensors[half:])
            op(first[0] if flat else first, rest)
            return rest if name == "unpack" else first

        return call

    calls = {way: by(op) for way, op in WAYS[name].items()}
    oracle = calls.pop("oracle")
    numel = sum(shape.numel() for shape in shapes)
    moved = sum(d.itemsize for d in dtypes) + (0 if flat else dtypes[0].itemsize)  # totals: twice
    return Case(
        f"{name} {len(shapes)} tensors" if flat else f"{name} {INTO}, {len(shapes)} tensors",
        make_inputs,
        calls,
        oracle,
        dtypes[1] if name == "unpack" else dtypes[0],
        bytes_moved={"call": float(numel * moved)},
        directions=("call",),
        compiled=False,
        in_place=() if flat else tuple(calls),
    )


def shards_case(numel: int, dtype: torch.dtype, device: str) -> Case:
    def make_inputs(generator: torch.Generator, small: bool) -> tuple[Tensor, ...]:
        n = 1001 if small else numel
        received = torch.randn(WORLD, n, generator=generator, device=device, dtype=dtype)
        return received, torch.empty(n, device=device)

    def eager(received: Tensor, out: Tensor) -> Tensor:
        return torch.sum(received, 0, dtype=torch.float32, out=out)

    def by(op):
        def call(received: Tensor, out: Tensor) -> Tensor:
            op(received, out)
            return out

        return call

    narrow = "fp32" if dtype == torch.float32 else "bf16"
    return Case(
        f"sum_shards of {WORLD}, {narrow} into fp32, {short(numel)}",
        make_inputs,
        {"eager": eager, "fastpar": by(sum_shards)},
        by(sum_shards_ref),
        torch.float32,
        bytes_moved={"call": float(numel * (WORLD * dtype.itemsize + 4))},
        directions=("call",),
        compiled=False,
    )


def run(bench: Bench) -> None:
    shapes = stock.gpt2_shapes(bench.quick)
    shard = 1000 if bench.quick else 25_000_000
    bench.run(
        [
            list_case("pack", shapes, (NARROW, torch.float32), bench.device),
            list_case("unpack", shapes, (NARROW, torch.float32), bench.device),
            list_case("accumulate", shapes, (torch.float32, NARROW), bench.device),
            shards_case(shard, torch.float32, bench.device),
            shards_case(shard, NARROW, bench.device),
        ]
    )
